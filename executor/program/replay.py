"""Playing a program without running it: who waits for whom, and whether everybody gets to the end.

Players advance one after the other. A send never waits, a receive waits for its messages, and a
collective for all its members:

    rank 0   F0 ──send──╮        sync ═══╗
    rank 1              ╰─▶ F0   sync ═══╝   one column for both

Ranks that share their instructions are one player, when they also meet and hear from the same
players: then they are at the same instruction at all times, by induction over the moves of the
game, and what is shown of one holds for all. That is what makes thousands of ranks quick. A
transfer between two players is one between every pair of their ranks, since both sides take what
each sends and receives from its one list of moves. Messages have labels, so that two of one pair
may overtake one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stratagem.executor.program.instructions.instruction import Instruction, Message
from stratagem.executor.program.instructions.numbered_meshes import all_meshes
from stratagem.executor.program.instructions.operands import Meeting
from stratagem.executor.program.programs import Program
from stratagem.simulator.sharding.mesh_transfers import Transfer

Players = tuple[tuple[int, ...], ...]
"""Per player the ranks that it stands for, the first of them by number in front."""


@dataclass
class Player:
    """Where some ranks are: their instruction, what of it is done, the column they have reached.

    `met` counts the collectives of the instruction that are over; `heard` has the senders whose
    part of a transfer has come, and `has_sent` says whether its own part has gone.
    """

    number: int
    rank: int
    instructions: tuple[Instruction, ...]
    position: int = 0
    met: int = 0
    heard: set[int] = field(default_factory=set)
    has_sent: bool = False
    step: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self.position == len(self.instructions)

    @property
    def current(self) -> Instruction:
        """The instruction under way."""
        return self.instructions[self.position]

    @property
    def ahead(self) -> int:
        """The first instruction of which nothing has happened, but for messages that it took."""
        return self.position + (self.met > 0)

    @property
    def meeting(self) -> Meeting | None:
        """The collective that these ranks have entered."""
        meetings = () if self.over else self.current.meetings
        return meetings[self.met] if self.met < len(meetings) else None

    def next(self) -> Instruction:
        """Leave the current instruction."""
        left = self.current
        self.position += 1
        self.met = 0
        self.heard.clear()
        self.has_sent = False
        self.step += not left.only_frees
        return left


@dataclass
class _Sent:
    message: Message
    sent_by: str
    step: int


class ReplayedWorld:
    """The players, and what is on its way between them; `play_in` moves them.

    With `whole`, the collectives of an instruction happen together, when everyone who takes part
    in any of them is at it: nobody is in the middle of an instruction when something else happens.
    """

    def __init__(self, program: Program, groups: Players, *, whole: bool = False) -> None:
        self.program = program
        self.whole = whole
        self.groups = groups
        self.player_of = {rank: n for n, ranks in enumerate(groups) for rank in ranks}
        self.players = [
            Player(n, ranks[0], program.ranks[ranks[0]].instructions)
            for n, ranks in enumerate(groups)
        ]
        self.channels: dict[tuple[int, int, str], deque[_Sent]] = {}
        self._pairs: dict[int, tuple[Transfer, frozenset[tuple[int, int]]]] = {}
        self._members: dict[tuple[int, Meeting], tuple[Player, ...]] = {}

    def channel(self, source: int, target: int, label: str) -> deque[_Sent]:
        """What is on its way between two players under a label."""
        return self.channels.setdefault((source, target, label), deque())

    def pairs(self, transfer: Transfer) -> frozenset[tuple[int, int]]:
        """Which players send to which in a transfer."""
        if id(transfer) not in self._pairs:
            ranks = self.program.rank_of
            found = frozenset(
                (self.player_of[ranks[move.sender]], self.player_of[ranks[move.receiver]])
                for move in transfer.moves
            )
            self._pairs[id(transfer)] = transfer, found
        return self._pairs[id(transfer)][1]

    def members(self, player: Player, meeting: Meeting) -> tuple[Player, ...]:
        """Who must come to a collective that a player has entered."""
        key = player.number, Meeting(meeting.stage, meeting.axis, "", meeting.pair)
        if key not in self._members:
            group = self.program.group(meeting, player.rank)
            numbers = dict.fromkeys(self.player_of[rank] for rank in group)
            self._members[key] = tuple(self.players[n] for n in numbers)
        return self._members[key]

    def waits_for(self, player: Player) -> str:
        """Whom a player waits for, in words."""
        if player.over:
            return f"rank {player.rank} is at its end"
        current = player.current
        where = f"rank {player.rank} is at {str(current)!r} (instruction {player.position})"
        if player.meeting is not None:
            group = self.program.group(player.meeting, player.rank)
            ranks = ", ".join(map(str, group))
            return f"{where} and waits for {player.meeting.what} of ranks {ranks}"
        assert current.receives is not None
        silent = {a for a, b in self.pairs(current.receives.transfer) if b == player.number}
        ranks = ", ".join(str(self.players[n].rank) for n in sorted(silent - player.heard))
        return f"{where} and waits for a message from rank {ranks}"


def replay(program: Program) -> Iterator[tuple[int, int, Instruction]]:
    """Yield (column, rank, instruction) as the instructions are left, until all ranks are through.

    Raises:
        ValueError: when nobody can go on, a message is not the one that its receiver expects, or
            one is never received. It names rank, instruction and what it waits for.
    """
    groups = players(program)
    for column, player, instruction in play(program, groups):
        for rank in groups[player]:
            yield column, rank, instruction


def play(program: Program, groups: Players) -> Iterator[tuple[int, int, Instruction]]:
    """The same per player."""
    return play_in(ReplayedWorld(program, groups))


def play_in(world: ReplayedWorld) -> Iterator[tuple[int, int, Instruction]]:
    """The same in a world of the caller's, who may look where the players are."""
    while not all(player.over for player in world.players):
        moved = False
        for player in world.players:
            while not player.over and _can_leave(player, world):
                moved = True
                yield player.step, player.number, player.next()
        if not moved and not _meet(world):
            waiting = "; ".join(world.waits_for(player) for player in world.players)
            raise ValueError(
                f"the program of plan {world.program.plan.name!r} does not end, since ranks wait "
                f"for one another: {waiting}"
            )
    for (source, target, _), messages in world.channels.items():
        if messages:
            ranks = world.players[source].rank, world.players[target].rank
            raise ValueError(
                f"rank {ranks[0]} sends to rank {ranks[1]} at {messages[0].sent_by!r}, but rank "
                f"{ranks[1]} never receives that; {len(messages)} messages are left over"
            )


