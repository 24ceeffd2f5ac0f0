"""Ways for ranks to talk: one interface, one module a backend.

In:      a rank and its world.
Out:     a communicator.
Imports: communication, cuda, the simulator, basics.
"""
