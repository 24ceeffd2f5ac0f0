"""Pipeline schedules as data: what every rank does, in which order.

A schedule of two stages and three microbatches, one rank a stage, one column a step:

    rank 0   0F0 0F1 ... 0B0 0F2 0B1 ... 0B2
    rank 1   ... 1F0 1B0 1F1 1B1 1F2 1B2 ...

A step lasts as long as its slowest action; the real times come from the event simulator. The
schedules that have a name are in `named_schedules`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class ActionKind(Enum):
    """What an action does in its stage; a whole backward is both gradients at once."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    __hash__ = object.__hash__  # Members are the same by identity; Enum hashes their names.


class Action(NamedTuple):
    """One stage working on one microbatch, or on one slice of its tokens, in one direction.

    Example:
        >>> str(Action(2, ActionKind.FORWARD, 0))
        '2F0'
        >>> Action.parse("1B13").microbatch
        13
        >>> Action.parse("2F0.3").slice
        3
    """

    stage: int
    kind: ActionKind
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind.value}{self.microbatch}{part}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action back from its printed form.

        Raises:
            ValueError: if the text is not a stage, one of F, B, I and W, and a microbatch.
        """
        match = re.fullmatch(r"([0-9]+)([FBIW])([0-9]+)(?:\.([0-9]+))?", text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write stage, F, B, I or W, microbatch, such as "
                "'2F0', and the token slice if there are several, such as '2F0.3'"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]), int(match[4] or 0))


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every rank (the devices that hold one stage or several).

    Example:
        >>> schedule = Schedule.parse("rank 0: 0F0 0B0")
        >>> schedule.to_text()
        'rank 0: 0F0 0B0'

    Attributes:
        name: such as ``gpipe``.
        num_stages: stages are numbered in the order of the forward pass.
        num_microbatches: parts of the batch.
        orders: one list of actions per rank. A stage may be on several ranks, each with its own
            copy of the weights; a microbatch passes a stage on one of them.
        num_slices: parts into which the tokens of a microbatch are cut (causal models only).
        update_every: None when a step ends with the one update of its weights; else a stage's
            weights are updated whenever this many microbatches have passed it backward.
        stashes_weights: whether a backward without flushes uses the weights of its forward.
        vertical_sync: whether a microbatch uses the version that it found on the first stage on
            all of them.
    """

    name: str
    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    num_slices: int = 1
    update_every: int | None = None
    stashes_weights: bool = False
    vertical_sync: bool = False

    def __hash__(self) -> int:
        # That of all actions would take as long as what is remembered by it.
        return hash((self.name, self.num_stages, self.num_microbatches, self.num_ranks))

    @classmethod
    def parse(cls, text: str, *, name: str = "custom") -> Schedule:
        """Read the lines that `to_text` writes; the sizes follow from the actions.

        Example:
            >>> Schedule.parse("rank 0: 0F0 0B0").num_stages
            1

        Raises:
            ValueError: naming the line or the word that is wrong. What the actions say together
                is for `validate` to check.
        """
        orders: list[tuple[Action, ...]] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            match = re.fullmatch(r"rank ([0-9]+):(.*)", line)
            if match is None or int(match[1]) != len(orders):
                raise ValueError(
                    f"{line!r} is not the order of rank {len(orders)}: write 'rank "
                    f"{len(orders)}: 0F0 0B0 …', one line a rank, numbered from 0"
                )
            orders.append(tuple(Action.parse(word) for word in match[2].split()))
        actions = [action for order in orders for action in order]
        if not actions:
            raise ValueError("a schedule needs at least one action, such as 'rank 0: 0F0 0B0'")
        return cls(
            name,
            num_stages=1 + max(action.stage for action in actions),
            num_microbatches=1 + max(action.microbatch for action in actions),
            orders=tuple(orders),
            num_slices=1 + max(action.slice for action in actions),
        )

    def to_text(self) -> str:
        """One line a rank, such as ``rank 0: 0F0 0B0``."""
        return "\n".join(
            " ".join([f"rank {rank}:", *map(str, order)]) for rank, order in enumerate(self.orders)
        )

    @property
    def num_ranks(self) -> int:
        """The number of lists of actions."""
        return len(self.orders)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is run as an input gradient and a weight gradient."""
        return any(action.kind is ActionKind.INPUT_GRADIENT for action in self.rank_of)

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether no rank goes back before it went forward for the last time.

        Example:
            >>> Schedule.parse("rank 0: 0F0 0F1 0B0 0B1").runs_ahead
            True
            >>> Schedule.parse("rank 0: 0F0 0B0 0F1 0B1").runs_ahead
            False
        """
        return not any(
            after.kind is ActionKind.FORWARD and before.kind is not ActionKind.FORWARD
            for order in self.orders
            for before, after in pairwise(order)
        )

    @cached_property
    def parts_updates(self) -> bool:
        """Whether some rank has several stages, which it then updates behind all its actions."""
        several = (len({action.stage for action in order}) > 1 for order in self.orders)
        return self.update_every is None and any(several)

    @property
    def accumulates(self) -> bool:
        """Whether a stage makes gradients more than once before its update."""
        return self.update_every is None and self.num_microbatches * self.num_slices > 1

    @cached_property
    def rank_of(self) -> dict[Action, int]:
        """The rank that runs each action."""
        return {action: rank for rank, order in enumerate(self.orders) for action in order}

    @cached_property
    def situations(self) -> tuple[tuple[MemorySituation, ...], ...]:
        """Per rank, the distinct situations in which its memory may be fullest.

        Of those in which a rank begins actions of one stage and kind, none is listed that holds no
        more of any stage than another. The microbatch of the action itself does not count.

        Example:
            >>> schedule = Schedule.parse("rank 0: 0F0 0F1 0B0 0B1")
            >>> [(s.kind.value, s.held[0].waiting) for s in schedule.situations[0]]
            [('F', 1), ('B', 1)]
        """
        return tuple(fullest(situations_of(order)) for order in self.orders)

    @cached_property
    def _ranks_of(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {}
        for action, rank in self.rank_of.items():
            found.setdefault(action.stage, set()).add(rank)
        return {stage: tuple(sorted(ranks)) for stage, ranks in found.items()}

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage, in order.

        Example:
            >>> Schedule.parse("rank 0: 0F0 0B0").ranks_of(0)
            (0,)
        """
        return self._ranks_of.get(stage, ())

    @cached_property
    def is_mirrored(self) -> bool:
        """Whether each stage has two homes, its own rank and that of its mirror image (Chimera).

        Example:
            >>> both = "rank 0: 0F0 1F1 1B1 0B0 \\n rank 1: 0F1 1F0 1B0 0B1"
            >>> Schedule.parse(both).is_mirrored
            True
        """
        count = self.num_stages
        homes = [{stage, count - 1 - stage} for stage in range(count)]
        found = [set(self.ranks_of(stage)) for stage in range(count)]
        return count % 2 == 0 and found == homes

    @cached_property
    def copied_stage(self) -> int | None:
        """The first stage on several ranks that are not those of mirror images; None without.

        Example:
            >>> Schedule.parse("rank 0: 0F0 0B0 \\n rank 1: 0F1 1F0 1B0 1F1 1B1 0B1").copied_stage
            0
        """
        several = (s for s in range(self.num_stages) if len(self.ranks_of(s)) > 1)
        return None if self.is_mirrored else next(several, None)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The rank of each stage; the first of its homes, where it has several.

        Example:
            >>> Schedule.parse("rank 0: 0F0 0B0 \\n rank 1: 1F0 1B0").homes
            (0, 1)
        """
        if self.is_mirrored:
            return tuple(range(self.num_stages))
        return tuple(self.ranks_of(stage)[0] for stage in range(self.num_stages))

    def gradient(self, stage: int, microbatch: int, token_slice: int = 0) -> Action:
        """The action that makes the gradient of a stage's input: B, or I where it is split."""
        split = Action(stage, ActionKind.INPUT_GRADIENT, microbatch, token_slice)
        if split in self.rank_of:
            return split
        return Action(stage, ActionKind.BACKWARD, microbatch, token_slice)

    def requirements(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that must be over before one, those of its own stage first.

        A slice of tokens looks back at the slices before it, so its gradient needs that of the
        slice behind it.

        Example:
            >>> schedule = Schedule.parse("rank 0: 0F0 0B0 \\n rank 1: 1F0 1B0")
            >>> [str(action) for action in schedule.requirements(Action.parse("0B0"))]
            ['0F0', '1B0']
        """
        stage, microbatch, part = action.stage, action.microbatch, action.slice
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            return (Action(stage, ActionKind.INPUT_GRADIENT, microbatch, part),)
        if action.kind is ActionKind.FORWARD:
            before = [(stage, part - 1), (stage - 1, part)]
            return tuple(
                Action(s, ActionKind.FORWARD, microbatch, k) for s, k in before if min(s, k) >= 0
            )
        behind = [(stage, part + 1), (stage + 1, part)]
        return (
            Action(stage, ActionKind.FORWARD, microbatch, part),
            *(
                self.gradient(s, microbatch, k)
                for s, k in behind
                if s < self.num_stages and k < self.num_slices
            ),
        )

    @cached_property
    def updates(self) -> frozenset[Action]:
        """The actions after which their rank updates the weights of their stage.

        Synchronous schedules update after the last gradient of a stage on a rank.
        """
        found: set[Action] = set()
        for order in self.orders:
            made: Counter[int] = Counter()
            total = Counter(action.stage for action in order if makes_weight_gradient(action))
            for action in filter(makes_weight_gradient, order):
                made[action.stage] += 1
                every = (
                    total[action.stage]
                    if self.update_every is None
                    else self.update_every * self.num_slices
                )
                if made[action.stage] % every == 0:
                    found.add(action)
        return frozenset(found)


WEIGHT_GRADIENT_KINDS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
"""Actions that make the gradient of their stage's weights, and let go of its input."""


def makes_weight_gradient(action: Action) -> bool:
    """Whether an action makes the gradient of its stage's weights, and lets go of its input."""
    return action.kind in WEIGHT_GRADIENT_KINDS


def validate(schedule: Schedule) -> None:
    """Check that a schedule does everything once and does not deadlock.

    Every stage has one forward for every microbatch (and token slice), and one backward, or one
    input gradient and one weight gradient; all that a stage does for a microbatch is on one rank.
    What an action needs is said by `Schedule.requirements`.

    Raises:
        ValueError: naming the action at fault; for a deadlock with the grid of all steps so far.
    """
    check_sizes(schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    if schedule.update_every is not None and schedule.update_every < 1:
        raise ValueError(
            f"schedule {schedule.name!r} updates every {schedule.update_every} microbatches: it "
            "must be at least 1"
        )
    _check_complete(schedule)
    _check_homes(schedule)
    steps, waiting = _replay(schedule)
    if waiting:
        reasons = [
            f"rank {rank} wants {action}, which needs {missing}"
            for rank, (action, missing) in waiting.items()
        ]
        raise ValueError(
            f"schedule {schedule.name!r} deadlocks at step {len(steps)}: {'; '.join(reasons)}; "
            f"reorder the actions marked !\n{grid(schedule)}"
        )


def grid(schedule: Schedule) -> str:
    """Draw one row a rank and one column a step, each action as early as its needs allow.

    Example:
        >>> print(grid(Schedule.parse("rank 0: 0F0 0B0")))
        rank 0  0F0 0B0

    If the schedule deadlocks, the last column has the actions that cannot run, each marked ``!``.
    """
    steps, waiting = _replay(schedule)
    columns = [{rank: str(action) for rank, action in step.items()} for step in steps]
    if waiting:
        columns.append({rank: f"!{action}" for rank, (action, _) in waiting.items()})
    width = max((len(cell) for column in columns for cell in column.values()), default=0)
    label = len(str(schedule.num_ranks - 1))
    rows = (
        " ".join(column.get(rank, "...").ljust(width) for column in columns)
        for rank in range(schedule.num_ranks)
    )
    return "\n".join(f"rank {rank:<{label}}  {row.rstrip()}" for rank, row in enumerate(rows))


class Held(NamedTuple):
    """Microbatches (times token slices) whose activations a stage holds on a rank.

    `waiting` are those whose backward is still to come; `late` wait for the gradients of the
    stage's parameters only.
    """

    stage: int
    waiting: int
    late: int


class MemorySituation(NamedTuple):
    """A rank begins an action of a stage and a kind, and holds the activations of others."""

    stage: int
    kind: ActionKind
    held: tuple[Held, ...]


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Count the microbatches (times token slices) that each stage holds at most on a rank.

    Example:
        >>> peak_in_flight(Schedule.parse("rank 0: 0F0 0F1 0B0 0B1"))
        (2,)

    A microbatch is held from its forward to the end of its backward, or of its weight gradient.
    """
    peak = [0] * schedule.num_stages
    for found in schedule.situations:
        for situation in found:
            for held in situation.held:
                runs = held.stage == situation.stage
                peak[held.stage] = max(peak[held.stage], held.waiting + held.late + runs)
    return tuple(peak)


def check_sizes(num_stages: int, num_microbatches: int, num_slices: int = 1) -> None:
    """Refuse a schedule without stages, microbatches or slices."""
    if min(num_stages, num_microbatches) < 1:
        raise ValueError(
            f"{num_stages} stages and {num_microbatches} microbatches: a schedule needs at least "
            "one of each"
        )
    if num_slices < 1:
        raise ValueError(f"{num_slices} token slices: a microbatch has at least one")


def fullest(situations: Iterable[MemorySituation]) -> tuple[MemorySituation, ...]:
    """Of situations with actions of one stage and kind, those that hold no less than another."""
    found: dict[tuple[int, ActionKind], list[MemorySituation]] = {}
    for situation in dict.fromkeys(situations):
        rivals = found.setdefault((situation.stage, situation.kind), [])
        if not any(_covers(rival, situation) for rival in rivals):
            rivals[:] = [rival for rival in rivals if not _covers(situation, rival)]
            rivals.append(situation)
    return tuple(situation for rivals in found.values() for situation in rivals)


def situations_of(order: Iterable[Action]) -> Iterator[MemorySituation]:
    """What a rank holds of other microbatches while each of its actions runs."""
    waiting: dict[int, int] = {}
    late: dict[int, int] = {}
    for action in order:
        stage, kind = action.stage, action.kind
        waiting.setdefault(stage, 0)
        if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            waiting[stage] -= 1
        elif kind is ActionKind.WEIGHT_GRADIENT:
            late[stage] -= 1
        held = tuple(Held(s, count, late.get(s, 0)) for s, count in sorted(waiting.items()))
        yield MemorySituation(stage, kind, held)
        if kind is ActionKind.FORWARD:
            waiting[stage] += 1
        elif kind is ActionKind.INPUT_GRADIENT:
            late[stage] = late.get(stage, 0) + 1


def _covers(large: MemorySituation, small: MemorySituation) -> bool:
    there = {held.stage: held for held in large.held}
    return all(
        held.stage in there
        and there[held.stage].waiting >= held.waiting
        and there[held.stage].late >= held.late
        for held in small.held
    )


def _replay(
    schedule: Schedule,
) -> tuple[list[dict[int, Action]], dict[int, tuple[Action, Action]]]:
    """Run every rank's actions, each in the first step in which all it needs is over.

    Returns:
        For each step, what the ranks do in it; and, for a deadlock, each rank's next action with
        one that it needs.
    """
    done: set[Action] = set()
    position = [0] * schedule.num_ranks
    steps: list[dict[int, Action]] = []
    while True:
        step: dict[int, Action] = {}
        waiting: dict[int, tuple[Action, Action]] = {}
        for rank, order in enumerate(schedule.orders):
            if position[rank] < len(order):
                action = order[position[rank]]
                needs = schedule.requirements(action)
                missing = next((need for need in needs if need not in done), None)
                if missing is None:
                    step[rank] = action
                else:
                    waiting[rank] = action, missing
        if not step:
            return steps, waiting
        steps.append(step)
        done.update(step.values())
        for rank in step:
            position[rank] += 1


def _check_complete(schedule: Schedule) -> None:
    sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
    if schedule.num_slices > 1:
        sizes += f" of {schedule.num_slices} token slices"
    for action, times in Counter(a for order in schedule.orders for a in order).items():
        if (
            action.stage >= schedule.num_stages
            or action.microbatch >= schedule.num_microbatches
            or action.slice >= schedule.num_slices
        ):
            raise ValueError(f"{action} is not in a schedule of {sizes}: remove it")
        if times > 1:
            raise ValueError(f"{action} is scheduled {times} times: keep one of them")
    expected = list(_expected(schedule))
    missing = sorted(str(action) for action in expected if action not in schedule.rank_of)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(expected)} actions of {sizes} are never scheduled, such as "
            f"{missing[0]}: add them"
        )
    twice = schedule.rank_of.keys() - set(expected)
    if twice:
        action = min(twice, key=str)
        whole = Action(action.stage, ActionKind.BACKWARD, action.microbatch, action.slice)
        raise ValueError(
            f"{whole} is scheduled whole and {action} as a part of it: keep the whole or the parts"
        )


def _expected(schedule: Schedule) -> Iterator[Action]:
    """One forward and one backward each; a backward of which one part is there, as both parts."""
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for part in range(schedule.num_slices):
                forward, whole, inputs, weights = (
                    Action(stage, kind, microbatch, part) for kind in ActionKind
                )
                yield forward
                in_parts = whole not in schedule.rank_of and (
                    inputs in schedule.rank_of or weights in schedule.rank_of
                )
                yield from (inputs, weights) if in_parts else (whole,)


def _check_homes(schedule: Schedule) -> None:
    home: dict[tuple[int, int], int] = {}
    for action, rank in schedule.rank_of.items():
        first = home.setdefault((action.stage, action.microbatch), rank)
        if first != rank:
            raise ValueError(
                f"{action} is on rank {rank}, but its stage is on rank {first} for this "
                "microbatch: keep all actions of a stage for a microbatch on one rank"
            )
