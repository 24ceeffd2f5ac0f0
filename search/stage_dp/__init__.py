"""The inter-operator planner: stages, sub-meshes and microbatches by dynamic programming."""
