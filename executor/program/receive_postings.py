"""When to post receives, so that messages go while their receivers compute.

**With tags** a receive may be posted at any time before it is needed, and should be: a message
whose receive is posted goes when it is sent, another one waits until threads of both sides have
had their turn on cores that are computing (`early_postings`).

**Without tags** the time is bounded from both sides. NCCL matches the sends and receives of a pair
in the order in which each side issues them, and may run what a rank issues strictly one after the
other. Then nothing hangs if, and only if, all ranks issue their collectives and messages in one
common order. The replay of the program is such an order: a message is in it where it is sent, so
its receiver must begin to receive it there, perhaps long before it needs it, into memory set
aside.

    sender     F0 ──a──▶  F1 ──b──▶  sync ═══╗
    receiver   post a, receive a, F0, post b, sync ═══╝  …  receive b

A receive can be posted in front of an instruction, not between two collectives inside one. So the
replay lets all collectives of an instruction happen together, once everyone has come to it whom
they join: with two axes a rank could else have met along one of them while a rank that it still
has to meet along the other waits until its message is taken, and so on around a ring of ranks.

Ranks that do the same are played as one, as in `replay`: each instruction is then one of all of
them, whose messages are in the order of their senders. Where such ranks send one another
something, in the middle of an instruction of theirs, each is played for itself.

The first communication that a rank issues behind the point where the replay sends a message bounds
how late it may be posted; before that bound, one message of a sender is set aside at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from stratagem.executor.program.instructions.instruction import Message
from stratagem.executor.program.programs import Program
from stratagem.executor.program.replay import Players, ReplayedWorld, play_in, players

AHEAD = 2
"""Of each sender the messages for so many passes are awaited at a time, where they have tags."""


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


@dataclass(frozen=True)
class Sent:
    """Where in the common order some ranks send a message.

    `ahead` is the first instruction of each player of which nothing has happened then.
    """

    senders: tuple[int, ...]
    message: Message
    ahead: tuple[int, ...]


@dataclass(frozen=True)
class CommonOrder:
    """The messages of a step, in an order in which all ranks may issue all that they issue.

    Example:
        >>> order = common_order(lower(plan, graph))  # doctest: +SKIP
        >>> for each in order.postings(rank=1):  # doctest: +SKIP
        ...     print(each.before, each.needed, each.sender)
        0 0 0
        1 7 0
    """

    program: Program
    player_of: Mapping[int, int]
    messages: tuple[Sent, ...]

    def pairs(self) -> set[tuple[int, int]]:
        """The ranks between which messages go: sender and receiver."""
        transfers = {id(t): t for t in (each.message.transfer for each in self.messages)}
        ranks = self.program.rank_of
        found = {
            (ranks[move.sender], ranks[move.receiver])
            for transfer in transfers.values()
            for move in transfer.moves
        }
        return {(sender, receiver) for sender, receiver in found if sender != receiver}

    def postings(self, rank: int) -> tuple[Posting, ...]:
        """The receives of a rank in the order in which they must be posted.

        What a rank sends itself is not among them, nor are messages inside conversions, which
        sender and receiver come to together.
        """
        own, needs = self.program.ranks[rank], _needs(self.program, rank)
        arrivals: list[_Arrival] = []
        for sent in self.messages:
            moves = sent.message.transfer.moves_to(own.device)
            senders = {self.program.rank_of[move.sender] for move in moves} - {rank}
            for sender in sorted(senders.intersection(sent.senders)):
                needed = needs[sender, sent.message.label].popleft()
                arrivals.append(_Arrival(sent.ahead[self.player_of[rank]], needed, sender))
        return _placed(arrivals, _issues(self.program, rank))


def early_postings(program: Program, rank: int) -> tuple[Posting, ...]:
    """The receives of a rank where messages have tags, in the order in which they are posted.

    Those that a sender has for one pass are posted together, and those for `AHEAD` passes are
    posted at a time: the next ones behind the pass that has taken the first. Just then, and no
    sooner: what says that a receive is posted would find the sender amid the message before.

    Example:
        >>> for each in early_postings(lower(plan, graph), rank=1):  # doctest: +SKIP
        ...     print(each.before, each.needed, each.sender)
        0 0 0
        0 7 0
    """
    work = [each.work(program) for each in program.ranks[rank].instructions]
    is_pass = [bool(each.passes or each.updated) for each in work]
    passes, next_pass = [*accumulate(is_pass, initial=0)], _next(is_pass)
    needs: defaultdict[int, set[int]] = defaultdict(set)
    for (sender, _), numbers in _needs(program, rank).items():
        needs[sender].update(numbers)
    made: list[Posting] = []
    for sender, needed in needs.items():
        groups = [list(g) for _, g in groupby(sorted(needed), key=passes.__getitem__)]
        free = [0] * AHEAD + [next_pass[group[-1]] + 1 for group in groups]
        for group, behind in zip(groups, free, strict=False):
            made += [Posting(min(behind, number), number, sender) for number in group]
    return tuple(sorted(made, key=lambda each: (each.before, each.needed)))


def common_order(program: Program) -> CommonOrder:
    """The order of the messages of a step, by the replay of its program.

    Raises:
        ValueError: when there is no such order, because a rank would have to go on behind an
            instruction before another one that its collectives join has come to it.
    """
    world = ReplayedWorld(program, _apart(program), whole=True)
    messages = tuple(
        Sent(world.groups[number], sent, tuple(player.ahead for player in world.players))
        for _, number, each in play_in(world)
        if (sent := each.sends) is not None
    )
    return CommonOrder(program, world.player_of, messages)


def _apart(program: Program) -> Players:
    """Ranks that can be played as one, none of which sends another of them anything."""
    groups = players(program)
    player_of = {rank: n for n, ranks in enumerate(groups) for rank in ranks}
    ranks = program.rank_of
    for group in groups:
        for each in program.ranks[group[0]].instructions:
            for move in () if each.sends is None else each.sends.transfer.moves:
                pair = ranks[move.sender], ranks[move.receiver]
                if pair[0] != pair[1] and player_of[pair[0]] == player_of[pair[1]]:
                    return tuple((rank.rank,) for rank in program.ranks)
    return groups


def _needs(program: Program, rank: int) -> dict[tuple[int, str], deque[int]]:
    """By sender and label the instructions that take a message."""
    found: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
    own = program.ranks[rank]
    for number, instruction in enumerate(own.instructions):
        message = instruction.receives
        if message is not None:
            moves = message.transfer.moves_to(own.device)
            for sender in dict.fromkeys(program.rank_of[move.sender] for move in moves):
                if sender != rank:
                    found[sender, message.label].append(number)
    return found


def _issues(program: Program, rank: int) -> list[int]:
    """Per instruction the first one, from it on, that issues a communication; the end if none."""
    instructions = program.ranks[rank].instructions
    return _next([each.sends is not None or bool(each.meetings) for each in instructions])


def _next(wanted: Sequence[bool]) -> list[int]:
    """Per place the first one, from it on, that is wanted; the end if none is."""
    found = [len(wanted)] * (len(wanted) + 1)
    for number in reversed(range(len(wanted))):
        found[number] = number if wanted[number] else found[number + 1]
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
