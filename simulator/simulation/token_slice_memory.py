"""Memory of plans with token slices: what waits for the slices before and behind.

A stage holds each slice's activations from its forward pass to its backward pass, as it does those
of microbatches. On top come, for each attention,

    keys and values of a slice        until the last pass that reads them is over, where the slice
                                      itself drops them and makes them again
    gradients for those of earlier    from the backward pass of the last slice, which makes all of
    slices                            them, until the slice that they belong to takes them

In the tables of `device_memory` a slice of a stage stands where else a stage does: slice k of K is
entry stage · K + k. Gradients that wait are entries of their own behind those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from stratagem.simulator.graph.token_slices import OWN
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Held,
    MemorySituation,
)
from stratagem.simulator.simulation.device_memory import (
    BlockRun,
    StageTensors,
)
from stratagem.simulator.simulation.priced_plan import PlanModel, StageModel
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes, LivingTensor, Purpose

GRADIENTS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)


def sliced_situations(model: PlanModel, rank: int) -> tuple[MemorySituation, ...]:
    """What a rank that runs token slices holds of other passes while each of its actions runs."""
    return tuple(_situations(model, model.macro.schedule.orders[rank]))


def sliced_tensors(model: PlanModel, rank: int) -> Mapping[int, StageTensors]:
    """The tensors of every slice of the stages of a rank, and the gradients that wait."""
    stages = sorted({action.stage for action in model.macro.schedule.orders[rank]})
    found: dict[int, StageTensors] = {}
    for stage in stages:
        for number in range(len(model.parts)):
            found[_entry(model, stage, number)] = _slice_tensors(model, stage, number)
        for number in range(len(model.parts) - 1):
            found[_waiting(model, stage, number)] = _gradients(model, stage, number)
    return found


def with_waiting(model: PlanModel, rank: int, runs: Sequence[BlockRun]) -> list[BlockRun]:
    """The blocks that a rank ran; between them, gradients for earlier slices come and go.

    They come when the last slice's backward pass ends, and go when that of their own starts.
    """
    last = len(model.parts) - 1
    found: list[BlockRun] = []
    for run in runs:
        stage, number = divmod(run.stage, len(model.parts))
        if run.which == 1 and number < last:
            now = run.start[:1]
            found.append(BlockRun(_waiting(model, stage, number), 1, now, now))
        found.append(run)
        if run.which == 1 and number == last:
            now = run.end[-1:]
            found += [BlockRun(_waiting(model, stage, k), 0, now, now) for k in range(last)]
    return found


def _entry(model: PlanModel, stage: int, number: int) -> int:
    return stage * len(model.parts) + number


def _waiting(model: PlanModel, stage: int, number: int) -> int:
    """The entry of the gradients that later slices have made for one, until it takes them."""
    return len(model.stages) + _entry(model, stage, number)


def _situations(model: PlanModel, order: Iterable[Action]) -> Iterator[MemorySituation]:
    """What a rank holds of other passes while each of its actions runs."""
    waiting: dict[int, int] = {}
    late: dict[int, int] = {}
    last = len(model.parts) - 1
    for action in order:
        at = _entry(model, action.stage, action.slice)
        gradients = _waiting(model, action.stage, action.slice)
        waiting.setdefault(at, 0)
        if action.kind in GRADIENTS:
            waiting[at] -= 1
            if action.slice < last:
                waiting[gradients] -= 1
        elif action.kind is ActionKind.WEIGHT_GRADIENT:
            late[at] -= 1
        held = tuple(Held(key, count, late.get(key, 0)) for key, count in sorted(waiting.items()))
        yield MemorySituation(at, action.kind, held)
        if action.kind is ActionKind.FORWARD:
            waiting[at] += 1
        elif action.kind is ActionKind.INPUT_GRADIENT:
            late[at] = late.get(at, 0) + 1
        if action.kind in GRADIENTS and action.slice == last:
            for number in range(last):
                key = _waiting(model, action.stage, number)
                waiting[key] = waiting.get(key, 0) + 1


def _slice_tensors(model: PlanModel, stage: int, number: int) -> StageTensors:
    """The tensors of a slice: state counts with the first, keys and values last until read."""
    part = model.stages[_entry(model, stage, number)]
    more = [*_gradient_tensors(model, stage, number)]
    if number < len(model.parts) - 1:
        more += _kept_for_later(part)
    known = part.tensors.lifetimes
    kept = (known.birth >= 0) | (number == 0)
    return _stage_tensors(part, known.with_tensors(more, of=kept))


def _prefixes(part: StageModel) -> list[int]:
    operators = part.table.graph.operators
    return [i for i in part.table.operators if role_of(operators[i]) is OperatorRole.PREFIX]


def _own_bytes(part: StageModel, prefix: int) -> int:
    """Bytes of a slice's own keys or values on a device."""
    operator, row = part.table.graph.operators[prefix], part.table.row(prefix)
    (own,) = (n for n in operator.inputs[0].layout[operator.attributes["dim"]])
    (key,) = (n for n in operator.outputs[0].layout[operator.attributes["dim"]])
    assert own == OWN
    return int(row.output_bytes[0][0]) // operator.sizes[key] * operator.sizes[own]


