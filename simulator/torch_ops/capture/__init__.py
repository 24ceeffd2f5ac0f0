"""From a module of torch to a graph.

In:      a module and an example batch.
Out:     a graph, checked against what torch exported.
Imports: torch_ops.aten, torch_ops.generic, torch_ops.blocks and below.
"""
