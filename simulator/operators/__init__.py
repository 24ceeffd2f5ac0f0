"""Operators: loops with names, what kinds there are, what their values mean.

In:      sizes and layouts.
Out:     operators, their kinds, what they save, which values are sums over samples.
Imports: base.
"""
