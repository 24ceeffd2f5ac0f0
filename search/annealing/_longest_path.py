"""The longest path of a block through its dependencies alone, as a lower bound of its makespan.

No plan ends before the tasks of a path have run one after the other, whatever else waits for what,
and changing durations changes the length of that one path by what its own tasks change. So the
tasks of a path that was the longest once bound every proposal at the price of a look at each task
that it changes. The path is found anew now and then, for it may be the longest no more.
"""

from __future__ import annotations

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_state import DeltaState


@uncounted(inner=True)
def note_longest_path(state: DeltaState, on_path: Ints) -> int:
    """Set `on_path` to 1 for the tasks of a longest path as played, else to 0; return its ns.

    Ends of tasks and their predecessors on the path go to what a full simulation fills.
    """
    tasks, ends, befores = state.tasks, state.space.end, state.space.stack
    longest, last = 0, -1
    for position in range(state.places.size):
        each = state.places[position].task
        end, because = 0, -1
        for edge in range(tasks[each].predecessors, tasks[each + 1].predecessors):
            before = state.predecessors[edge]
            if ends[before] > end:
                end, because = ends[before], before
        end += tasks[each].played_duration
        ends[each] = end
        befores[each] = because
        on_path[each] = 0
        if end > longest:
            longest, last = end, each
    while last >= 0:
        on_path[last] = 1
        last = befores[last]
    return longest
