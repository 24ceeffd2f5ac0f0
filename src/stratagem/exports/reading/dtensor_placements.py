"""Placements of our tensors as DTensor's, and what of a plan those can say.

A tensor dimension of ours is a product of factors, and any factor may be sharded. DTensor shards
whole tensor dimensions into consecutive pieces, so it can say a split of the outermost factor
only: of a fused projection's columns, ordered (query, key or value; head; within a head), it
cannot give each device some heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    PARTIAL,
    REPLICATE,
    Config,
    Partial,
    Pin,
    Placement,
    Placements,
    Shard,
    input_placements,
    output_placements,
    splits_of,
    weight_placements,
)
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import DimKind, Edge, Layout, Operator, factor_sizes
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.step_options import StepOptions


def tensor_placements(
    layout: Layout, sizes: Mapping[str, int], placements: Placements, shape: Sequence[int]
) -> Placements | None:
    """Placements that count the dimensions of a tensor instead of its factors.

    Example:
        >>> sizes = {"out0": 3, "head": 4, "head_dim": 16, "in": 64}
        >>> weight = (("out0", "head", "head_dim"), ("in",))
        >>> tensor_placements(weight, sizes, (Shard(3),), (2,))
        (Shard(dim=1),)
        >>> tensor_placements(weight, sizes, (Shard(1),), (2,)) is None
        True

    Returns:
        None where DTensor has no such placement: a factor that is not the outermost of its
        dimension, an uneven split of an outermost factor, or a tensor on one device only.
    """
    whole = factor_sizes(layout, sizes)
    place = [dim for dim, group in enumerate(layout) for _ in group]
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Pin):
            return None
        if isinstance(placement, Shard):
            factor = int(placement.dim)
            ways = math.prod(splits_of(placements, factor, shape))
            if ways > 1 and not _is_outermost(whole, place, factor, ways):
                return None
            found.append(Shard(place[factor]) if ways > 1 else REPLICATE)
        else:
            found.append(placement)
    return tuple(found)


def _is_outermost(whole: Sequence[int], place: Sequence[int], factor: int, ways: int) -> bool:
    first = place.index(place[factor])
    inside = math.prod(n for n, dim in zip(whole, place, strict=True) if dim == place[factor])
    outside = math.prod(whole[first:factor])
    rest = inside // (outside * whole[factor])
    return outside == 1 and (rest == 1 or whole[factor] % ways == 0)


def nearest_config(operator: Operator, config: Config, shape: Sequence[int]) -> Config:
    """A config that DTensor can say: what it cannot split along an axis is whole there."""
    kept = list(config)
    for axis, placement in enumerate(config):
        alone = tuple(p if k == axis else REPLICATE for k, p in enumerate(config))
        if isinstance(placement, Pin) or not _can_say(operator, alone, shape):
            kept[axis] = REPLICATE
    for axis in reversed(range(len(shape))):
        if _can_say(operator, tuple(kept), shape):
            break
        kept[axis] = REPLICATE
    return tuple(kept)


def _can_say(operator: Operator, config: Config, shape: Sequence[int]) -> bool:
    """Whether all tensors have placements; rows of a table may be split along one axis only."""
    if role_of(operator) is OperatorRole.LOOKUP:
        rows = {d.name for d in operator.dims if d.kind is DimKind.REDUCTION}
        if any(sum(n > 1 for n in splits_of(config, name, shape)) > 1 for name in rows):
            return False
    return all(
        tensor_placements(layout, operator.sizes, placed, shape) is not None
        for layout, placed in _tensors(operator, config)
    )


def _tensors(operator: Operator, config: Config) -> Iterator[tuple[Layout, Placements]]:
    """The layout and the placements of each tensor of an operator, as it sees it."""
    for read in operator.inputs:
        seen = replace(read, order=tuple(range(len(read.order))), select=())
        yield read.layout, input_placements(seen, config)
    for weight in operator.weights:
        yield weight.layout, weight_placements(weight, config)
    for made in operator.outputs:
        yield made.layout, output_placements(made, config)


def nearest_plan(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan with configs that DTensor can say, and nothing that it knows nothing of."""
    small = graph.microbatch(plan.num_microbatches)
    rewritten = plan.rewrite(graph).graph.fingerprint != graph.fingerprint
    if rewritten:
        raise AssertionError("placements are those of the model as it is")
    stages = tuple(
        replace(
            stage,
            choices={
                name: Choice(
                    nearest_config(
                        small.operator(name), stage.choices[name].config, stage.mesh.shape
                    )
                )
                for name in stage.operators
            },
        )
        for stage in plan.stages
    )
    if plan.token_slices != 1:
        # GPipe has TeraPipe's order of microbatches.
        plan = replace(plan, schedule="gpipe", token_slices=1, orders=())
    return replace(plan, stages=stages, prediction=None, **StepOptions().as_options)


def parameter_placements(graph: OperatorGraph, stage: Stage) -> dict[str, Placements]:
    """How the parameters that a stage's operators use first lie, by name.

    Buffers are left out: every device has them whole.
    """
    found: dict[str, Placements] = {}
    for operator in map(graph.operator, stage.operators):
        for weight in operator.weights:
            if graph.owners.get(weight.parameter) == operator.name:
                config = stage.choices[operator.name].config
                placed = tensor_placements(
                    weight.layout,
                    operator.sizes,
                    weight_placements(weight, config),
                    stage.mesh.shape,
                )
                assert placed is not None, operator.name
                found[weight.parameter] = placed
    return found


def read_placements(operator: Operator, slot: int, stage: Stage) -> Placements:
    """How an operator needs an input, in the dimensions that it sees."""
    read = operator.inputs[slot]
    seen = replace(read, order=tuple(range(len(read.order))), select=())
    config = stage.choices[operator.name].config
    placed = tensor_placements(
        read.layout, operator.sizes, input_placements(seen, config), stage.mesh.shape
    )
    assert placed is not None, operator.name
    return placed


def result_placements(graph: OperatorGraph, operator: Operator, stage: Stage) -> Placements:
    """How a result is handed on: as all of its readers need it, if they agree.

    Otherwise it stays as it is made, pending sums carried out.
    """
    made = operator.outputs[0]
    config = stage.choices[operator.name].config
    placed = tensor_placements(
        made.layout, operator.sizes, output_placements(made, config), stage.mesh.shape
    )
    assert placed is not None, operator.name
    own = tuple(REPLICATE if isinstance(p, Partial) else p for p in placed)
    wanted = {
        _wanted(graph, edge, stage)
        for edge in graph.readers[graph.index[operator.name]]
        if edge.output == 0
    }
    if len(wanted) != 1:
        return own
    agreed = wanted.pop()
    return own if agreed is None or PARTIAL in agreed else agreed


def _wanted(graph: OperatorGraph, edge: Edge, stage: Stage) -> Placements | None:
    """How a reader needs a result, in the result's dimensions; None if DTensor cannot say it."""
    maker, reader = graph.operators[edge.producer], graph.operators[edge.consumer]
    if reader.name not in stage.choices:
        return None
    config = stage.choices[reader.name].config
    placed = input_placements(reader.inputs[edge.slot], config)
    layout = maker.outputs[edge.output].layout
    return tensor_placements(layout, maker.sizes, placed, stage.mesh.shape)
