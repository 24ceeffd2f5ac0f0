"""Parameters in parts, with all of them that outlives a step, and their gradients.

In:      whole tensors.
Out:     parts, updated; whole tensors again.
Imports: resharding, communication, program, program.instructions, the simulator.
"""
