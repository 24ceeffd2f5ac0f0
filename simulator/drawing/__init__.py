"""Pictures of plans, clusters, graphs and searches: SVG as text, for notebooks and reports.

Nothing is imported for them, and their letters take the colour of the page that they stand on, so
that they are read on a light one and on a dark one.

In:      plans, clusters, graphs, timelines, memory, forecasts.
Out:     SVG and pictures of matplotlib.
Imports: forecast, simulation and below.
"""
