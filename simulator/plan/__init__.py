"""Plans: who computes what, where, in which order.

In:      choices, meshes, a schedule.
Out:     a checked plan and its file.
Imports: schedules, sharding, kernel_times, graph.substitutions and below.
"""
