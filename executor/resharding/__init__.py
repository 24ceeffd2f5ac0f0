"""Conversions, carried out.

In:      local shards and steps.
Out:     local shards.
Imports: communication, cuda, the simulator.
"""
