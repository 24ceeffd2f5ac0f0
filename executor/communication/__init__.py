"""How ranks talk: the contract.

In:      tensors.
Out:     the interface that every backend keeps.
Imports: simulator.hardware.
"""
