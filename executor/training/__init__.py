"""Steps, one after the other.

In:      batches, rates, options.
Out:     losses, checkpoints, a result.
Imports: checkpoints, watching, results and below.
"""
