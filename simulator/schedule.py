"""Pipeline schedules as data: what every rank does, in which order.

A schedule of two stages and three microbatches, one rank a stage, one column a step:

    rank 0   0F0 0F1 ... 0B0 0F2 0B1 ... 0B2
    rank 1   ... 1F0 1B0 1F1 1B1 1F2 1B2 ...

A step lasts as long as its slowest action; the real times come from the event simulator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """Which way an action goes through its stage."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One stage working on one microbatch in one direction.

    Example:
        >>> str(Action(2, ActionKind.FORWARD, 0))
        '2F0'
        >>> Action.parse("1B13").microbatch
        13
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action back from its printed form.

        Raises:
            ValueError: if the text is not a stage, F or B, and a microbatch.
        """
        match = re.fullmatch(r"([0-9]+)([FB])([0-9]+)", text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write stage, F or B, microbatch, such as '2F0'"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def requirements(self, num_stages: int) -> tuple[Action, ...]:
        """Return the actions that must be over before this one, nearest first.

        Example:
            >>> [str(action) for action in Action.parse("0B3").requirements(num_stages=2)]
            ['0F3', '1B3']
        """
        if self.kind is ActionKind.FORWARD:
            if self.stage == 0:
                return ()
            return (Action(self.stage - 1, ActionKind.FORWARD, self.microbatch),)
        forward = Action(self.stage, ActionKind.FORWARD, self.microbatch)
        if self.stage == num_stages - 1:
            return (forward,)
        return forward, Action(self.stage + 1, ActionKind.BACKWARD, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every rank (the devices that hold one stage or several).

    Attributes:
        name: such as ``gpipe``.
        num_stages: stages are numbered in the order of the forward pass.
        num_microbatches: parts of the batch.
        orders: one list of actions per rank.
    """

    name: str
    num_stages: int
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The number of lists of actions."""
        return len(self.orders)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    Example:
        >>> print(grid(gpipe(2, 2)))
        rank 0  0F0 0F1 ... ... 0B0 0B1
        rank 1  ... 1F0 1F1 1B0 1B1 ...

    Raises:
        ValueError: if a size is below 1.
    """
    return _schedule("gpipe", num_stages, num_microbatches, _gpipe_order)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """As few forwards ahead as keep the pipeline full (PipeDream-Flush, Narayanan et al. 2021).

    Example:
        >>> print(grid(one_f_one_b(2, 3)))
        rank 0  0F0 0F1 ... 0B0 0F2 0B1 ... 0B2
        rank 1  ... 1F0 1B0 1F1 1B1 1F2 1B2 ...

    As long as GPipe, but stage s of S holds S - s microbatches at most instead of all.

    Raises:
        ValueError: if a size is below 1.
    """
    return _schedule("1f1b", num_stages, num_microbatches, _one_f_one_b_order)


def schedule_by_name(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule of a name in `SCHEDULES`.

    Example:
        >>> schedule_by_name("1f1b", 4, 8).num_ranks
        4

    Raises:
        ValueError: if the name is unknown or a size is below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}: choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_stages, num_microbatches)


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The schedules that have a name."""


def validate(schedule: Schedule) -> None:
    """Check that a schedule does everything once and does not deadlock.

    Every stage has one forward and one backward for every microbatch, all on one rank. A forward
    needs the forward of the stage before; a backward needs the forward of its own stage and the
    backward of the stage behind.

    Raises:
        ValueError: naming the action at fault; for a deadlock with the grid of all steps so far.
    """
    _check_sizes(schedule.num_stages, schedule.num_microbatches)
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
        >>> print(grid(gpipe(1, 1)))
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


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Count the microbatches that each stage holds at most.

    Example:
        >>> peak_in_flight(one_f_one_b(3, 8))
        (3, 2, 1)

    A microbatch is held from its forward to the end of its backward.
    """
    held, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for action in (action for order in schedule.orders for action in order):
        held[action.stage] += 1 if action.kind is ActionKind.FORWARD else -1
        peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)


def _schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    order: Callable[[int, int, int], Iterable[Action]],
) -> Schedule:
    """One rank a stage, each in the order that ``order(stage, stages, microbatches)`` yields."""
    _check_sizes(num_stages, num_microbatches)
    orders = (tuple(order(stage, num_stages, num_microbatches)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, tuple(orders))


def _gpipe_order(stage: int, num_stages: int, num_microbatches: int) -> Iterable[Action]:
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        yield from (Action(stage, kind, microbatch) for microbatch in range(num_microbatches))


def _one_f_one_b_order(stage: int, num_stages: int, num_microbatches: int) -> Iterable[Action]:
    ahead = num_stages - stage
    for forward in range(num_microbatches + ahead):
        if forward >= ahead:
            yield Action(stage, ActionKind.BACKWARD, forward - ahead)
        if forward < num_microbatches:
            yield Action(stage, ActionKind.FORWARD, forward)


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
                needs = action.requirements(schedule.num_stages)
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


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"{num_stages} stages and {num_microbatches} microbatches: a schedule needs at least "
            "one of each"
        )


def _check_complete(schedule: Schedule) -> None:
    count = Counter(action for order in schedule.orders for action in order)
    expected = {
        Action(stage, kind, microbatch)
        for stage in range(schedule.num_stages)
        for kind in ActionKind
        for microbatch in range(schedule.num_microbatches)
    }
    sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
    for action, times in count.items():
        if action not in expected:
            raise ValueError(f"{action} is not in a schedule of {sizes}: remove it")
        if times > 1:
            raise ValueError(f"{action} is scheduled {times} times: keep one of them")
    missing = sorted(map(str, expected - count.keys()))
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(expected)} actions of {sizes} are never scheduled, such as "
            f"{missing[0]}: add them"
        )


def _check_homes(schedule: Schedule) -> None:
    home: dict[int, int] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"{action} is on rank {rank}, but its stage is on rank {home[action.stage]}: "
                    "keep all actions of a stage on one rank"
                )
