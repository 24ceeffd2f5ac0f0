"""Steps as rows of tasks in lanes.

In:      tasks with times.
Out:     tables, attributions, critical paths, differences, trace files.
Imports: engine and base.
"""
