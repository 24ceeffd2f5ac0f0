"""Kernel timings, kept.

In:      keys of what was timed.
Out:     times, on disk; merged, exported, imported.
Imports: the simulator; no torch.
"""
