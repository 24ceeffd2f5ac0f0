"""Parts of models that torch.export would not tell: mixtures of experts, selective scans.

In:      modules, tokens and gates, sequences.
Out:     functions that a model calls and a capture knows, and forward passes made of them.
Imports: torch_ops.kernels, graph.building and below.
"""
