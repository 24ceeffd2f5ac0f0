"""The longest path of a block through its dependencies alone, as a lower bound of its makespan.

No plan ends before the tasks of a path have run one after the other, whatever else waits for what,
and changing durations changes the length of that one path by what its own tasks change. So the
tasks of a path that was the longest once bound every proposal at the price of a look at each task
that it changes. The path is found anew now and then, for it may be the longest no more.
"""

from __future__ import annotations

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._delta_index import (
    FULL_END,
    ORDER,
    PLAYED_DURATION,
    PREDECESSORS,
    STACK,
    DeltaState,
)


@uncounted(inner=True)
def note_longest_path(state: DeltaState, on_path: Ints) -> int:
    """Set `on_path` to 1 for the tasks of a longest path as played, else to 0; return its ns.

    Ends of tasks and their predecessors on the path go to rows that a full simulation fills.
    """
    task, rows, links = state.task, state.rows, state.links
    longest, last = 0, -1
    for place in range(rows.shape[1]):
        each = rows[ORDER, place]
        end, because = 0, -1
        for edge in range(task[each, PREDECESSORS], task[each + 1, PREDECESSORS]):
            before = links[edge]
            if rows[FULL_END, before] > end:
                end, because = rows[FULL_END, before], before
        end += task[each, PLAYED_DURATION]
        rows[FULL_END, each] = end
        rows[STACK, each] = because
        on_path[each] = 0
        if end > longest:
            longest, last = end, each
    while last >= 0:
        on_path[last] = 1
        last = rows[STACK, last]
    return longest
