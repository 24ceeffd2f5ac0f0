"""Graphs of operators, and how a device may hold a part of each.

In:      operators.
Out:     a checked graph, its file, its microbatches, token slices and segments; placements.
Imports: operators.kinds, operators, base.
"""
