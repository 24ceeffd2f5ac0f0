"""The macro level: stages × microbatches of blocks under the schedule's explicit order.

A block holds all devices of its rank, so a step is the schedule's actions played one after the
other on each rank, each as long as its block, joined by transfers between ranks:

    rank 0   F0 F1 ─── B0 F2 B1 …         the last backward of a stage carries the
                ╲  ╲   ╱                    gradient sync and the update
    rank 1      F0 B0 F1 B1 …

What a last backward sends on does not wait for that sync and update: where a rank has one stage,
such a block is two tasks, the backward and what the last one takes longer:

    rank 0     ───────── B2 │ sync, update
                        ╱
    rank 1     … B2 │ sync, update

Where it has several, it goes on meanwhile: gradients are summed beside its next actions, one stage
after the other, and all updates come behind its last one, as in its program:

    rank 0      ───────────────── 2B2 ─────── 0B2 │ update 0 │ update 2
                                 ╱  │ sync 2 ╱  │ sync 0 │
    rank 1      … 3B2 ────────────── 1B2 │ update 1 │ update 3
                    │ sync 3 │         │ sync 1 │

Where every microbatch sums its gradients (ZeRO-2 and 3), those before the last do so beside the
next blocks, too. Beside the blocks of a rank go its links, which serve what each of them gathers
of parameters and sums of gradients, one block after the other, none before it begins; the step is
not over before they are:

    rank 0      F0 B0 F1 B1 F2 B2              │ update
    links         │ sum 0 │ sum 1 │ sync 2 │ publish │

A rank gets no further ahead of them than by the gradients of one microbatch: what follows a block,
and what it sends, waits for what its stage summed before it. So gradients that wait are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.schedules.actions import (
    Action,
    Schedule,
    makes_weight_gradient,
)
from stratagem.simulator.schedules.macro_draft import (
    ALL,
    EARLY,
    STASHED_EARLY,
    CopyTask,
    Draft,
)
from stratagem.simulator.schedules.named_schedules import REMEMBERED_SCHEDULES
from stratagem.simulator.schedules.work_kinds import (
    LAST_LINKS,
    LAST_LINKS_WEIGHT_GRADIENT,
    LINKS,
    LINKS_BACKWARD,
    LINKS_INPUT_GRADIENT,
    LINKS_WEIGHT_GRADIENT,
    RESHARD,
    RESHARD_BACK,
    SEND,
    SEND_BACK,
    SYNC,
    TIE,
)

_REPEATED = (SYNC, LINKS, LINKS_INPUT_GRADIENT, LAST_LINKS, LAST_LINKS_WEIGHT_GRADIENT)
"""What blocks do, played alone to say when links are through with it."""
_BESIDE = (*_REPEATED, LINKS_BACKWARD, LINKS_WEIGHT_GRADIENT)
"""What holds no rank."""


@dataclass(frozen=True, eq=False)
class MacroGraph:
    """The macro tasks of a pipeline: the graph, and where each task's duration is looked up.

    A task's duration is ``durations[kind, item]``. With K token slices `item` is stage · K +
    slice for blocks, pair · K + slice for transfers (`pairs` of stages), the number of a tied
    parameter for ties and a number in `copies`, the stages of tasks of copies. `microbatch` is −1
    for the last two; `rank` is where a block runs and where a transfer begins.

    Where `less` is not −1, a task takes only what it takes longer than that kind does: it is the
    rest of a last block, of which the kind `less` came before. `rests` has those that hold the
    rank, by the task that each belongs to. `syncs` has by the task of a last block those with
    which its gradient sync ends beside other blocks: its rest, and all of it behind those before;
    where every microbatch sums its gradients, the same of others. `linked` then has by the task of
    a rank's last block the one with which links are through with it.
    """

    schedule: Schedule
    graph: TaskGraph
    kind: Ints
    less: Ints
    item: Ints
    microbatch: Ints
    rank: Ints
    number: dict[Action, int]
    rests: dict[int, int]
    syncs: dict[int, tuple[int, ...]]
    linked: dict[int, int]
    pairs: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, int], ...]
    copies: tuple[int, ...] = ()

    @property
    def num_items(self) -> int:
        """Columns that a duration table needs."""
        wide = max(self.schedule.num_stages, len(self.pairs)) * self.schedule.num_slices
        return max(wide, len(self.ties), len(self.copies))

    @property
    def blocks(self) -> list[int]:
        """The tasks with which blocks begin, in the order of ranks and actions; updates alone."""
        begins = are_blocks(self.kind) & (self.less < 0) & ~np.isin(self.kind, _BESIDE)
        found: list[int] = np.flatnonzero(begins).tolist()
        return found

    @property
    def repeats(self) -> Flags:
        """[tasks], whether the work of a task is that of others, here behind what links serve."""
        found: Flags = np.isin(self.kind, _REPEATED)
        return found

    def block_kind(self, task: int) -> int:
        """The kind of the block that begins with a task: that of its rest, where it has one."""
        return int(self.kind[self.end(task)])

    def end(self, task: int) -> int:
        """The task with which the block ends that begins with `task`."""
        return self.rests.get(task, task)

    def task_ns(self, durations: Ints) -> Ints:
        """[tasks], ns of each under a table of durations in ns, [NUM_KINDS, num_items]."""
        before = np.where(self.less >= 0, durations[self.less, self.item], 0)
        found: Ints = np.maximum(0, durations[self.kind, self.item] - before)
        return found

    def with_durations(self, durations: Ints) -> TaskGraph:
        """The graph under a table of durations in ns, [NUM_KINDS, num_items]."""
        ns = self.task_ns(durations)
        return TaskGraph(
            successor_offsets=self.graph.successor_offsets,
            successors=self.graph.successors,
            num_predecessors=self.graph.num_predecessors,
            durations=ns,
            resource_sets=np.where(ns > 0, self.graph.resource_sets, 0),
            set_offsets=self.graph.set_offsets,
            set_resources=self.graph.set_resources,
            num_resources=self.graph.num_resources,
        )


@lru_cache(maxsize=REMEMBERED_SCHEDULES)
def macro_graph(
    schedule: Schedule,
    pairs: tuple[tuple[int, int], ...],
    ties: tuple[tuple[int, int], ...] = (),
    blocking: tuple[bool, ...] = (),
    longer: frozenset[Action] | None = None,
    *,
    num_stages: int | None = None,
    blocking_syncs: tuple[bool, ...] = (),
    copies: tuple[tuple[CopyTask, ...], ...] = (),
    blocking_copies: tuple[bool, ...] = (),
    reducing: tuple[bool, ...] = (),
) -> MacroGraph:
    """The macro tasks of a schedule; asked for again soon, they are the same object.

    Args:
        schedule: its actions, one list a rank.
        pairs: (stage, later stage) between which activations travel.
        ties: (owner's stage, user's stage) of every parameter tied across stages.
        blocking: per pair whether a transfer keeps the cores of its sender busy (CPU processes):
            it then goes before the sender's next action, as in the order of a rank's program. What
            leaves a last backward early does not.
        longer: the actions that are ``LAST_…`` blocks; those that end in an update if left out.
        num_stages: of the model, where `schedule` counts a stage's second home as one more (see
            `named_schedules.unfolded`).
        blocking_syncs: per stage whether its gradient sync keeps the cores of its rank busy, which
            then does not go on meanwhile.
        copies: per stage the tasks of its copies; one sum and an update on each if left out.
        blocking_copies: per stage whether its sums keep the cores of all their ranks busy.
        reducing: per stage whether every microbatch may sum its gradients.
    """
    draft = Draft(schedule, schedule.updates if longer is None else longer)
    last = _last_gradients(schedule, num_stages or schedule.num_stages)
    draft.leave_early(
        {later for _, later in pairs},
        EARLY if longer is None else STASHED_EARLY,
        alone=schedule.update_every is None,
    )
    if schedule.update_every is None:
        copied = {action for actions in last if len(actions) > 1 for action in actions}
        draft.sync_beside(_where(blocking_syncs), copied, _where(reducing))
    for p, pair in enumerate(pairs):
        draft.transfers(p, pair, bool(blocking) and blocking[p])
    for t, (owner, user) in enumerate(ties):
        draft.joint(TIE, t, [*last[owner], *last[user]])
    for stage, actions in enumerate(last):
        if len(actions) > 1:
            tasks = copies[stage] if copies else _one_sum(len(actions))
            draft.copies(stage, tasks, actions, bool(blocking_copies) and blocking_copies[stage])
    return _finished(draft, pairs, ties)


def _where(flags: Sequence[bool]) -> set[int]:
    return {s for s, flag in enumerate(flags) if flag}


def _one_sum(num_copies: int) -> list[CopyTask]:
    return [CopyTask(ALL), *(CopyTask(copy, 0) for copy in range(num_copies))]


def check_priced(schedule: Schedule) -> None:
    """Refuse a schedule whose plans are not priced yet; `play_schedule` plays every schedule.

    Raises:
        ValueError: naming what it needs and what to do instead.
    """
    stage = schedule.copied_stage
    if stage is not None:
        raise ValueError(
            f"schedule {schedule.name!r} has stage {stage} on ranks "
            f"{' and '.join(map(str, schedule.ranks_of(stage)))}, but plans price copies of all "
            "stages on the ranks of their mirror images only, such as chimera's: play it with "
            "given durations (play_schedule), or use such places"
        )


def are_blocks(kinds: Ints) -> Flags:
    """Which kinds of macro tasks are blocks in plans; the others have a duration only."""
    found: Flags = kinds < SEND
    return found


def transfer_kinds(schedule: Schedule, pair: tuple[int, int]) -> tuple[int, int]:
    """The kinds, forward and backward, of what travels between two stages without copies."""
    same = schedule.ranks_of(pair[0]) == schedule.ranks_of(pair[1])
    return (RESHARD, RESHARD_BACK) if same else (SEND, SEND_BACK)


def transfer_name(stages: tuple[int, int], microbatch: int, part: int, num_slices: int) -> str:
    """What a transfer between two stages is called, predicted and measured.

    Example:
        >>> transfer_name((0, 1), 3, 2, num_slices=4)
        'stage 0 ⇢ stage 1, microbatch 3, slice 2'
    """
    name = f"stage {stages[0]} ⇢ stage {stages[1]}, microbatch {microbatch}"
    return f"{name}, slice {part}" if num_slices > 1 else name


def receiving_stage(task: str) -> int | None:
    """The stage that a transfer goes to, by its name; None of any other task.

    Example:
        >>> receiving_stage("stage 0 ⇢ stage 1, microbatch 3"), receiving_stage("fc1 forward")
        (1, None)
    """
    found = re.match(r"stage \d+ ⇢ stage (\d+), ", task)
    return int(found[1]) if found else None


def _finished(
    draft: Draft, pairs: Sequence[tuple[int, int]], ties: Sequence[tuple[int, int]]
) -> MacroGraph:
    """The graph, and where its durations are looked up."""
    graph = build_task_graph(
        np.ones(draft.num_tasks, dtype=np.int64),
        np.concatenate(draft.edges),
        resource_sets=draft.sets,
        num_resources=draft.schedule.num_ranks + len(draft.links),
    )
    kind = np.concatenate(draft.kind)
    less = np.full_like(kind, -1)
    less[list(draft.less)] = list(draft.less.values())
    return MacroGraph(
        schedule=draft.schedule,
        graph=graph,
        kind=kind,
        less=less,
        item=np.concatenate(draft.item),
        microbatch=np.concatenate(draft.microbatch),
        rank=np.concatenate(draft.rank),
        number=draft.number,
        rests=draft.rests,
        syncs=draft.syncs,
        linked=draft.linked,
        pairs=tuple(pairs),
        ties=tuple(ties),
        copies=tuple(draft.copied),
    )


def _last_gradients(schedule: Schedule, num_stages: int) -> list[list[Action]]:
    """Per stage of the model, the last weight gradient on each of its ranks."""
    found: list[dict[int, Action]] = [{} for _ in range(num_stages)]
    for rank, order in enumerate(schedule.orders):
        for action in filter(makes_weight_gradient, order):
            found[action.stage % num_stages][rank] = action
    return [list(by_rank.values()) for by_rank in found]