def players(program: Program) -> Players:
    """Ranks that can be played as one; each for itself where that would not be exact."""
    shared: dict[int, list[int]] = {}
    for each in program.ranks:
        shared.setdefault(id(each.instructions), []).append(each.rank)
    groups = tuple(tuple(ranks) for ranks in shared.values())
    if _is_exact(program, groups):
        return groups
    return tuple((each.rank,) for each in program.ranks)


def _is_exact(program: Program, groups: Players) -> bool:
    """Whether the ranks of each player meet the same players along every axis."""
    player_of = {rank: n for n, ranks in enumerate(groups) for rank in ranks}
    by_device = {device: player_of[rank] for device, rank in program.rank_of.items()}
    for mesh in all_meshes(program.plan):
        for axis in range(len(mesh.axes)):
            met: dict[int, tuple[int, ...]] = {}
            for group in mesh.groups(axis):
                kinds = tuple(by_device[device] for device in group)
                if any(met.setdefault(kind, kinds) != kinds for kind in kinds):
                    return False
    return _hear_alike(program, groups, by_device)


def _hear_alike(program: Program, groups: Players, by_device: Mapping[int, int]) -> bool:
    """Whether in every transfer all ranks of a player are sent something, or none is."""
    sizes = [len(ranks) for ranks in groups]
    seen: set[int] = set()
    for ranks in groups:
        for instruction in program.ranks[ranks[0]].instructions:
            message = instruction.receives
            if message is not None and id(message.transfer) not in seen:
                seen.add(id(message.transfer))
                if not _all_or_none(message.transfer, by_device, sizes):
                    return False
    return True


def _all_or_none(transfer: Transfer, by_device: Mapping[int, int], sizes: Sequence[int]) -> bool:
    heard: dict[tuple[int, int], set[int]] = {}
    for move in transfer.moves:
        pair = by_device[move.sender], by_device[move.receiver]
        heard.setdefault(pair, set()).add(move.receiver)
    return all(len(receivers) == sizes[pair[1]] for pair, receivers in heard.items())


def _can_leave(player: Player, world: ReplayedWorld) -> bool:
    """Send what is to be sent, take what has come; whether the current instruction is over."""
    current = player.current
    sent, awaited = current.sends, current.receives
    if sent is not None and not player.has_sent:
        player.has_sent = True
        for source, target in world.pairs(sent.transfer):
            if source == player.number:
                on_its_way = _Sent(sent, str(current), player.step)
                world.channel(source, target, sent.label).append(on_its_way)
    if awaited is not None:
        for source, target in world.pairs(awaited.transfer):
            if target == player.number and source not in player.heard:
                channel = world.channel(source, target, awaited.label)
                if not channel:
                    return False
                _take(player, awaited, world.players[source].rank, channel.popleft())
                player.heard.add(source)
    return player.meeting is None


def _take(player: Player, awaited: Message, sender: int, sent: _Sent) -> None:
    ours, theirs = awaited.transfer, sent.message.transfer
    current = player.current
    if ours is not theirs and ours != theirs:
        raise ValueError(
            f"rank {player.rank} at {str(current)!r} expects a tensor of factors {ours.sizes} "
            f"from rank {sender}, which sends {theirs.sizes} at {sent.sent_by!r}; both must "
            f"follow one transfer"
        )
    if awaited.dtype != sent.message.dtype:
        raise ValueError(
            f"rank {player.rank} at {str(current)!r} expects {awaited.dtype} from rank {sender}, "
            f"which sends {sent.message.dtype} at {sent.sent_by!r}; both must have one dtype"
        )
    player.step = max(player.step, sent.step + 1)


def _meet(world: ReplayedWorld) -> bool:
    """Let every collective happen whose members are all there; whether there was one."""
    happened = False
    for player in world.players:
        together = _joined(player, world) if world.whole else (player,)
        while any(_meets(each, world) for each in together):
            happened = True
    return happened


def _meets(player: Player, world: ReplayedWorld) -> bool:
    """Let the collective that a player has entered happen, if its members are all there."""
    meeting = player.meeting
    if meeting is None:
        return False
    members = world.members(player, meeting)
    if any(member.meeting != meeting for member in members):
        return False
    step = max(member.step for member in members)
    for member in members:
        member.met += 1
        member.step = step
    return True


def _joined(player: Player, world: ReplayedWorld) -> tuple[Player, ...]:
    """Whom the collectives of a player's instruction join; none while one of them is elsewhere.

    Over two axes, these are its group along one, the groups of these along the other, and so on.
    """
    joined = {} if player.meeting is None else {player.number: player}
    reached = [*joined.values()]
    while reached:
        each = reached.pop()
        for meeting in each.current.meetings:
            for member in world.members(each, meeting):
                if member.over or meeting not in member.current.meetings:
                    return ()
                if member.number not in joined:
                    joined[member.number] = member
                    reached.append(member)
    return tuple(joined.values())
