"""Chains of random changes (MCMC), scored as they are made.

In:      a problem and a choice to begin with.
Out:     better choices.
Imports: problem, processes, the simulator.
"""
