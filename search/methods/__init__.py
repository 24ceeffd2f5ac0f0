"""Plans by name: simple strategies and those of papers.

In:      a situation and a name.
Out:     a plan.
Imports: methods.literature, placement, improvement, stage_dp and below.
"""
