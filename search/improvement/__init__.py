"""From a plan to a better one.

In:      a plan.
Out:     what work on it came to.
Imports: problem, annealing, ilp, stage_dp and below.
"""
