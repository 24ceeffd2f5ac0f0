"""Prices from times.

In:      the cache.
Out:     a cost model, corrected where nothing was measured.
Imports: cache, the simulator; no torch.
"""
