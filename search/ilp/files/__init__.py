"""Files of others that hold integer programs.

In:      files of a contest.
Out:     problems.
Imports: ilp.problem, simulator.base.
"""
