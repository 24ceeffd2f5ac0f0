"""The memory of the ranks of a simulated step.

Under ZeRO 2 and 3 what a pass makes of gradients is whole until its sum is through, which may be
long after where links are late:

    rank     backward 2 │ backward 1 │ backward 0 │ forward of the next microbatch
    links               ├── sum 2 ──────┤── sum 1 ──────┤── sum 0 ──────┤
    waiting               2             2, 1            1, 0             0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.engine.event_engine import Times
from stratagem.simulator.schedules.actions import fullest, situations_of
from stratagem.simulator.schedules.work_kinds import FORWARD
from stratagem.simulator.simulation.device_memory import (
    BlockRun,
    DeviceMemory,
    MemoryTimeline,
    StageTensors,
    WaitingGradients,
    device_memory,
    memory_over_time,
    passes_of,
)
from stratagem.simulator.simulation.predictions import sums_end
from stratagem.simulator.simulation.priced_plan import PlanModel, StageModel
from stratagem.simulator.simulation.token_slice_memory import (
    sliced_situations,
    sliced_tensors,
    with_waiting,
)
from stratagem.simulator.stage.stage_blocks import TaskRole


def rank_memory(model: PlanModel, macro: Times) -> tuple[DeviceMemory, ...]:
    """The peak of each rank, `macro` being the times of its blocks and transfers."""
    return tuple(_peak(model, macro, rank) for rank in range(model.macro.schedule.num_ranks))


def _peak(model: PlanModel, macro: Times, rank: int) -> DeviceMemory:
    """That of the device that needs most, where pins tell devices of a rank apart."""
    peaks = (_peak_of(model, macro, rank, each) for each in _on_devices(model, rank))
    return max(peaks, key=lambda memory: memory.peak)


def _peak_of(
    model: PlanModel, macro: Times, rank: int, tensors: Mapping[int, StageTensors]
) -> DeviceMemory:
    schedule = model.macro.schedule
    found = schedule.situations[rank]
    if model.slices:
        found = fullest(sliced_situations(model, rank))
    waiting = None
    if _sums_apart(model, tensors.values()):
        waiting = WaitingGradients(tensors, _runs(model, macro, rank, tensors))
        if model.slices:
            found = sliced_situations(model, rank)
        else:
            found = tuple(situations_of(schedule.orders[rank]))
    return device_memory(
        tensors,
        found,
        _capacity(model, rank),
        split=schedule.splits_backward,
        num_entries=len(model.stages),
        waiting=waiting,
    )


def _tensors(model: PlanModel, rank: int) -> Mapping[int, StageTensors]:
    if model.slices:
        return sliced_tensors(model, rank)
    stages = sorted({action.stage for action in model.macro.schedule.orders[rank]})
    return {stage: model.stages[stage].tensors for stage in stages}


def _on_devices(model: PlanModel, rank: int) -> list[Mapping[int, StageTensors]]:
    """What lies on devices of a rank, for each way in which pins tell them apart."""
    tensors = _tensors(model, rank)
    if model.slices or not any(model.stages[stage].split for stage in tensors):
        return [tensors]
    cells = [model.stages[stage].cells.of_devices for stage in tensors]
    return [
        {
            stage: own.on(_operators_on(model.stages[stage], cell))
            for (stage, own), cell in zip(tensors.items(), where, strict=True)
        }
        for where in dict.fromkeys(zip(*(each.tolist() for each in cells), strict=True))
    ]


def _operators_on(stage: StageModel, cell: int) -> Flags:
    """Which operators of the graph are on a cell of a stage's devices."""
    here = np.zeros(len(stage.table.graph.operators), dtype=np.bool_)
    for i in stage.table.operators:
        here[i] = stage.cells.holding(stage.table.row(i).choices[0].config)[cell]
    return here


def _capacity(model: PlanModel, rank: int) -> int:
    stage = model.macro.schedule.orders[rank][0].stage * len(model.parts)
    return model.stages[stage].table.mesh.memory_bytes(model.plan.cluster)


def _sums_apart(model: PlanModel, tensors: Iterable[StageTensors]) -> bool:
    """Whether some gradients are whole before they are summed, and do not wait for that."""
    if model.macro.schedule.stashes_weights:
        return False
    return any(bool(stage.nbytes[stage.is_unsummed].any()) for stage in tensors)


