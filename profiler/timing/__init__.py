"""Taking times.

In:      operators, updates, collectives.
Out:     entries of the cache.
Imports: machine, cache, basics, the simulator.
"""
