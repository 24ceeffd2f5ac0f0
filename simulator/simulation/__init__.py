"""What a plan's step takes and holds.

In:      a plan and its graph.
Out:     times, memory, a timeline, words.
Imports: pipeline and below.
"""
