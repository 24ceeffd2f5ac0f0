"""The command line, a module a verb.

In:      words.
Out:     tables, files, exit codes.
Imports: cli.shared, exports, calibration, the profiler and below.
"""
