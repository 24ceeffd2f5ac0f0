"""Pipeline schedules: what every rank does, in which order.

In:      numbers of stages, ranks and microbatches.
Out:     actions, checked; the macro graph of a step.
Imports: timeline, engine and base.
"""
