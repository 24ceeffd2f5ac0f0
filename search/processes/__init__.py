"""Working in other processes, and going on after an end.

In:      functions and their arguments.
Out:     their results; files to go on from.
Imports: simulator.base, simulator.plan.
"""
