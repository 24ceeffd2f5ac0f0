"""Carrying out a program.

In:      a program, a communicator, a batch.
Out:     a step.
Imports: actions, optimizers, state, resharding, program and below.
"""
