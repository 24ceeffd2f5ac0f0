"""What a plan means to other frameworks.

In:      a plan and its graph.
Out:     degrees, placements, units and styles, with what is lost.
Imports: the search, the simulator.
"""
