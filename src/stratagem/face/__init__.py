"""The functions that users call, and what a notebook shows.

In:      models, graphs, clusters, plans.
Out:     what the packages below make of them.
Imports: calibration, exports, runs, the search and below.
"""
