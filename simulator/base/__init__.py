"""What everything else stands on.

In:      nothing of ours.
Out:     files, errors, tables, units, compiled kernels, names of array types.
Imports: nothing of ours.
"""
