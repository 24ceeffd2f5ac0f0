"""Running operators of a graph in torch.

In:      local shards.
Out:     their results, on any device.
Imports: torch_ops.generic, operators.kinds, operators, plan.
"""
