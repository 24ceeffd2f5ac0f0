"""The whole search: phases, what is known so far, the result.

In:      a situation, a budget, wishes.
Out:     the best plan found, and how far from the best it can be.
Imports: methods and below, robustness, the simulator.
"""
