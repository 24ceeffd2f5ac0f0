"""How sure the choice among plans is.

In:      a graph, plans for it and prices, with the errors that the cost model states.
Out:     what the plans take under drawn errors (`robust_choice`, by `erring_prices`).
Imports: the simulator.
"""
