"""What no plan is under.

In:      skeletons and problems.
Out:     lower bounds on seconds and bytes, with their proofs.
Imports: problem, space, the simulator.
"""
