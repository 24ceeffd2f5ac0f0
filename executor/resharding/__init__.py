"""Conversions, carried out.

In:      local shards and steps.
Out:     local shards.
Imports: communication, the simulator.
"""
