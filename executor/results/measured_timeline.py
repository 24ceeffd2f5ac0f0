"""From the clock readings of all ranks to one measured timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stratagem.executor.program.instructions.instruction import Instruction, TimelineTask
from stratagem.executor.program.programs import Program
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.timeline.timeline import Row, Timeline, from_rows, lane_name

Spans = Sequence[tuple[int, int]]
"""Start and end of every instruction of one rank, in ns."""

GAP_NS = 100_000
"""The longest pause that does not part the instructions of a task."""


def timeline(program: Program, spans: Mapping[int, Spans]) -> Timeline:
    """The measured timeline of one step: two lanes a rank, task names as in the simulator.

    A communication starts when its last partner is there, and so does what tells the loss: until
    then a rank only waits, which is a gap in its lane and not a task. Of communications under way
    at a time, the later one starts behind the earlier, and takes no time if it is over before
    that. Instructions of one task that follow one another at once are one row. Conversions that
    only slice are left out, as they are of the simulator's timeline.

    Args:
        program: what ran.
        spans: per rank, for as many ranks as are known.
    """
    begins = _begins(program, spans)
    rows: list[Row] = []
    for rank in sorted(spans):
        rows += _rank_rows(program, rank, spans[rank], begins)
    lanes = [lane_name(f"rank {rank}", what) for rank in sorted(spans) for what in _LANES]
    used = {row.lane for row in rows}
    return from_rows(rows, label="measured", lanes=[lane for lane in lanes if lane in used])


_LANES = ("compute", "communication")


@dataclass
class _Begins:
    """When collectives have all their members, and when messages leave, by sender and label."""

    meetings: dict[tuple[tuple[int, ...], str], int]
    messages: dict[tuple[int, str], int]


def _begins(program: Program, spans: Mapping[int, Spans]) -> _Begins:
    meetings: dict[tuple[tuple[int, ...], str], int] = {}
    messages: dict[tuple[int, str], int] = {}
    for rank, times in spans.items():
        for instruction, (start, _) in zip(program.ranks[rank].instructions, times, strict=True):
            for meeting in instruction.meetings[:1]:
                key = program.group(meeting, rank), meeting.what
                meetings[key] = max(meetings.get(key, 0), start)
            if instruction.sends is not None:
                messages[rank, instruction.sends.label] = start
    return _Begins(meetings, messages)


def _rank_rows(program: Program, rank: int, spans: Spans, begins: _Begins) -> list[Row]:
    rows: list[Row] = []
    before: tuple[str, int] | None = None
    over: dict[str, int] = {}
    for instruction, (start, end) in zip(program.ranks[rank].instructions, spans, strict=True):
        tasks = instruction.tasks
        if not tasks:
            continue
        lane = lane_name(f"rank {rank}", _LANES[instruction.kind.is_communication])
        start = max(start, _begin(program, instruction, rank, begins), over.get(lane, 0))
        start = min(start, end)
        over[lane] = max(end, over.get(lane, 0))
        if len(tasks) > 1:
            rows += _shared_rows(tasks, lane, start, end)
            before = None
            continue
        task = tasks[0].name, tasks[0].microbatch
        if task == before and rows[-1].lane == lane and start - rows[-1].end <= GAP_NS:
            rows[-1] = rows[-1]._replace(end=max(end, rows[-1].end))
        else:
            rows.append(Row(tasks[0].name, tasks[0].kind, lane, start, end))
        before = task
    return rows


def _shared_rows(tasks: Sequence[TimelineTask], lane: str, start: int, end: int) -> list[Row]:
    """A row for each task of an instruction, as long as its share."""
    shares = [task.share for task in tasks]
    marks = [start + (end - start) * n // sum(shares) for n in accumulate(shares, initial=0)]
    return [
        Row(task.name, task.kind, lane, first, last)
        for task, (first, last) in zip(tasks, pairwise(marks), strict=True)
    ]


def _begin(program: Program, instruction: Instruction, rank: int, begins: _Begins) -> int:
    """When the partners of a communication are there; 0 for what has none."""
    message = instruction.receives
    if message is not None:
        moves = message.transfer.moves_to(program.ranks[rank].device)
        senders = {program.rank_of[move.sender] for move in moves}
        arrived = (begins.messages.get((each, message.label), 0) for each in senders)
        return max(arrived, default=0)  # A part may be empty: nobody sends it.
    if instruction.kind.is_communication or instruction.kind is TaskKind.OTHER:
        met = [(program.group(m, rank), m.what) for m in instruction.meetings[:1]]
        return max((begins.meetings[each] for each in met), default=0)
    return 0
