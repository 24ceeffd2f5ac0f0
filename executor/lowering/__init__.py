"""From a plan to a program.

In:      a plan and its graph.
Out:     instructions for every rank.
Imports: lowering.passes, program, program.instructions, the simulator; no torch.
"""
