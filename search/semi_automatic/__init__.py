"""Semi-automatic: a user says how a few tensors lie, the rest follows, and the search goes on.

In:      a model, a cluster, annotations or a layout.
Out:     a plan, constraints under which a search may better it, and what the annotations cost.
Imports: driver, methods.literature, space, the simulator.
"""
