"""Ranks that watch each other, and processes that are ended with their caller.

In:      signs of life.
Out:     who is to blame.
Imports: basics, backends, interpreter, program, program.instructions.
"""
