"""A pipeline with every price looked up, whoever asks: a plan, a search, a method of literature.

In:      stages on meshes under a schedule, a graph, choices of every operator.
Out:     cost tables, blocks, lifetimes and crossings of all stages, the macro graph.
Imports: cells, plan, stage and below.
"""
