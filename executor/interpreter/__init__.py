"""Carrying out a program.

In:      a program, a communicator, a batch.
Out:     a step.
Imports: state, resharding, program and below.
"""
