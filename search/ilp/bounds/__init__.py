"""Lower bounds on integer programs.

In:      a reduced problem.
Out:     bounds by dual ascent and linear relaxation.
Imports: ilp.problem, simulator.base.
"""
