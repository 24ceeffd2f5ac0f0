"""The best plan for a model on a cluster, and how far from the best it can be.

It is imported as `stratagem.searcher`; `stratagem.search` is the function. Rooms in the order that
data flows: `space`, `problem`, `annealing`, `bounds`, `stage_dp`, `ilp`, `improvement`, `methods`,
`driver`, `report`; beside them `planners`, `processes` and `robustness`.
"""
