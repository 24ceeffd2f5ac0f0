"""Choices with costs of their own and of pairs, reduced as far as can be proved.

In:      costs.
Out:     a smaller problem with the same best choices.
Imports: simulator.base.
"""
