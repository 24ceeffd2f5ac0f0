"""What the command line and the packages need before anything else.

In:      nothing of ours.
Out:     the version, progress bars, extras, places in the user's code, how memory is kept.
Imports: nothing of ours.
"""
