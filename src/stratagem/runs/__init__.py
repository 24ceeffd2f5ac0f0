"""Running plans for a model in memory here, and holding them against predictions.

In:      a plan, a model, batches.
Out:     results and comparisons.
Imports: basics, the executor, the simulator.
"""
