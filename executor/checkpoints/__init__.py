"""Training, kept on disk.

In:      the state of an interpreter.
Out:     folders; state again, under any plan.
Imports: interpreter, state and below.
"""
