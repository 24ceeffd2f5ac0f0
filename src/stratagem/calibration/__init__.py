"""What this machine is like, for the simulator: the executor and the profiler together.

In:      a space, a cluster.
Out:     measured costs and links.
Imports: basics, the executor, the profiler, the search, the simulator.
"""
