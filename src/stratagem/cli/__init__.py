"""The command line, a module a verb.

In:      words.
Out:     tables, files, exit codes.
Imports: cli.shared, exports, calibration, the search, the profiler and below.
"""