def memory_timeline(model: PlanModel, macro: Times, rank: int) -> MemoryTimeline:
    """The memory of one device of a rank over a step: of the one that needs most."""
    tensors, *others = _on_devices(model, rank)
    if others:
        each = (tensors, *others)
        tensors = max(each, key=lambda held: _peak_of(model, macro, rank, held).peak)
    runs = _runs(model, macro, rank, tensors)
    if model.slices:
        runs = with_waiting(model, rank, runs)
    capacity = _capacity(model, rank)
    return memory_over_time(f"rank {rank}", tensors, runs, macro.makespan, capacity)


def _runs(
    model: PlanModel, macro: Times, rank: int, tensors: Mapping[int, StageTensors]
) -> list[BlockRun]:
    """What a rank ran, pass by pass, and when what it left to be summed was so."""
    schedule = model.macro.schedule
    apart = _sums_apart(model, tensors.values())
    sums = _Sums(model, macro)
    places: dict[tuple[int, int, int], tuple[Ints, Ints]] = {}
    runs: list[BlockRun] = []
    for action in schedule.orders[rank]:
        task = model.macro.number[action]
        s = int(model.macro.item[task])
        kind, offset = model.macro.block_kind(task), int(macro.start[task])
        for which in passes_of(action.kind, split=schedule.splits_backward):
            if (s, kind, which) not in places:
                times = model.block_times[s][kind]
                places[s, kind, which] = _place_times(model.stages[s], kind, times, which)
            start, end = places[s, kind, which]
            summed = sums.of(task) if apart and which else None
            runs.append(BlockRun(s, which, start + offset, end + offset, summed))
    return _one_sum_each(runs, len(model.parts))


def _one_sum_each(runs: Sequence[BlockRun], num_parts: int) -> list[BlockRun]:
    """The same where no sum waits for longer than until that of the next microbatch is to begin.

    Of an operator, no two are on their way: by then the rank has waited (see `macro_graph`).
    """
    later: dict[tuple[int, int], Ints] = {}
    found: list[BlockRun] = []
    for run in reversed(runs):
        key = run.stage // num_parts, run.which
        if run.summed is not None:
            ends, then = run.end, later.get(key)
            if then is not None:
                run = run._replace(summed=np.minimum(run.summed, then))
            later[key] = ends
        found.append(run)
    return found[::-1]


class _Sums:
    """When the gradients of blocks are summed; blocks whose links are as late are alike."""

    def __init__(self, model: PlanModel, macro: Times) -> None:
        self._model, self._macro = model, macro
        self._known: dict[tuple[int, ...], Ints] = {}

    def of(self, task: int) -> Ints:
        """[places of the pass], ns when the sum of what is made there is through; else no time."""
        macro, begin = self._model.macro, int(self._macro.start[task])
        item, beside = int(macro.item[task]), macro.syncs.get(task, ())
        ends = [
            macro.end(task),
            *beside,
            *[macro.linked[task] for _ in range(task in macro.linked)],
        ]
        late = [int(self._macro.end[each]) - begin for each in ends]
        key = (item, macro.block_kind(task), *late)
        if key not in self._known:
            found = sums_end(self._model, self._macro, task)
            table = self._model.stages[item].table
            names = [table.graph.operators[i].name for i in table.operators[::-1]]
            self._known[key] = np.array([found.get(name, begin) for name in names]) - begin
        return self._known[key] + begin


def _place_times(stage: StageModel, kind: int, times: Times, which: int) -> tuple[Ints, Ints]:
    """When each place of a pass starts and ends, ns from the start of its block.

    A whole backward in a schedule that splits others makes both passes; the gradients of
    parameters then count as made at its end.
    """
    block = stage.cell_blocks[kind]
    order = stage.table.operators if kind == FORWARD else stage.table.operators[::-1]
    role = {0: TaskRole.FORWARD, 1: TaskRole.BACKWARD, 2: TaskRole.WEIGHT_GRADIENT}[which]
    copies = [c for c, task in enumerate(block.task) if block.block.roles[task] is role]
    if not copies:
        over = np.full(len(order), times.makespan)
        return over, over
    place = {operator: p for p, operator in enumerate(order)}
    places = np.array([place[int(block.block.first[block.task[c]])] for c in copies])
    start = np.full(len(order), times.makespan)
    end = np.zeros(len(order), dtype=np.int64)
    np.minimum.at(start, places, times.start[copies])
    np.maximum.at(end, places, times.end[copies])
    both = np.maximum.accumulate(np.stack([start, end], axis=1).ravel())
    return both[::2], both[1::2]
