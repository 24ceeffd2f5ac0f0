"""Token slices of causal models: what a stage computes for a part of the positions (TeraPipe).

In a causal model a position looks at those before it only, so the tokens of a microbatch can go
through a pipeline in slices, one behind the other (Li et al. 2021, TeraPipe, arXiv 2102.07988).
Slice k of K computes a K-th of everything, but its attention looks at k earlier slices and at half
of its own pairs: k + 1/2 parts of a K² of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stratagem.simulator.costs import Cost, CostModel, Direction
from stratagem.simulator.device import DeviceType
from stratagem.simulator.graph import DimKind, Operator, OperatorGraph, factors
from stratagem.simulator.training import Training


def token_dims(graph: OperatorGraph) -> tuple[frozenset[str], ...]:
    """Per operator the dims that count positions.

    They are those that an attention's queries or keys are connected with through the graph.

    Raises:
        ValueError: when the model is not causal: it has no attention or one that sees what comes
            later, an operator that sums over positions, or a parameter for each position.
    """
    group: dict[tuple[int, str], tuple[int, str]] = {}

    def root(node: tuple[int, str]) -> tuple[int, str]:
        while group.setdefault(node, node) != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for edge in graph.edges:
        producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
        made = factors(producer.outputs[edge.output].layout)
        read = consumer.inputs[edge.slot]
        for position, name in zip(read.order, factors(read.layout), strict=True):
            group[root((edge.producer, made[position]))] = root((edge.consumer, name))
    attentions = [i for i, op in enumerate(graph.operators) if op.kind == "attention"]
    seeds = {root((i, name)) for i in attentions for name in _positions(graph.operators[i])}
    found = tuple(
        frozenset(dim.name for dim in operator.dims if root((i, dim.name)) in seeds)
        for i, operator in enumerate(graph.operators)
    )
    for operator, names in zip(graph.operators, found, strict=True):
        _check_causal(graph, operator, names)
    if not attentions:
        raise ValueError(
            f"graph {graph.name!r} has no attention: token slices need a causal model"
        )
    return found


def _positions(attention: Operator) -> tuple[str, ...]:
    """The dims of an attention that count queries and keys."""
    query, key = (attention.inputs[slot].layout[-2] for slot in (0, 1))
    return (*query, *key)


def _check_causal(graph: OperatorGraph, operator: Operator, names: frozenset[str]) -> None:
    where = f"operator {operator.name!r} ({operator.kind}) of graph {graph.name!r}"
    if operator.kind == "attention":
        if not operator.attributes.get("causal"):
            raise ValueError(f"{where} looks at later positions: token slices need causal models")
        return
    summed = [n for n in names if operator.dim(n).kind is DimKind.REDUCTION]
    if summed:
        raise ValueError(f"{where} sums over positions ({summed[0]}): they cannot be sliced")
    if any(names & set(factors(weight.layout)) for weight in operator.weights):
        raise ValueError(f"{where} has a parameter for each position: they cannot be sliced")


def sliced_graph(graph: OperatorGraph, num_slices: int) -> OperatorGraph:
    """The graph of one of `num_slices` equal slices, as if it looked at itself only.

    Raises:
        ValueError: when the model is not causal (see `token_dims`), or its positions cannot be cut
            into so many equal slices.
    """
    operators = []
    for operator, names in zip(graph.operators, token_dims(graph), strict=True):
        for name in names:
            size = operator.dim(name).size
            if num_slices < 1 or size % num_slices:
                raise ValueError(
                    f"graph {graph.name!r} has {size} positions, which cannot be cut into "
                    f"{num_slices} equal slices: choose a divisor of {size}"
                )
        dims = tuple(
            replace(dim, size=dim.size // num_slices) if dim.name in names else dim
            for dim in operator.dims
        )
        operators.append(replace(operator, dims=dims))
    return replace(graph, operators=tuple(operators))


@dataclass(frozen=True)
class SliceCosts:
    """Prices of slice `number` (from 0) on the graph of `sliced_graph`.

    A causal attention over q queries and n keys counts half of their pairs; n = (2k + 1)·q says
    the k + 1/2 times q² pairs of slice k.
    """

    costs: CostModel
    number: int

    def operator_cost(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Cost:
        """See `CostModel`."""
        if operator.kind == "attention":
            keys = operator.inputs[1].layout[-2]
            sizes = {**sizes, **{name: sizes[name] * (2 * self.number + 1) for name in keys}}
        return self.costs.operator_cost(operator, sizes, direction, training, device)

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """See `CostModel`."""
        return self.costs.update_cost(num_parameters, training, device)
