"""Operators on parts of meshes: the O of SOAP.

In:      the best plans of a search.
Out:     the same with branches, layers and single operators on parts of their meshes.
Imports: improvement, space; the simulator.
"""
