"""Parameters and their gradients, in parts.

In:      whole tensors.
Out:     parts, updated; whole tensors again.
Imports: resharding, communication, program, program.instructions, the simulator.
"""
