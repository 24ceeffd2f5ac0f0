"""Operators without a rule of their own: found out by trying instead of looked up.

In:      exported calls of torch and the shapes that they read.
Out:     which dims may be split, and what a pass costs.
Imports: operators, operators.kinds.
"""
