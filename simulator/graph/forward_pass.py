"""The forward pass of a model whose training step is known."""

from __future__ import annotations

from dataclasses import replace

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.chains import ELEMENTWISE
from stratagem.simulator.operators.kinds.generics import GENERIC, GENERIC_PRODUCT
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics
from stratagem.simulator.operators.operator import (
    OUTPUT_PREFIX,
    Dim,
    GraphOutput,
    Input,
    Operator,
    Output,
    factors,
)
from stratagem.simulator.operators.step_programs import DRAWING, inputs_of


def forward_pass(graph: OperatorGraph) -> OperatorGraph:
    """What a model computes in front of its losses, as it evaluates: nothing of it is trained.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = forward_pass(gpt(num_layers=2, hidden=64, num_heads=2, batch=4))
        >>> graph.outputs
        (GraphOutput(name='lm_head', operator='output.lm_head'),)

    Given back is what each cross-entropy would be of, as it was made, by the name of the operator
    that makes it. Dropout is off, and batch norms go by their running statistics. Of a
    model at hand, `capture` with ``forward=True`` gives back what the model returns.

    Raises:
        ValueError: the graph is a forward pass already, has no cross-entropy, or an operator of
            which is not known what it does when the model evaluates.
    """
    check_arguments("forward_pass", graph=(graph, OperatorGraph))
    if graph.is_forward:
        raise ValueError(f"{graph.name!r} is a forward pass already; take it as it is")
    losses = [each for each in graph.operators if role_of(each) is OperatorRole.LOSS]
    if not losses:
        raise ValueError(
            f"{graph.name!r} has no cross-entropy, so nothing says what its loss is of; capture "
            "the model without its loss: sg.capture(model, …, forward=True)"
        )
    reads = {(read.source, read.output): read for read in (loss.inputs[0] for loss in losses)}
    ends = [_end(graph, read) for read in reads.values()]
    needed = _needed(graph, [end.inputs[0].source for end in ends])
    kept = [_evaluating(graph, each) for each in graph.operators if each.name in needed]
    read = {weight.parameter for each in kept for weight in each.weights}
    stored = (replace(p, trainable=False) for p in graph.parameters if p.name in read)
    sources = [each.attributes["steps"] for each in kept if each.is_source]
    fed = {name for steps in sources for name in inputs_of(steps)}
    return replace(
        graph,
        inputs=tuple(each for each in graph.inputs if each.name in fed),
        parameters=tuple(stored),
        operators=(*kept, *ends),
        loss="",
        outputs=tuple(GraphOutput(e.name.removeprefix(OUTPUT_PREFIX), e.name) for e in ends),
    )


def _end(graph: OperatorGraph, read: Input) -> Operator:
    """What hands on what is read, whole and as it was made."""
    source = graph.operator(read.source)
    made = source.outputs[read.output]
    names = factors(made.layout)
    dims = tuple(Dim(d.name, d.size, d.kind) for d in map(source.dim, names))
    return Operator(
        name=f"{OUTPUT_PREFIX}{read.source}{f'.{read.output}' if read.output else ''}",
        kind=ELEMENTWISE.name,
        dims=dims,
        inputs=(Input(read.source, made.layout, read.output),),
        weights=(),
        outputs=(Output(made.layout, made.dtype),),
        attributes={"steps": [["alias", [["in", 0]]]]},
    )


def _needed(graph: OperatorGraph, ends: list[str]) -> set[str]:
    """The operators on which some depend, and they themselves."""
    found: set[str] = set()
    waiting = [*ends]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [read.source for read in graph.operator(name).inputs]
    return found


def _evaluating(graph: OperatorGraph, operator: Operator) -> Operator:
    """An operator as it is when the model evaluates."""
    changed = dict(operator.attributes)
    if takes_statistics(operator):
        changed["training"] = False
    if operator.kind in (GENERIC.name, GENERIC_PRODUCT.name):
        raise ValueError(
            f"{graph.name!r}: of operator {operator.name!r}, which no rule covers, is not known "
            "what it does when the model evaluates; capture the model with forward=True"
        )
    changed.pop("dropout", None)
    steps = changed.get("steps", ())
    if not operator.is_source and any(function in DRAWING for function, _ in steps):
        changed["steps"] = [_still(graph, operator, each) for each in steps]
    return replace(operator, attributes=changed)


def _still(graph: OperatorGraph, operator: Operator, step: list[object]) -> list[object]:
    """A step without chance: a dropout hands on what it is given."""
    function, arguments = step
    if function not in DRAWING:
        return step
    if function != "dropout" or not isinstance(arguments, list):
        raise ValueError(
            f"{graph.name!r}: operator {operator.name!r} draws random numbers ({function}), and "
            "is not known to leave that when the model evaluates; capture it with forward=True"
        )
    return ["alias", arguments[:1]]
