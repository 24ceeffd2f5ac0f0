"""How each instruction is run, beside the kernels that it runs.

In:      an instruction, and what its rank has.
Out:     an action: a function without arguments.
Imports: optimizers, state, resharding, communication, program and below.
"""
