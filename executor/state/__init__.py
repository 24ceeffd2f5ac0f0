"""Parameters and what optimizers keep of them, in parts.

In:      whole tensors.
Out:     parts, updated; whole tensors again.
Imports: resharding, cuda, communication, program, the simulator.
"""
