"""Choices for integer programs.

In:      a reduced problem and bounds.
Out:     the best choices, or good ones and how far they may be off.
Imports: ilp.bounds, ilp.problem, simulator.base.
"""