def _gradient_tensors(model: PlanModel, stage: int, number: int) -> Iterator[LivingTensor]:
    """Gradients for earlier slices that the last one makes, or that a slice takes."""
    last = len(model.parts) - 1
    part = model.stages[_entry(model, stage, number)]
    n = len(part.table.operators)
    place = {i: p for p, i in enumerate(part.table.operators)}
    for prefix in _prefixes(part):
        back = 2 * n - 1 - place[prefix]
        if number < last:
            yield LivingTensor(Purpose.TENSORS, prefix, _own_bytes(part, prefix), n, back)
            continue
        earlier = (model.stages[_entry(model, stage, each)] for each in range(last))
        nbytes = sum(_own_bytes(each, prefix) for each in earlier)
        yield LivingTensor(Purpose.TENSORS, prefix, nbytes, back, 2 * n - 1)


def _gradients(model: PlanModel, stage: int, number: int) -> StageTensors:
    """The gradients for a slice while no pass of it or of the last slice runs."""
    part = model.stages[_entry(model, stage, number)]
    more = [
        LivingTensor(Purpose.TENSORS, prefix, _own_bytes(part, prefix), 0, 1)
        for prefix in _prefixes(part)
    ]
    known = replace(part.tensors.lifetimes, num_operators=1)
    return _stage_tensors(part, known.with_tensors(more, of=np.zeros(len(known.base), np.bool_)))


def _stage_tensors(part: StageModel, lifetimes: Lifetimes) -> StageTensors:
    none = np.zeros(len(part.table.graph.operators), dtype=np.int64)
    return replace(part.tensors, lifetimes=lifetimes, nbytes=lifetimes.bytes_under(none))


def _kept_for_later(part: StageModel) -> Iterator[LivingTensor]:
    """What prefixes of later slices read, where the slice itself does not keep it."""
    table = part.table
    place = {i: p for p, i in enumerate(table.operators)}
    until = len(table.operators)
    seen: set[tuple[int, int]] = set()
    for edge, row in zip(table.edges, table.edge_row_of, strict=True):
        if role_of(table.graph.operators[edge.consumer]) is not OperatorRole.PREFIX:
            continue
        copied = int(table.edge_rows[row].copy_bytes[0, 0])
        made = edge.producer, edge.output
        if copied:
            born = place[edge.consumer]
            yield LivingTensor(Purpose.ACTIVATIONS, edge.consumer, copied, born, until)
        elif _is_dropped(table, edge) and made not in seen:
            seen.add(made)
            nbytes = int(table.row(edge.producer).output_bytes[edge.output][0])
            born = place[edge.producer]
            yield LivingTensor(Purpose.ACTIVATIONS, edge.producer, nbytes, born, until)


def _is_dropped(table: CostTable, edge: Edge) -> bool:
    """Whether what an edge reads is dropped after the forward pass, and made again."""
    segment = table.graph.segments
    return not table.row(edge.producer).keeps[0] and all(
        segment[other.consumer] == segment[edge.producer]
        for other in table.graph.readers[edge.producer]
        if other.output == edge.output
    )
