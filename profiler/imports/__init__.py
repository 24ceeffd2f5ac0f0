"""Times that others took.

In:      their files.
Out:     entries of the cache.
Imports: cache, the simulator.
"""
