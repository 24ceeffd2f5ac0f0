"""Optimizers, on the parts of parameters that a rank has at home.

In:      parts of parameters and of their gradients.
Out:     the parts, updated, and what is remembered of each.
Imports: state, cuda, program.instructions, the simulator.
"""
