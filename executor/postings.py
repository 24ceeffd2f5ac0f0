"""When to post receives where messages have no tags.

NCCL matches the sends and receives of a pair in the order in which each side issues them, and may
run what a rank issues strictly one after the other. Then nothing hangs if, and only if, all ranks
issue their collectives and messages in one common order. The replay of the program is such an
order: a message is in it where it is sent, so its receiver must begin to receive it there, perhaps
long before it needs it, into memory set aside.

    sender     F0 ──a──▶  F1 ──b──▶  sync ═══╗
    receiver   post a, receive a, F0, post b, sync ═══╝  …  receive b

A receive can be posted in front of an instruction, not between two collectives inside one. So the
replay lets all collectives of an instruction happen together, once everyone has come to it whom
they join: with two axes a rank could else have met along one of them while a rank that it still
has to meet along the other waits until its message is taken, and so on around a ring of ranks.

The first communication that a rank issues behind the point where the replay sends a message bounds
how late it may be posted; before that bound, one message of a sender is set aside at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.executor.instructions import Receive, Send, meetings_of
from stratagem.executor.program import Program
from stratagem.executor.replay import World, play_in


@dataclass(frozen=True)
class Posting:
    """A receive to post before instruction `before`, for that of number `needed`.

    `sender` is a rank.
    """

    before: int
    needed: int
    sender: int


@dataclass(frozen=True)
class _Arrival:
    """A message at the instruction where its receiver is when the replay sends it."""

    earliest: int
    needed: int
    sender: int


def postings(program: Program) -> tuple[tuple[Posting, ...], ...]:
    """Per rank the receives of a step in the order in which they must be posted.

    Example:
        >>> for each in postings(lower(plan, graph))[1]:  # doctest: +SKIP
        ...     print(each.before, each.needed, each.sender)
        0 0 0
        1 7 0

    What a rank sends itself is not among them, nor are messages inside conversions, which sender
    and receiver come to together.

    Raises:
        ValueError: when there is no such order, because a rank would have to go on behind an
            instruction before another one that its collectives join has come to it.
    """
    world = World(program, tuple((each.rank,) for each in program.ranks), whole=True)
    needs = [_needs(program, rank) for rank in range(program.world_size)]
    arrivals: list[list[_Arrival]] = [[] for _ in program.ranks]
    for _, sender, instruction in play_in(world):
        if isinstance(instruction, Send):
            for receiver in targets(program, sender, instruction):
                earliest = world.players[receiver].ahead
                needed = needs[receiver][sender, instruction.label].popleft()
                arrivals[receiver].append(_Arrival(earliest, needed, sender))
    return tuple(_placed(found, _issues(program, rank)) for rank, found in enumerate(arrivals))


def targets(program: Program, sender: int, instruction: Send) -> tuple[int, ...]:
    """The other ranks that a rank sends to, in order."""
    moves = instruction.transfer.moves_from(program.ranks[sender].device)
    ranks = dict.fromkeys(program.rank_of[move.receiver] for move in moves)
    return tuple(rank for rank in ranks if rank != sender)


def _needs(program: Program, rank: int) -> dict[tuple[int, str], deque[int]]:
    """By sender and label the instructions that take a message."""
    found: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
    own = program.ranks[rank]
    for number, instruction in enumerate(own.instructions):
        if isinstance(instruction, Receive):
            moves = instruction.transfer.moves_to(own.device)
            for sender in dict.fromkeys(program.rank_of[move.sender] for move in moves):
                if sender != rank:
                    found[sender, instruction.label].append(number)
    return found


def _issues(program: Program, rank: int) -> list[int]:
    """Per instruction the first one, from it on, that issues a communication; the end if none."""
    instructions = program.ranks[rank].instructions
    found = [len(instructions)] * (len(instructions) + 1)
    for number in reversed(range(len(instructions))):
        each = instructions[number]
        issues = isinstance(each, Send) or bool(meetings_of(each))
        found[number] = number if issues else found[number + 1]
    return found


def _placed(arrivals: Sequence[_Arrival], issues: Sequence[int]) -> tuple[Posting, ...]:
    """Post each message behind the taking of the one before it from its sender, if it may be."""
    latest = [min(each.needed, issues[each.earliest]) for each in arrivals]
    for number in reversed(range(len(latest) - 1)):
        latest[number] = min(latest[number], latest[number + 1])
    made: list[Posting] = []
    behind: dict[int, int] = {}
    at = 0
    for each, bound in zip(arrivals, latest, strict=True):
        wanted = max(each.earliest, behind.get(each.sender, 0))
        at = max(at, min(bound, wanted))
        behind[each.sender] = each.needed + 1
        made.append(Posting(at, each.needed, each.sender))
    return tuple(made)
