"""The model at the batch of each number of microbatches, with what quick bounds ask of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from stratagem.searcher.space.situation import Situation
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.sharding.parameter_homes import trainable_weights


class MicrobatchModel:
    """The model at the batch of a microbatch: a kind per operator, equal for equal ones.

    `kind_of` numbers the kinds by operator, and `first_of` says the first operator of each.
    """

    def __init__(self, graph: OperatorGraph, situation: Situation) -> None:
        self.graph = graph
        number, training = situation.memory.number, situation.training
        self.kinds = [
            (
                number(operator.signature),
                bool(trainable_weights(graph, operator)),
                training.costs_of([weight.parameter for weight in operator.weights]),
                tuple(graph.needs_gradient[graph.index[r.source]] for r in operator.inputs),
            )
            for operator in graph.operators
        ]
        first: dict[Any, int] = {}
        for i, kind in enumerate(self.kinds):
            first.setdefault(kind, i)
        number_of = {kind: k for k, kind in enumerate(first)}
        self.first_of: Ints = np.array(list(first.values()), dtype=np.int64)
        self.kind_of: Ints = np.array([number_of[kind] for kind in self.kinds], dtype=np.int64)
        self._recomputed: dict[str, frozenset[str]] = {}

    def recomputed(self, policy: str) -> frozenset[str]:
        """Names of the operators that a policy recomputes."""
        if policy not in self._recomputed:
            self._recomputed[policy] = recomputed_operators(self.graph, policy)
        return self._recomputed[policy]


class MicrobatchModels:
    """The models of a situation by the number of microbatches, each made once.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> models = MicrobatchModels(
        ...     Situation(mlp([64, 64], batch=32), cluster, Training(), default_costs())
        ... )
        >>> models[4] is models[4], sorted(models[4].recomputed("none"))
        (True, [])
    """

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self._models: dict[int, MicrobatchModel] = {}

    def __getitem__(self, num_microbatches: int) -> MicrobatchModel:
        if num_microbatches not in self._models:
            graph = self.situation.graph.microbatch(num_microbatches)
            self._models[num_microbatches] = MicrobatchModel(graph, self.situation)
        return self._models[num_microbatches]
