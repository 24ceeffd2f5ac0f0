"""What a plan with token slices runs: for each slice a graph, and a choice for its prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Config, Shard
from stratagem.simulator.graph.token_slices import (
    TokenSlice,
    num_slices,
    prefix_names,
    token_slices,
)
from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.choice_options import check_choice


@dataclass(frozen=True, eq=False)
class SlicedPlan:
    """A plan whose stages have the prefixes of its attentions too, and the slices of its graph."""

    plan: Plan
    slices: tuple[TokenSlice, ...]


def sliced_plan(plan: Plan, graph: OperatorGraph) -> SlicedPlan:
    """The slices of a plan's microbatch, and the plan with a choice for every prefix.

    A prefix lies as its attention reads it. It always runs again in the backward pass: what is
    kept for that are the keys and values of each slice, once, and not all copies of them.

    Example:
        >>> sliced_plan(plan, graph).slices[1].graph.names  # doctest: +SKIP

    Args:
        plan: checked (see `Plan.check`).
        graph: that of a microbatch.

    Raises:
        ValueError: as `token_slices`, or an operator runs in pieces that a slice cannot have.
    """
    slices = token_slices(graph, plan.token_slices)
    stages = tuple(_with_prefixes(stage, graph) for stage in plan.stages)
    for each in slices:
        for stage in plan.stages:
            for name in stage.operators:
                chosen = stage.choices[name]
                check_choice(each.graph.operator(name), chosen, stage.mesh.shape)
    return SlicedPlan(replace(plan, stages=stages), slices)


def _with_prefixes(stage: Stage, graph: OperatorGraph) -> Stage:
    names: list[str] = []
    choices = dict(stage.choices)
    for name in stage.operators:
        operator = graph.operator(name)
        for slot, prefix in enumerate(prefix_names(operator), 1):
            names.append(prefix)
            choices[prefix] = Choice(
                _prefix_config(operator, slot, stage.choices[name].config), recompute=True
            )
        names.append(name)
    return Stage(tuple(names), stage.mesh, choices)


def _prefix_config(attention: Operator, slot: int, config: Config) -> Config:
    """How the attention reads its keys or values, where a prefix can make them so."""
    leading = set(factors(attention.inputs[slot].layout[:-2]))
    return tuple(
        REPLICATE if isinstance(placed, Shard) and placed.dim not in leading else placed
        for placed in config
    )


def pass_graphs(plan: Plan, graph: OperatorGraph) -> tuple[Plan, tuple[OperatorGraph, ...]]:
    """What a plan runs again and again: its microbatch, or each slice of that.

    Example:
        >>> pass_graphs(plan, graph)[1][0].batch  # doctest: +SKIP
        4

    Args:
        plan: checked (see `Plan.check`).
        graph: that of the whole batch.

    Returns:
        The plan with a choice for every operator of the graphs, and the graphs.
    """
    small = graph.microbatch(plan.num_microbatches)
    if num_slices(plan.token_slices) == 1:
        return plan, (small,)
    sliced = sliced_plan(plan, small)
    return sliced.plan, tuple(each.graph for each in sliced.slices)
