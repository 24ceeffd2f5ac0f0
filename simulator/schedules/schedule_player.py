"""Playing a schedule with given durations: when every action runs, and how much is idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.event_engine import Times, simulate
from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule, validate
from stratagem.simulator.schedules.macro_graph import MacroGraph, macro_graph
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_BACKWARD,
    LAST_WEIGHT_GRADIENT,
    NUM_KINDS,
    REPLICA_SYNC,
    REPLICA_UPDATE,
    SEND,
    SEND_BACK,
    SYNCED_BACKWARD,
    SYNCED_WEIGHT_GRADIENT,
    UPDATE,
    WEIGHT_GRADIENT,
)
from stratagem.simulator.timeline.timeline import Row, Timeline, from_rows, lane_name

_ROW_KINDS = {
    ActionKind.FORWARD: TaskKind.FORWARD,
    ActionKind.BACKWARD: TaskKind.BACKWARD,
    ActionKind.INPUT_GRADIENT: TaskKind.BACKWARD,
    ActionKind.WEIGHT_GRADIENT: TaskKind.BACKWARD,
}


@dataclass(frozen=True)
class StageTimes:
    """How long a stage takes, in ns: a number, or a list with one number a stage.

    In place of a stage's number there may be a list with one number for each slice of its tokens.

    Example:
        >>> StageTimes(forward=[10, 10, 30], backward=20).backward
        20

    Attributes:
        forward: a forward of one microbatch (or token slice).
        backward: a whole backward.
        input_gradient: the input's part of a backward, where the schedule splits it.
        weight_gradient: the weights' part.
        transfer: from each stage to the next, and of the gradient back; for stages on one rank it
            does not count.
        update: the optimizer, after the last backward, or after every `update_every` of them; of
            a stage's copies after all that their ranks do, and the sum of their gradients. What a
            last backward sends does not wait for it, and where a rank has several stages, nor do
            its next actions: their updates come behind all of them.
        replica_sync: summing the gradients of a stage's copies on two ranks, which go on with
            other stages meanwhile.
    """

    forward: PerStage
    backward: PerStage = 0
    input_gradient: PerStage = 0
    weight_gradient: PerStage = 0
    transfer: PerStage = 0
    update: PerStage = 0
    replica_sync: PerStage = 0

    def numbers(self, name: str, count: int, slices: int = 1) -> Ints:
        """The times in the field `name`, [count · slices], ns.

        Raises:
            ValueError: when one is negative or not whole, or there is not one for each.
        """
        given: PerStage = getattr(self, name)
        what = "transfers between stages" if name == "transfer" else "stages"
        stages = list(given) if isinstance(given, Sequence) else [given] * count
        if len(stages) != count:
            raise ValueError(f"{name} has {len(stages)} times, but there are {count} {what}")
        found: list[int] = []
        for stage, time in enumerate(stages):
            parts = list(time) if isinstance(time, Sequence) else [time] * slices
            if len(parts) != slices:
                raise ValueError(
                    f"{name} of stage {stage} has {len(parts)} times, but there are {slices} "
                    "token slices"
                )
            found += parts
        for time in found:
            if not isinstance(time, int | np.integer) or time < 0:
                raise ValueError(f"{name} has the time {time!r}: times are whole ns, 0 or more")
        return np.array(found, dtype=np.int64)


PerStage = int | Sequence[int | Sequence[int]]


@dataclass(frozen=True, eq=False)
class Play:
    """A schedule played with given durations.

    Attributes:
        schedule: what was played.
        makespan: ns from the first start to the last end.
    """

    schedule: Schedule
    makespan: int
    _macro: MacroGraph
    _times: Times
    _table: Ints
    _update: Ints

    def span(self, action: Action) -> tuple[int, int]:
        """Start and end of an action in ns; an update right after it is part of it.

        Raises:
            ValueError: when the schedule has no such action.
        """
        if action not in self._macro.number:
            raise ValueError(f"schedule {self.schedule.name!r} has no action {action}")
        task = self._macro.number[action]
        return int(self._times.start[task]), int(self._times.end[self._macro.end(task)])

    @cached_property
    def busy(self) -> tuple[int, ...]:
        """Per rank, the ns in which it runs actions and updates."""
        total = [0] * self.schedule.num_ranks
        for action, rank in self.schedule.rank_of.items():
            start, end = self.span(action)
            total[rank] += end - start
        for task in self._updates:
            rank = int(self._macro.rank[task])
            total[rank] += int(self._times.end[task] - self._times.start[task])
        return tuple(total)

    @cached_property
    def _updates(self) -> list[int]:
        """The updates behind all actions of a rank."""
        kinds = self._macro.kind
        found: list[int] = np.flatnonzero((kinds == UPDATE) | (kinds == REPLICA_UPDATE)).tolist()
        return found

    @property
    def bubble(self) -> Fraction:
        """The share of the ranks' time in which they are idle, exactly."""
        whole = self.schedule.num_ranks * self.makespan
        return 1 - Fraction(sum(self.busy), whole) if whole else Fraction(0)

    @cached_property
    def peak_held(self) -> tuple[int, ...]:
        """Per rank, the most microbatches (times token slices) held, of all its stages."""
        return tuple(
            max((sum(h.waiting + h.late for h in each.held) + 1 for each in found), default=0)
            for found in self.schedule.situations
        )

    @cached_property
    def timeline(self) -> Timeline:
        """What ran where and when: a lane a rank, and one for each link between two ranks."""
        lanes = [lane_name(f"rank {r}", "compute") for r in range(self.schedule.num_ranks)]
        rows = [*self._action_rows(), *self._joint_rows(), *self._transfer_rows()]
        return from_rows(rows, label=self.schedule.name, lanes=lanes)

    def _action_rows(self) -> Iterator[Row]:
        for action, rank in self.schedule.rank_of.items():
            task = self._macro.number[action]
            start, end = self.span(action)
            updates = self._macro.block_kind(task) in (LAST_BACKWARD, LAST_WEIGHT_GRADIENT)
            update = int(self._update[action.stage]) if updates else 0
            lane = lane_name(f"rank {rank}", "compute")
            if end - update > start:
                kind = _ROW_KINDS[action.kind]
                yield Row(str(action), kind, lane, start, end - update)
            if update:
                name = f"update of stage {action.stage}"
                yield Row(name, TaskKind.UPDATE, lane, end - update, end)

    def _joint_rows(self) -> Iterator[Row]:
        kinds = self._macro.kind
        for task in self._updates:
            start, end = int(self._times.start[task]), int(self._times.end[task])
            stage = int(self._macro.item[task]) // self.schedule.num_slices
            if kinds[task] == REPLICA_UPDATE:
                stage = self._macro.copies[int(self._macro.item[task])]
            lane = lane_name(f"rank {self._macro.rank[task]}", "compute")
            if end > start:
                yield Row(f"update of stage {stage}", TaskKind.UPDATE, lane, start, end)
        for sync in np.flatnonzero(kinds == REPLICA_SYNC):
            start, end = int(self._times.start[sync]), int(self._times.end[sync])
            stage = self._macro.copies[int(self._macro.item[sync])]
            if end == start:
                continue
            for rank in self.schedule.ranks_of(stage):
                lane = lane_name(f"rank {rank}", "to its copies")
                yield Row(f"sync of stage {stage}", TaskKind.GRADIENT_SYNC, lane, start, end)

    def _transfer_rows(self) -> Iterator[Row]:
        slices = self.schedule.num_slices
        for kind in (SEND, SEND_BACK):
            for task in np.flatnonzero(self._macro.kind == kind):
                start, end = int(self._times.start[task]), int(self._times.end[task])
                pair, part = divmod(int(self._macro.item[task]), slices)
                source, target = self._macro.pairs[pair][:: 1 if kind == SEND else -1]
                if end > start:
                    cut = f".{part}" if part else ""
                    microbatch = int(self._macro.microbatch[task])
                    arrives = Action(target, ActionKind.FORWARD, microbatch, part)
                    to = f"to rank {self.schedule.rank_of[arrives]}"
                    lane = lane_name(f"rank {self._macro.rank[task]}", to)
                    name = f"stage {source} ⇢ stage {target}, microbatch {microbatch}{cut}"
                    yield Row(name, TaskKind.COMMUNICATION, lane, start, end)


