"""From the clock readings of all ranks to one measured timeline."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem.executor.instructions import (
    Convert,
    Free,
    Instruction,
    Meeting,
    Receive,
    Send,
    meetings_of,
)
from stratagem.executor.program import Program
from stratagem.simulator.timeline import Row, Timeline, from_rows, lane_name

Spans = Sequence[tuple[int, int]]
"""Start and end of every instruction of one rank, in ns."""

GAP_NS = 100_000
"""The longest pause that does not part the instructions of a task."""


def timeline(program: Program, spans: Mapping[int, Spans]) -> Timeline:
    """The measured timeline of one step: two lanes a rank, task names as in the simulator.

    A communication starts when its last partner is there: until then a rank only waits, which is a
    gap in its lane and not a task. Instructions of one task that follow one another at once are
    one row. Conversions that only slice are left out, as they are of the simulator's timeline.

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
    """When collectives have all their members, and when messages leave."""

    meetings: dict[Meeting, int]
    messages: dict[tuple[int, int], deque[int]]


def _begins(program: Program, spans: Mapping[int, Spans]) -> _Begins:
    meetings: dict[Meeting, int] = {}
    messages: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for rank, times in spans.items():
        for instruction, (start, _) in zip(program.ranks[rank].instructions, times, strict=True):
            for meeting in meetings_of(instruction)[:1]:
                meetings[meeting] = max(meetings.get(meeting, 0), start)
            if isinstance(instruction, Send):
                for piece in instruction.pieces:
                    messages[rank, piece.rank].append(start)
    return _Begins(meetings, messages)


def _rank_rows(program: Program, rank: int, spans: Spans, begins: _Begins) -> list[Row]:
    rows: list[Row] = []
    before: tuple[str, int] | None = None
    for instruction, (start, end) in zip(program.ranks[rank].instructions, spans, strict=True):
        if isinstance(instruction, Free) or _is_slice(instruction):
            continue
        start = min(end, max(start, _begin(instruction, rank, begins)))
        lane = lane_name(f"rank {rank}", _LANES[instruction.kind.is_communication])
        task = instruction.task, instruction.microbatch
        if task == before and rows[-1].lane == lane and start - rows[-1].end <= GAP_NS:
            rows[-1] = rows[-1]._replace(end=end)
        else:
            rows.append(Row(instruction.task, instruction.kind, lane, start, end))
        before = task
    return rows


def _is_slice(instruction: Instruction) -> bool:
    """Whether a conversion joins no other rank."""
    if not isinstance(instruction, Convert) or instruction.meetings:
        return False
    return instruction.kind.is_communication


def _begin(instruction: Instruction, rank: int, begins: _Begins) -> int:
    """When the partners of a communication are there; 0 for what has none."""
    if isinstance(instruction, Receive):
        channels = [begins.messages[piece.rank, rank] for piece in instruction.pieces]
        return max(channel.popleft() if channel else 0 for channel in channels)
    if instruction.kind.is_communication:
        return max((begins.meetings[m] for m in meetings_of(instruction)[:1]), default=0)
    return 0
