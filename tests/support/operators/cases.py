"""What a case of an operator is, and all by name: modules beside this one register theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.simulator.graph.building import operator_drafts
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.operators.operator import Operator

torch.set_num_threads(1)

Reference = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """An operator, and the same in ordinary torch as a function of its inputs and weights."""

    operator: Operator
    reference: Reference
    high: tuple[int, ...] = ()
    """Per integer input, one above its largest value."""


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def operator_of(
    b: GraphBuilder,
    made: operator_drafts.DraftTensor,
    seen: operator_drafts.DraftTensor | None = None,
) -> Operator:
    """The operator that made a tensor, after the graph has settled how it is seen."""
    seen = made if seen is None else seen
    return b.build(b.reduce(seen) if seen.shape else seen).operator(made.node.name)


def builder() -> tuple[
    GraphBuilder,
    Callable[..., operator_drafts.DraftTensor],
    Callable[..., operator_drafts.DraftTensor],
]:
    """A builder, and short ways to float64 inputs and parameters."""
    b = GraphBuilder("one operator")
    names = (f"t{i}" for i in itertools.count())
    return (
        b,
        lambda *shape: b.input(next(names), shape, "float64"),
        lambda *shape, **how: b.parameter(next(names), shape, "float64", **how),
    )
