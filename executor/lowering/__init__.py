"""From a plan to a program.

In:      a plan and its graph.
Out:     instructions for every rank.
Imports: program, the simulator; no torch.
"""
