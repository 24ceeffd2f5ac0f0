"""What delta re-simulation keeps: a played graph by task and by position, changes and windows.

Records have named fields (`state.tasks[each].position`), which lie side by side in memory.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.simulator.base.arrays import Ints, Records, record
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine._event_queue import TaskArrays, Workspace

CHUNK_BITS = 5
"""Positions of the played order are kept in chunks of 32; so many bits fit a word of `held`."""
NEVER = -(1 << 62)
"""Before any time."""
MAX_DRIFT = 1 << 60
"""Shifts may add up to this many ns before the index is made anew, so that no sum overflows."""
MIN_GAP = 4
"""So many tasks or more must lie before the next change for a jump to be worth it."""
REPLAY_SHARE = 4
"""A replay is given up for a full simulation after one task in so many."""

NONE, REPLAY, FULL = range(3)
"""Values of `pending`: no proposal, one replayed, one played in full."""


TASK = record(
    *("duration", "resources", "played_duration", "played_resources", "position", "released"),
    *("successors", "predecessors", "seen", "waiting", "heard", "taken"),
)
"""By task, the graph and how it was played; and workspace of a replay.

Duration and set of resources, as proposed and as played; the position of the task and of its last
predecessor; where its neighbours begin. Then the generation in which the task was first told of an
ended predecessor that counts, how many it waits for, the latest end of the others (its own once it
was taken), and the generation in which it was taken.
"""
PLACE = record("task", "ready", "end", "new_task", "new_ready", "new_end", "old_end")
"""By position, how the graph was played and is replayed.

Task, ready time and end of both, and when the task that was replayed ended as played.
"""
CHANGE = record("task", "effect")
"""A changed task and the first position that it can alter, in the order of these."""
WINDOW = record("begin", "stop", "shift")
"""A replay: its first position, the one behind it, and the shift in ns from there on."""
BOOK = record(
    *("makespan", "pending", "proposed", "num_changes", "num_windows"),
    *("generation", "limit", "drift", "replayed", "calls"),
)
"""Makespan as played; what is pending, and its makespan; how many changes and windows it has.

Then the number of the replay, how many tasks one may play, the sum of accepted shifts in ns, how
many tasks the last proposal played, and how many proposals there were.
"""


class DeltaState(NamedTuple):
    """A played graph and the workspace to replay parts of it.

    A *position* is a place in the order in which tasks were taken, idle ones at the instant that
    they pass on. Times by position are in ns and lack the shift of their chunk.

    Attributes:
        graph: durations and sets of resources in it are those that are proposed.
        space: of full simulations. A replay has the same queue, and the same free times of
            resources; tasks in its queue are less by their number if they are idle, so that these
            go first.
        tasks: [T + 1], `TASK`.
        places: [T], `PLACE`.
        changes: [T], `CHANGE`.
        windows: [T], `WINDOW`.
        book: [1], `BOOK`.
        predecessors: of all tasks.
        latest: [2, words], a tree over chunks: the latest end below a node, and the shift of all
            that is below it. Node n of a level is above nodes 32 n to 32 n + 31 of the one before;
            the first level is the chunks, the last one the root.
        held: [R, words], a bitmap over positions for every resource; bit b of word w of a level
            says that word 32 w + b of the level before is not 0.
        levels: where each level begins in both.
        known: [R], the replay in which the free time of a resource was looked up.
    """

    graph: TaskArrays
    space: Workspace
    tasks: Records
    places: Records
    changes: Records
    windows: Records
    book: Records
    predecessors: Ints
    latest: Ints
    held: Ints
    levels: Ints
    known: Ints


@uncounted(forceinline=True, inner=True)
def queue_key(state: DeltaState, each: int) -> int:
    """By which a task stands in the queue among those of its ready time."""
    return each if state.tasks[each].duration else each - state.places.size


@uncounted(forceinline=True, inner=True)
def task_of_key(state: DeltaState, key: int) -> int:
    """The task that stands in the queue by a key."""
    return key + state.places.size if key < 0 else key
