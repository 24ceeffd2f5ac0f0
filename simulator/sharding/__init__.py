"""From one placement of a tensor to another.

In:      placements on a mesh.
Out:     conversions as collectives, homes of parameters, what a plan decides about an operator.
Imports: graph, hardware and below.
"""
