"""Clusters: device types, links, meshes, and what a collective takes.

In:      files and presets.
Out:     clusters, meshes, seconds of collectives.
Imports: base.
"""
