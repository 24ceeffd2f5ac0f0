"""The inter-operator planner: stages, sub-meshes and microbatches by dynamic programming.

In:      a situation.
Out:     candidate pipelines: stages, sub-meshes, microbatches.
Imports: stage_dp.tables, space, processes, the simulator.
"""