def play_schedule(schedule: Schedule, times: StageTimes) -> Play:
    """Play a schedule.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import gpipe
        >>> play = play_schedule(gpipe(4, 8), StageTimes(forward=10, backward=20))
        >>> play.makespan, play.bubble
        (330, Fraction(3, 11))

    Args:
        schedule: any that `validate` accepts.
        times: ns of its stages.

    Raises:
        ValueError: when the schedule is not valid, or a time is negative or not there for every
            stage, slice or transfer.
    """
    validate(schedule)
    pairs = tuple(pairwise(range(schedule.num_stages)))
    macro = macro_graph(schedule, pairs)
    table, update = duration_table(macro, times)
    played = simulate(macro.with_durations(table))
    return Play(schedule, played.makespan, macro, played, table, update)


def duration_table(macro: MacroGraph, times: StageTimes) -> tuple[Ints, Ints]:
    """The duration table of a macro graph under `times`, in ns, and each stage's update.

    The updates of a stage that is there twice come behind the sum over its copies.
    """
    schedule = macro.schedule
    stages, slices = schedule.num_stages, schedule.num_slices
    table = np.zeros((NUM_KINDS, macro.num_items), dtype=np.int64)
    width = stages * slices
    copied = np.array([len(schedule.ranks_of(stage)) > 1 for stage in range(stages)])
    update = times.numbers("update", stages)
    alone = np.where(copied, 0, update)
    for kind, name in (
        (FORWARD, "forward"),
        (BACKWARD, "backward"),
        (INPUT_GRADIENT, "input_gradient"),
        (WEIGHT_GRADIENT, "weight_gradient"),
    ):
        table[kind, :width] = times.numbers(name, stages, slices)
    table[UPDATE, :width] = np.repeat(alone, slices)
    for kind, synced, last in (
        (BACKWARD, SYNCED_BACKWARD, LAST_BACKWARD),
        (WEIGHT_GRADIENT, SYNCED_WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT),
    ):
        table[synced, :width] = table[kind, :width]
        table[last, :width] = table[kind, :width] + table[UPDATE, :width]
    sent = times.numbers("transfer", len(macro.pairs), slices)
    table[SEND, : sent.size] = table[SEND_BACK, : sent.size] = sent
    copies = np.array(macro.copies, dtype=np.int64)
    table[REPLICA_SYNC, : copies.size] = times.numbers("replica_sync", stages)[copies]
    table[REPLICA_UPDATE, : copies.size] = update[copies]
    return table, alone
