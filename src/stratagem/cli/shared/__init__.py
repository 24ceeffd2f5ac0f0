"""What several verbs have in common.

In:      options.
Out:     models, clusters, tables.
Imports: the face and everything below.
"""
