"""What a kernel takes on a device.

In:      an operator, local sizes, a device type.
Out:     seconds, and how far off they may be.
Imports: graph, hardware, optimizers and below.
"""
