"""The machine that times are taken on.

In:      a device.
Out:     its clocks, versions, load and drift.
Imports: the simulator, basics.
"""
