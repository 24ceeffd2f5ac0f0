"""What every aten operator becomes in a graph.

In:      calls in an exported program.
Out:     calls of a graph builder; an argument that nobody reads is refused.
Imports: torch_ops.kernels, graph.building and below.
"""
