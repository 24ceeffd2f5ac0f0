"""Kinds of operators: one record for all that is known of each.

In:      an operator, local sizes.
Out:     operations, products, bytes, what backward needs, collectives inside, what sums it makes.
Imports: operators, base.
"""
