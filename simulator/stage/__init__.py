"""One stage of a pipeline: its tasks and tensors.

In:      cost tables.
Out:     blocks of tasks and lifetimes of tensors, looked up by choices.
Imports: pricing, schedules and below.
"""
