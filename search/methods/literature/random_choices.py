"""Random strategies: what a search must beat, and where FlexFlow's chains start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import operator_choices
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.sharding.choice import Choice


def random_choices(
    graph: OperatorGraph,
    shape: Sequence[int],
    *,
    zero_stages: Sequence[int] = (0,),
    seed: int = 0,
) -> Choices:
    """A choice for each operator, uniform among those of the searched space.

    Jia et al. 2019 (FlexFlow, arXiv 1807.05358) start Markov chains from such strategies.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 16, 4], batch=32)
        >>> random_choices(graph, (4,), seed=1) == random_choices(graph, (4,), seed=1)
        True

    Args:
        graph: the model, at the batch of a microbatch.
        shape: of the mesh.
        zero_stages: that a choice may have.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    known: dict[Any, tuple[Choice, ...]] = {}
    chosen: Choices = {}
    for operator in graph.operators:
        trained = tuple(graph.parameter_index[w.parameter].trainable for w in operator.weights)
        key = operator.signature, trained
        if key not in known:
            known[key] = operator_choices(graph, operator, shape, zero_stages)
        chosen[operator.name] = known[key][int(rng.integers(len(known[key])))]
    return chosen
