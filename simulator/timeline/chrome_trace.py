"""Trace files: timelines for https://ui.perfetto.dev, in Chrome's trace-event format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.timeline.timeline import SEPARATOR, Timeline, lane_group, lane_name, shift

Event = dict[str, Any]


def write_trace(path: str | Path, *timelines: Timeline) -> None:
    """Write timelines side by side into one gzipped trace file.

    Example:
        >>> write_trace("step.json.gz", predicted, measured)  # doctest: +SKIP

    Every group of every timeline is a process and every lane a thread; the same group of two
    timelines stands one below the other. Each timeline starts at 0, so that none loses ns to the
    rounding of large numbers. The same timelines give the same bytes. The file appears whole or
    not at all.

    Raises:
        ValueError: if there is no timeline.
    """
    if not timelines:
        raise ValueError("0 timelines: give at least one to write")
    trace = {"displayTimeUnit": "ns", "traceEvents": trace_events(*timelines)}
    text = json.dumps(trace, separators=(",", ":"), ensure_ascii=False)
    with atomic_path(path) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))


def trace_events(*timelines: Timeline) -> list[Event]:
    """Return the events of a trace: the names of processes and threads, then the tasks.

    Times are in µs, as the format wants them, with ns in the fraction.
    """
    groups = dict.fromkeys(lane_group(lane) for timeline in timelines for lane in timeline.lanes)
    group_numbers = {group: number for number, group in enumerate(groups)}
    events: list[Event] = []
    for number, timeline in enumerate(timelines):
        processes = {
            group: 1 + position * len(timelines) + number
            for group, position in group_numbers.items()
        }
        events += _events(shift(timeline, -timeline.begin_ns), processes)
    return events


def _events(timeline: Timeline, processes: dict[str, int]) -> list[Event]:
    names: list[Event] = []
    tasks: list[Event] = []
    for group in dict.fromkeys(map(lane_group, timeline.lanes)):
        process = processes[group]
        names.append(_name(process, 0, "process_name", lane_name(timeline.label, group)))
        names.append(_sort(process, 0, "process_sort_index", process))
        thread = 0
        for number, lane in enumerate(timeline.lanes):
            if lane_group(lane) != group:
                continue
            rows = np.flatnonzero(timeline.lane == number)
            tracks = _tracks(timeline.start[rows], timeline.end[rows])
            what = lane.partition(SEPARATOR)[2] or lane
            for track in range(int(tracks.max(initial=0)) + 1):
                thread += 1
                label = f"{what} ({track + 1})" if track else what
                names.append(_name(process, thread, "thread_name", label))
                names.append(_sort(process, thread, "thread_sort_index", thread))
                tasks += _tasks(timeline, rows[tracks == track], process, thread)
    return names + tasks


def _tasks(timeline: Timeline, rows: Ints, process: int, thread: int) -> list[Event]:
    order = rows[np.argsort(timeline.start[rows], kind="stable")]
    start, end = timeline.start[order].tolist(), timeline.end[order].tolist()
    return [
        {
            "ph": "X",
            "name": timeline.names[row],
            "cat": timeline.kinds[row].value,
            "pid": process,
            "tid": thread,
            "ts": first / 1000,
            "dur": (last - first) / 1000,
        }
        for row, first, last in zip(order.tolist(), start, end, strict=True)
    ]


def _tracks(start: Ints, end: Ints) -> Ints:
    """Spread tasks that overlap over several tracks, as viewers lose them otherwise."""
    tracks = np.zeros(start.size, np.int64)
    free: list[int] = []
    for row in np.argsort(start, kind="stable").tolist():
        track = next((t for t, time in enumerate(free) if time <= start[row]), len(free))
        free[track : track + 1] = [int(end[row])]
        tracks[row] = track
    return tracks


def _name(process: int, thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _sort(process: int, thread: int, what: str, index: int) -> Event:
    return {
        "ph": "M",
        "name": what,
        "pid": process,
        "tid": thread,
        "args": {"sort_index": index},
    }
