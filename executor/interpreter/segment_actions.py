"""Running segments: the forward passes of several operators on one tape, one backward for all.

What one operator of a segment makes and another reads stays attached to the graph; everybody else
sees it detached. The tape keeps what those of the operators would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stratagem.executor.interpreter.input_views import Reader, reader, select_of, selected
from stratagem.executor.interpreter.named_values import NamedValues
from stratagem.executor.interpreter.operator_actions import (
    Action,
    Tape,
    add_weights,
    constant,
    enter,
    factor_shapes,
    found_or_zeros,
    give_back,
    kernel_of,
    returns_of,
    total_of,
)
from stratagem.executor.program.instructions import Backward, Forward
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.operators.operator import Operator, factors, shape_of
from stratagem.simulator.torch_ops.kernels.shards import Shards
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype

Live = dict[str, Any]
"""What operators of segments have made for one another, by value, in the shape of the kernel."""

Read = Callable[[], Tensor]


@dataclass(frozen=True)
class Links:
    """What an operator of a segment shares with the others.

    Attributes:
        inside: the gradients that stay inside the segment.
        shown: the values that somebody else reads.
        apart: values that are taken apart along a dim, since each reader of the segment selects
            one index of it.
        changed: the values that instructions make; other weights are one tensor in all steps.
    """

    inside: frozenset[str]
    shown: frozenset[str]
    apart: Mapping[str, int]
    changed: frozenset[str]


@dataclass
class Member:
    """An operator of a segment: its passes, how it runs, and what its part of the tape has.

    `enter` says to what draws random numbers which pass it is.
    """

    forward: Forward
    backward: Backward
    operator: Operator
    shards: Shards
    seat: Seat
    flows: Sequence[bool]
    enter: Action
    tape: Tape = field(default_factory=Tape)


def parts_of(value: str) -> str:
    """The name of the parts into which a value is taken apart."""
    return f"{value} parts"


def forward(
    member: Member, links: Links, makers: Mapping[str, Member], memory: NamedValues, live: Live
) -> Action:
    """The action of a forward pass in a segment; autograd records what it does.

    Args:
        makers: the operators of the segment by the values that they make.
    """
    instruction, operator, tape = member.forward, member.operator, member.tape
    values = memory.values
    count = len(operator.inputs)
    reads = [_input(member, slot, links, makers, memory, live) for slot in range(count)]
    reads_weights = [
        _weight(name, flow, member, links, memory)
        for name, flow in zip(instruction.weights, member.flows[count:], strict=True)
    ]
    run = kernel_of(instruction, operator, member.shards)
    shapes = factor_shapes(operator, member.shards)
    shown = [
        (n, name, shape)
        for n, (name, shape) in enumerate(zip(instruction.outputs, shapes, strict=True))
        if name in links.shown
    ]
    ends = _ends(member.backward, links)
    nothing = [None] * len(shapes)

    def act() -> None:
        member.enter()
        tape.leaves, tape.shapes, tape.sources = [], [], []
        made = run([read() for read in reads], [read() for read in reads_weights])
        for name, output in zip(instruction.outputs, made, strict=True):
            live[name] = output
        if ends:
            edges: list[GradientEdge | None] = list(nothing)
            for n in ends:
                edges[n] = get_gradient_edge(made[n]) if made[n].requires_grad else None
            tape.edges = tuple(edges)
            tape.kinds = tuple((each.shape, each.dtype, each.device) for each in made)
        for n, name, shape in shown:
            seen = made[n].detach()
            values[name] = seen if shape is None else seen.reshape(shape)

    return act


def _ends(backward: Backward, links: Links) -> list[int]:
    """The outputs to which gradients come from outside the segment, or from the loss."""
    outside = [set(names) - links.inside for names in backward.gradients]
    return [n for n, names in enumerate(outside) if names or backward.seed]


def _input(
    member: Member,
    slot: int,
    links: Links,
    makers: Mapping[str, Member],
    memory: NamedValues,
    live: Live,
) -> Read:
    """How an operator comes by an input: attached to the graph, as a leaf of it, or neither."""
    operand = member.forward.inputs[slot]
    read = reader(member.operator.inputs[slot], operand, member.shards, member.seat)
    name, values, tape = operand.value, memory.values, member.tape
    if member.backward.inputs[slot] in links.inside:
        return _attached(read, name, makers[name], links, live)
    if member.flows[slot]:
        return lambda: enter(values[name], read, tape)
    return lambda: read.view(read.part(values[name]))


def _attached(read: Reader, name: str, maker: Member, links: Links, live: Live) -> Read:
    """An input that another operator of the segment has made."""
    output = maker.operator.outputs[maker.forward.outputs.index(name)]
    made = shape_of(output.layout, maker.shards.sizes)
    whole = tuple(maker.shards.sizes[dim] for dim in factors(output.layout))
    if name in links.apart:
        parts, ((dim, index),) = parts_of(name), read.select

        def part() -> Tensor:
            if parts not in live:
                live[parts] = live[name].reshape(whole).unbind(dim)
            return read.view(live[parts][index])

        return part
    if read.select or read.order is not None:
        return lambda: read.view(selected(live[name].reshape(whole), read.select))
    shape = read.shape or whole
    if shape == made:
        return lambda: live[name]
    return lambda: live[name].reshape(shape)


def _weight(name: str, flow: bool, member: Member, links: Links, memory: NamedValues) -> Read:
    """How an operator comes by a weight: as a leaf of the graph, where it has a gradient."""
    values, tape, again = memory.values, member.tape, member.forward.again
    if not flow:
        return lambda: constant(values[name], again)
    if name in links.changed:
        return lambda: tape.leaf(values[name])
    kept: list[Tensor] = []

    def leaf() -> Tensor:
        value = values[name]
        if not kept or kept[0] is not value:
            kept[:] = value, value.detach().requires_grad_()
        tape.leaves.append(kept[1])
        tape.shapes.append(kept[1].shape)
        return kept[1]

    return leaf


def backward(members: Sequence[Member], links: Links, memory: NamedValues) -> Action:
    """The action of the backward passes of a segment, whose operators come in their order."""
    gradients = [_Gradients(member, links, memory) for member in members]

    def act() -> None:
        edges: list[GradientEdge] = []
        totals: list[Tensor] = []
        leaves: list[Tensor] = []
        for each in gradients:
            each.ends(edges, totals)
            leaves += each.tape.leaves
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and edges:
            found = torch.autograd.grad(edges, leaves, totals, allow_unused=True)
        at = 0
        for each in gradients:
            count = len(each.tape.leaves)
            each.keep(found[at : at + count])
            at += count

    return act


class _Gradients:
    """What an operator of a segment gives to its backward pass, and takes from it."""

    def __init__(self, member: Member, links: Links, memory: NamedValues) -> None:
        backward, operator, self.tape = member.backward, member.operator, member.tape
        self._memory = memory
        outside = tuple(
            tuple(name for name in names if name not in links.inside)
            for names in backward.gradients
        )
        arriving = replace(backward, gradients=outside)
        self._totals = [
            (n, total_of(arriving, operator, member.shards, n, memory, lambda: self.tape))
            for n in _ends(backward, links)
        ]
        self._returns = returns_of(
            [
                (name, select_of(read))
                for name, read in zip(backward.inputs, operator.inputs, strict=True)
                if name is not None and name not in links.inside
            ]
        )
        self._added = frozenset(backward.added)
        names = [name for name in backward.weights if name is not None]
        self._weights = list(zip(names, map(torch_dtype, backward.dtypes), strict=True))

    def ends(self, edges: list[GradientEdge], totals: list[Tensor]) -> None:
        """Say where backward begins, and with what."""
        for n, total in self._totals:
            edge, given = self.tape.edges[n], total()
            if edge is not None:
                edges.append(edge)
                totals.append(given)
        self.tape.edges = ()

    def keep(self, found: Sequence[Tensor | None]) -> None:
        """Keep the gradients of inputs from outside, and of weights."""
        tape, memory = self.tape, self._memory
        gradients = found_or_zeros(tape.leaves, tape.shapes, found)
        give_back(self._returns, self._added, tape, gradients, memory)
        add_weights(self._weights, gradients[len(tape.sources) :], memory)
        tape.leaves = []
