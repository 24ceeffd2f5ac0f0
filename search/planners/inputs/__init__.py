"""Inputs of other planners, as they published them.

In:      their files.
Out:     their models and devices.
Imports: simulator.base.
"""
