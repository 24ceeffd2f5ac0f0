"""Exact splits for the problems of other planners.

In:      their models.
Out:     the best splits.
Imports: planners.inputs, simulator.base.
"""
