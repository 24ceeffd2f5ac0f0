"""What several verbs have in common.

In:      options.
Out:     models, clusters, tables.
Imports: face, runs and below.
"""
