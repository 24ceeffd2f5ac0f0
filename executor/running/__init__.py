"""Whole runs, wherever their ranks are.

In:      a plan, a model, data.
Out:     what it came to, checked if wished.
Imports: training, lowering and below, the simulator.
"""
