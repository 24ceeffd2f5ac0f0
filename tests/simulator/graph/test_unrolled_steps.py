"""Equal time steps of unrolled recurrent layers, against the names of steps in a model."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from stratagem.simulator.graph.models import gpt, inception_v3, mlp, moe, nmt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.unrolled_steps import equal_steps


def named(graph: OperatorGraph) -> list[list[str]]:
    """Operators by layer and name in it, whatever the step; those of a first state by themselves.

    The first step of an encoder has no output before it, and the last of a decoder no memory.
    """
    found: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for operator in graph.operators:
        at = re.fullmatch(r"(\w+\.\d+)\.step\d+\.(\w+)", operator.name)
        begins = at is not None and re.match(r"encoder\.\d+\.step0\.", operator.name)
        if at is not None and not begins:
            found[at[1], at[2], len(operator.inputs)].append(operator.name)
    return sorted(sorted(names) for names in found.values() if len(names) > 1)


@pytest.mark.parametrize(("layers", "sequence"), [(1, 2), (1, 5), (2, 4), (3, 12)])
def test_steps_of_layers_are_those_of_their_names(layers: int, sequence: int) -> None:
    graph = nmt(num_layers=layers, hidden=8, vocabulary=16, sequence=sequence, batch=4)
    groups = [sorted(graph.names[i] for i in group) for group in equal_steps(graph)]
    assert sorted(groups) == named(graph)


@pytest.mark.parametrize(
    "graph",
    [
        gpt(num_layers=2, hidden=16, num_heads=2, vocabulary=32, sequence=8, batch=2),
        moe(num_layers=2, hidden=16, num_heads=2, vocabulary=32, sequence=8, experts=2, batch=2),
        mlp([8, 8, 8, 8], batch=4),
        inception_v3(batch=2),
    ],
    ids=["gpt", "moe", "mlp", "inception"],
)
def test_layers_with_parameters_of_their_own_are_no_steps(graph: OperatorGraph) -> None:
    assert equal_steps(graph) == ()


def test_steps_are_the_same_after_a_cut_into_microbatches() -> None:
    graph = nmt(num_layers=1, hidden=8, vocabulary=16, sequence=4, batch=8)
    assert equal_steps(graph.microbatch(4)) == equal_steps(graph)
