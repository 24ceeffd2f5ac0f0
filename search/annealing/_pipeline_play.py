"""The pipeline of blocks: lower bounds first, then its makespan in the cheapest exact way.

A step is the macro graph of `schedules.macro_graph` under a table of durations. Every path through
it and everything that one rank does are sums of entries of the table with whole coefficients, and
no step is shorter than one of them. On a single rank with one stage nothing waits, so the sum is
the step itself.
What a task takes longer than another kind of block is a difference of two entries, or nothing
where that is negative, so sums hold for it too.

Where every resource serves its tasks in the same order under every table (`chain_state` proves
it when it can), the step is a longest path in that order, without a queue. The longest path of the
plan as it is joins the bounds: it is what most worse proposals fail at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted

CLOSED, ORDERED, QUEUED = range(3)
"""How a pipeline is played: one sum, in a known order, or by the event engine."""


class Pipeline(NamedTuple):
    """The macro graph of Q tasks, its table of M entries, flat by kind and item.

    Attributes:
        how: [1], `CLOSED`, `ORDERED` or `QUEUED`.
        columns: entries of the table that tasks read.
        places: [M], which column an entry is.
        bounds: [B + 1, columns], coefficients of each lower bound; the last is the longest path.
        entry: [Q], the entry that each task reads; tasks in the order in which they are played.
        less: [Q], the entry that is taken off it, or −1.
        before_starts, before: predecessors of each task.
        held_starts, held: resources of each task.
        end, because: [Q], work space: when a task ends, and for which task it waited last (or −1).
        free, holder: per resource, work space: when it is free, and who held it.
        now: [1], makespan in ns of the accepted table.
        table, proposed: [M], the accepted table and the proposed one, in ns.
    """

    how: Ints
    columns: Ints
    places: Ints
    bounds: Ints
    entry: Ints
    less: Ints
    before_starts: Ints
    before: Ints
    held_starts: Ints
    held: Ints
    end: Ints
    because: Ints
    free: Ints
    holder: Ints
    now: Ints
    table: Ints
    proposed: Ints


@uncounted()
def bound_of(pipeline: Pipeline) -> int:
    """The greatest lower bound in ns under the proposed table."""
    columns, bounds, table = pipeline.columns, pipeline.bounds, pipeline.proposed
    greatest = 0
    for row in range(bounds.shape[0]):
        total = 0
        for column in range(columns.size):
            total += bounds[row, column] * table[columns[column]]
        greatest = max(greatest, total)
    return greatest


@uncounted()
def play_in_order(pipeline: Pipeline) -> int:
    """Makespan in ns of a pipeline whose order is known, under the proposed table."""
    end, because, free, holder = pipeline.end, pipeline.because, pipeline.free, pipeline.holder
    free[:] = 0
    holder[:] = -1
    makespan = 0
    for task in range(end.size):
        ns = pipeline.proposed[pipeline.entry[task]]
        if pipeline.less[task] >= 0:
            ns = max(0, ns - pipeline.proposed[pipeline.less[task]])
        time, waits_for = 0, -1
        for e in range(pipeline.before_starts[task], pipeline.before_starts[task + 1]):
            before = pipeline.before[e]
            if end[before] > time:
                time, waits_for = end[before], before
        if ns > 0:
            first, last = pipeline.held_starts[task], pipeline.held_starts[task + 1]
            for h in range(first, last):
                resource = pipeline.held[h]
                if free[resource] > time:
                    time, waits_for = free[resource], holder[resource]
            for h in range(first, last):
                free[pipeline.held[h]] = time + ns
                holder[pipeline.held[h]] = task
        end[task] = time + ns
        because[task] = waits_for
        makespan = max(makespan, time + ns)
    return makespan


@uncounted()
def note_longest_path(pipeline: Pipeline) -> None:
    """Make the longest path of what was played in order last the last of the bounds.

    What takes no time on it, as it is not longer than what is taken off it, counts as nothing.
    """
    row = pipeline.bounds[pipeline.bounds.shape[0] - 1]
    row[:] = 0
    task = np.argmax(pipeline.end)
    while task >= 0:
        entry, less = pipeline.entry[task], pipeline.less[task]
        if less < 0:
            row[pipeline.places[entry]] += 1
        elif pipeline.proposed[entry] > pipeline.proposed[less]:
            row[pipeline.places[entry]] += 1
            row[pipeline.places[less]] -= 1
        task = pipeline.because[task]
