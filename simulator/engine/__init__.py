"""Playing graphs of tasks, exactly; and what a change of some changes.

In:      tasks with durations, resources and predecessors.
Out:     when each begins and ends, and why.
Imports: base.
"""
