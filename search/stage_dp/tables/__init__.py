"""What stages cost, wherever they are cut.

In:      a situation.
Out:     prices of runs of operators on meshes, in tables.
Imports: space, the simulator.
"""
