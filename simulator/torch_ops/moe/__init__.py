"""Mixtures of experts as torch modules.

In:      tokens and gates.
Out:     functions that a model calls and a capture knows.
Imports: torch_ops.kernels, graph.building and below.
"""
