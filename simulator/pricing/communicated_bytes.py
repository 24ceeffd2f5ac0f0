"""How many bytes each communication of a plan moves, for the tables that say how long it takes."""

from __future__ import annotations

from collections.abc import Iterator

from stratagem.simulator.graph.placement import (
    Placements,
    Shard,
    input_gradient_placements,
    input_placements,
    local_elements,
    local_sizes,
    output_gradient_placements,
    output_placements,
    weight_placements,
)
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Edge, Operator, factor_sizes
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.sharding.choice import Choice, ParameterMessage
from stratagem.simulator.sharding.parameter_homes import (
    ParameterUse,
    home_placements,
    residences,
    use_of,
)


def stage_bytes(builder: TableBuilder, table: CostTable) -> dict[str, int]:
    """Bytes per device of the communications inside a stage, by the names of their tasks.

    Example:
        >>> stage_bytes(stage.builder, stage.table)["fc sync"]  # doctest: +SKIP
        9437184

    A conversion counts for each of its collectives what a device holds of the tensor, before or
    after it, whichever is more: the parameter for an all-reduce of its gradient. Names that stand
    for communications of different size are left out, as is what is done once a step about
    parameters tied between operators.

    Args:
        builder: the one that made `table`.
        table: of a stage with one choice an operator, as plans have.
    """
    sizes: dict[str, int] = {}
    ambiguous: set[str] = set()
    found = (*_edges(builder, table), *_inner(builder, table), *_parameters(builder, table))
    for name, nbytes in found:
        if sizes.setdefault(name, nbytes) != nbytes:
            ambiguous.add(name)
    return {name: nbytes for name, nbytes in sizes.items() if name not in ambiguous}


def crossing_bytes(
    edge: Edge, source: TableBuilder, choice: Choice, forward_bytes: int
) -> tuple[int, int]:
    """Bytes that a device receives of an edge between stages: forward, and of its gradient.

    Args:
        edge: between operators of two stages.
        source: of the stage of its producer.
        choice: of its producer.
        forward_bytes: what a device of the consumer's stage keeps of it (see `BoundaryRow`).
    """
    if not source.graph.edge_needs_gradient(edge):
        return forward_bytes, 0
    producer = source.graph.operators[edge.producer]
    made = producer.outputs[edge.output]
    sizes = factor_sizes(made.layout, producer.sizes)
    needed = output_gradient_placements(made, choice.config)
    elements = local_elements(sizes, needed, source.mesh.shape)
    return forward_bytes, elements * source.training.bytes_of(made.dtype)


def _edges(builder: TableBuilder, table: CostTable) -> Iterator[tuple[str, int]]:
    graph = table.graph
    for edge in table.edges:
        producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
        ours, theirs = (table.row(i).choices[0].config for i in (edge.producer, edge.consumer))
        made, read = producer.outputs[edge.output], consumer.inputs[edge.slot]
        sizes = factor_sizes(made.layout, producer.sizes)
        itemsize = builder.training.bytes_of(made.dtype)
        there = output_placements(made, ours), input_placements(read, theirs)
        yield f"{producer.name} → {consumer.name}", _moved(builder, sizes, itemsize, *there)
        if graph.edge_needs_gradient(edge):
            back = input_gradient_placements(read, theirs), output_gradient_placements(made, ours)
            yield f"{producer.name} ← {consumer.name}", _moved(builder, sizes, itemsize, *back)


def _inner(builder: TableBuilder, table: CostTable) -> Iterator[tuple[str, int]]:
    """Collectives inside passes, by the names of these: what a device gives to each."""
    shape = builder.mesh.shape
    for i in table.operators:
        operator, config = table.graph.operators[i], table.row(i).choices[0].config
        sizes = local_sizes(operator, config, shape)
        itemsize = builder.training.bytes_of(operator.outputs[0].dtype)
        there = back = 0
        for inner in kind_of(operator).inner(operator, sizes):
            for ways, placement in zip(shape, config, strict=True):
                if ways > 1 and isinstance(placement, Shard) and placement.dim in inner.dims:
                    nbytes = inner.nbytes(ways, itemsize)
                    there += inner.forward * nbytes
                    back += inner.backward * nbytes
        for what, nbytes in (("forward", there), ("recompute", there), ("backward", back)):
            if nbytes:
                yield f"{operator.name} {what}", nbytes


def _parameters(builder: TableBuilder, table: CostTable) -> Iterator[tuple[str, int]]:
    inside = set(table.operators)
    for i in table.operators:
        operator = table.graph.operators[i]
        uses = [
            use_of(table.graph, builder.owner, operator, weight, inside)
            for weight in operator.weights
        ]
        sync, gather = _parameter_bytes(builder, operator, uses, table.row(i).choices[0])
        tied = [*_tied_gathers(builder, table, i)]
        yield f"{operator.name} sync", sync
        for nbytes in tied if tied and not gather else [gather, *tied]:
            yield f"{operator.name} gather", nbytes
        yield f"{operator.name} publish", gather


def _tied_gathers(builder: TableBuilder, table: CostTable, user: int) -> Iterator[int]:
    """Bytes of what an operator gathers of parameters that another one owns."""
    for row, (i, j, own, weight) in zip(
        table.tie_rows, builder.ties(table.operators), strict=True
    ):
        if j == user and row.gather.ns.any():
            home = home_placements(own, table.row(i).choices[0], builder.mesh.shape)
            used = weight_placements(weight, table.row(j).choices[0].config)
            sizes = factor_sizes(weight.layout, table.graph.operators[j].sizes)
            yield _moved(builder, sizes, builder.training.parameter_bytes, home, used)


def _parameter_bytes(
    builder: TableBuilder, operator: Operator, uses: list[ParameterUse], choice: Choice
) -> tuple[int, int]:
    sync = gather = 0
    formats = builder.training.formats
    for lies in residences(operator, uses, choice, builder.mesh.shape):
        sizes = factor_sizes(lies.weight.layout, operator.sizes)
        gradient = lies.sending(ParameterMessage.GRADIENT, formats)
        value = lies.sending(ParameterMessage.VALUE, formats)
        sync += _moved(builder, sizes, gradient.nbytes, gradient.source, gradient.target)
        gather += _moved(builder, sizes, value.nbytes, value.source, value.target)
    return sync, gather


def _moved(
    builder: TableBuilder,
    sizes: tuple[int, ...],
    itemsize: int,
    source: Placements,
    target: Placements,
) -> int:
    """Bytes of the collectives of a conversion; along an axis of one device nothing moves."""
    steps = builder.resharder.path(sizes, itemsize, source, target)
    shape = builder.mesh.shape
    return sum(step.elements for step in steps if shape[step.axis] > 1) * itemsize
