"""A skeleton with every price looked up.

In:      a skeleton and its choices.
Out:     arrays in which a plan is scored by look-ups; all plans of a small one.
Imports: space, the simulator.
"""
