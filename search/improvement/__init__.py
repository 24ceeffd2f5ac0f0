"""From a plan to a better one.

In:      a plan.
Out:     what work on it came to.
Imports: annealing, bounds, ilp, stage_dp.tables and below.
"""
