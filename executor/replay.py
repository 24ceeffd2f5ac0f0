"""Playing a program without running it: who waits for whom, and whether everybody gets to the end.

Ranks advance one after the other. A send never waits, a receive waits for its messages, and a
collective for all its members:

    rank 0   F0 ──send──╮        sync ═══╗
    rank 1              ╰─▶ F0   sync ═══╝   one column for both
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from stratagem.executor.instructions import (
    Free,
    Instruction,
    Meeting,
    Piece,
    Receive,
    Send,
    meetings_of,
)
from stratagem.executor.program import Program


@dataclass
class _Player:
    """Where one rank is: its instruction, what of it is done, and the column it has reached."""

    rank: int
    instructions: tuple[Instruction, ...]
    position: int = 0
    met: int = 0
    received: int = 0
    step: int = 0

    @property
    def over(self) -> bool:
        return self.position == len(self.instructions)

    @property
    def current(self) -> Instruction:
        return self.instructions[self.position]

    @property
    def meeting(self) -> Meeting | None:
        """The collective that this rank has entered."""
        meetings = () if self.over else meetings_of(self.current)
        return meetings[self.met] if self.met < len(meetings) else None

    @property
    def source(self) -> Piece | None:
        """The message that this rank waits for."""
        if self.over or not isinstance(self.current, Receive):
            return None
        pieces = self.current.pieces
        return pieces[self.received] if self.received < len(pieces) else None

    def next(self) -> Instruction:
        """Leave the current instruction."""
        left = self.current
        self.position += 1
        self.met = self.received = 0
        self.step += not isinstance(left, Free)
        return left

    def waits_for(self) -> str:
        """Whom this rank waits for, in words."""
        if self.over:
            return f"rank {self.rank} is at its end"
        where = f"rank {self.rank} is at {str(self.current)!r} (instruction {self.position})"
        if self.meeting is not None:
            return f"{where} and waits for {self.meeting}"
        assert self.source is not None
        return f"{where} and waits for a message from rank {self.source.rank}"


@dataclass
class _Message:
    shape: tuple[int, ...]
    sent_by: str
    step: int


@dataclass
class _World:
    players: list[_Player]
    channels: dict[tuple[int, int], deque[_Message]] = field(default_factory=dict)


def replay(program: Program) -> Iterator[tuple[int, int, Instruction]]:
    """Yield (column, rank, instruction) as the instructions are left, until all ranks are through.

    Raises:
        ValueError: when nobody can go on, a message has another shape than its receiver expects,
            or a message is never received. It names rank, instruction and what it waits for.
    """
    world = _World([_Player(each.rank, each.instructions) for each in program.ranks])
    while not all(player.over for player in world.players):
        moved = False
        for player in world.players:
            while not player.over and _can_leave(player, world):
                moved = True
                yield player.step, player.rank, player.next()
        if not moved and not _meet(world):
            waiting = "; ".join(player.waits_for() for player in world.players)
            raise ValueError(
                f"the program of plan {program.plan.name!r} does not end, since ranks wait for "
                f"one another: {waiting}"
            )
    for (source, target), messages in world.channels.items():
        if messages:
            raise ValueError(
                f"rank {source} sends to rank {target} at {messages[0].sent_by!r}, but rank "
                f"{target} never receives that; {len(messages)} messages are left over"
            )


def _can_leave(player: _Player, world: _World) -> bool:
    """Send what is to be sent, take what has come; whether the current instruction is over."""
    current = player.current
    if isinstance(current, Send):
        for piece in current.pieces:
            message = _Message(_shape(piece), str(current), player.step)
            world.channels.setdefault((player.rank, piece.rank), deque()).append(message)
    while (awaited := player.source) is not None:
        channel = world.channels.get((awaited.rank, player.rank))
        if not channel:
            return False
        _take(player, awaited, channel.popleft())
    return player.meeting is None


def _take(player: _Player, piece: Piece, message: _Message) -> None:
    if message.shape != _shape(piece):
        raise ValueError(
            f"rank {player.rank} at {str(player.current)!r} expects a tensor of shape "
            f"{_shape(piece)} from rank {piece.rank}, which sends {message.shape} at "
            f"{message.sent_by!r}; sends and receives must be in one order"
        )
    player.received += 1
    player.step = max(player.step, message.step + 1)


def _meet(world: _World) -> bool:
    """Let every collective happen whose members are all there; whether there was one."""
    happened = False
    for player in world.players:
        meeting = player.meeting
        if meeting is None:
            continue
        members = [world.players[rank] for rank in meeting.group]
        if all(member.meeting == meeting for member in members):
            step = max(member.step for member in members)
            for member in members:
                member.met += 1
                member.step = step
            happened = True
    return happened


def _shape(piece: Piece) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in piece.box)
