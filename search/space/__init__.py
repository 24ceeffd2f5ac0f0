"""What may be chosen.

In:      a graph, a cluster, wishes.
Out:     skeletons (stages, meshes, schedules) and the choices of their operators.
Imports: processes, the simulator.
"""
