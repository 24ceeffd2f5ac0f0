"""The model that runs with checkpoints train, made once for each file."""

from __future__ import annotations

import pytest
from torch import Tensor

from stratagem.simulator.graph.operator_graph import OperatorGraph
from tests.support.checkpoint_runs import batches_of, small_llama, state_of


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return small_llama()


@pytest.fixture(scope="module")
def state(graph: OperatorGraph) -> dict[str, Tensor]:
    return state_of(graph)


@pytest.fixture(scope="module")
def data(graph: OperatorGraph) -> list[dict[str, Tensor]]:
    return batches_of(graph)
