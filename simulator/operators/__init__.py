"""Operators: loops with names, and what their programs, windows and shards mean.

In:      sizes and layouts.
Out:     operators, what their steps save, windows, the collectives inside their kernels.
Imports: nothing of ours.
"""
