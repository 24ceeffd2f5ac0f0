"""The command line, a module a verb.

In:      words.
Out:     tables, files, exit codes.
Imports: the face and everything below.
"""
