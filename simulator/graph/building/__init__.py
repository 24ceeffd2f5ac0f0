"""Building graphs.

In:      calls of a builder, one an operator.
Out:     a graph whose dims are those that all its operators agree on.
Imports: graph and below.
"""
