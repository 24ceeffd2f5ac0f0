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
from torch.autograd.graph import get_gradient_edge

from stratagem.executor.actions.input_views import (
    DirectView,
    Select,
    direct_view,
    reader,
    select_of,
)
from stratagem.executor.actions.named_values import NamedValues
from stratagem.executor.actions.operator_actions import (
    Tape,
    constant,
    enter,
    factor_shapes,
    found_or_zeros,
    give_back,
    kernel_of,
    returns_of,
    total_of,
)
from stratagem.executor.actions.registry import Action
from stratagem.executor.program.instructions import Backward, Forward
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator
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
        apart: values that are taken apart along a dim, since several readers of the segment
            select an index of it.
        changed: the values that instructions make; other weights are one tensor in all steps.
    """

    inside: frozenset[str]
    shown: frozenset[str]
    apart: Mapping[str, int]
    changed: frozenset[str]


@dataclass
class WideLeaves:
    """Weights of a segment that kernels read in a wider dtype, all cast by one call a pass.

    `leaves` are kept: a few numbers a channel. They are `fresh` from the first forward pass of a
    segment to its backward pass.
    """

    values: Mapping[str, Any]
    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    fresh: bool = False

    def expect(self, name: str, dtype: torch.dtype) -> Read:
        """How a kernel comes by a weight in a dtype."""
        number = len(self.names)
        self.names.append(name)
        self.dtypes.append(dtype)

        def read() -> Tensor:
            if not self.fresh:
                self._cast()
            return self.leaves[number]

        return read

    def _cast(self) -> None:
        self.fresh = True
        with torch.no_grad():
            given: list[Tensor] = [self.values[name] for name in self.names]
            if not self.leaves:
                self.leaves = [
                    torch.empty_like(each, dtype=dtype).requires_grad_()
                    for each, dtype in zip(given, self.dtypes, strict=True)
                ]
            torch._foreach_copy_(self.leaves, given)


@dataclass
class SegmentMember:
    """An operator of a segment: its passes, and how it runs.

    `dtypes` are those of its weights, where they are known before.

    `tape` is its part of the segment's, with leaves for the inputs that come from outside.
    `leaves` are those of the weights of all operators of the segment, its own from `first` on;
    `wide` makes some of them.
    """

    forward: Forward
    backward: Backward
    operator: Operator
    shards: Shards
    seat: Seat
    flows: Sequence[bool]
    dtypes: Sequence[torch.dtype | None]
    leaves: list[Tensor | None]
    wide: WideLeaves
    tape: Tape = field(default_factory=Tape)
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = len(self.leaves)
        self.leaves += [None for name in self.backward.weights if name is not None]

    @property
    def weights(self) -> list[tuple[str, torch.dtype]]:
        """The gradients of its weights, and the dtypes in which they are added up."""
        names = [name for name in self.backward.weights if name is not None]
        return list(zip(names, map(torch_dtype, self.backward.dtypes), strict=True))


def parts_of(value: str) -> str:
    """The name of the parts into which a value is taken apart."""
    return f"{value} parts"


def forward(
    member: SegmentMember,
    links: Links,
    makers: Mapping[str, SegmentMember],
    memory: NamedValues,
    live: Live,
) -> Action:
    """The action of a forward pass in a segment; autograd records what it does.

    Args:
        makers: the operators of the segment by the values that they make.
    """
    instruction, operator, tape = member.forward, member.operator, member.tape
    values = memory.values
    count = len(operator.inputs)
    reads = [_input(member, slot, links, makers, memory, live) for slot in range(count)]
    reads_weights = [_weight(member, n, links, memory) for n in range(len(instruction.weights))]
    enters = bool(_outside(member, links))
    run = kernel_of(instruction, operator, member.shards)
    (name,), (shape,) = instruction.outputs, factor_shapes(operator, member.shards)
    shown, ends = name in links.shown, _begins(member.backward, links)

    def act() -> None:
        if enters:
            tape.leaves, tape.shapes, tape.sources = [], [], []
        live[name] = made = run([read() for read in reads], [read() for read in reads_weights])
        if ends:
            tape.edges = (get_gradient_edge(made) if made.requires_grad else None,)
            tape.kinds = ((made.shape, made.dtype, made.device),)
        if shown:
            seen = made.detach()
            values[name] = seen if shape is None else seen.reshape(shape)

    return act


def _begins(backward: Backward, links: Links) -> bool:
    """Whether gradients come to an operator from outside the segment, or from the loss."""
    return bool(backward.seed) or any(set(n) - links.inside for n in backward.gradients)


def _outside(member: SegmentMember, links: Links) -> list[tuple[str, Select]]:
    """The gradients of inputs that go outside the segment, and what those select of a value."""
    return [
        (name, select_of(read))
        for name, read in zip(member.backward.inputs, member.operator.inputs, strict=True)
        if name is not None and name not in links.inside
    ]


def _input(
    member: SegmentMember,
    slot: int,
    links: Links,
    makers: Mapping[str, SegmentMember],
    memory: NamedValues,
    live: Live,
) -> Read:
    """How an operator comes by an input: attached to the graph, as a leaf of it, or neither."""
    operand = member.forward.inputs[slot]
    name, values, tape = operand.value, memory.values, member.tape
    if member.backward.inputs[slot] in links.inside:
        return _attached(member, slot, makers[name], links, live)
    read = reader(member.operator.inputs[slot], operand, member.shards, member.seat)
    if member.flows[slot]:
        return lambda: enter(values[name], read, tape)
    return lambda: read.view(read.part(values[name]))


def _attached(
    member: SegmentMember, slot: int, maker: SegmentMember, links: Links, live: Live
) -> Read:
    """An input that another operator of the segment has made."""
    name, read = member.forward.inputs[slot].value, member.operator.inputs[slot]
    layout = maker.operator.outputs[maker.forward.outputs.index(name)].layout
    view = direct_view(read, layout, maker.shards.sizes, member.shards)
    if len(read.select) == 1 and read.select[0][0] == links.apart.get(name):
        parts, ((dim, index),) = parts_of(name), view.select

        def part() -> Tensor:
            # Readers that see other factors take it apart in another way.
            found = live.setdefault(parts, {})
            if (dim, view.before) not in found:
                made = live[name]
                whole = made if view.before is None else made.reshape(view.before)
                found[dim, view.before] = whole.unbind(dim)
            return view.rest(found[dim, view.before][index])

        return part
    if view == DirectView(None, (), None, None):
        return lambda: live[name]
    return lambda: view.of(live[name])


def _weight(member: SegmentMember, slot: int, links: Links, memory: NamedValues) -> Read:
    """How an operator comes by a weight: as a leaf of the graph, where it has a gradient.

    The leaf of a weight that lasts does so too; that of another would keep it from being freed.
    """
    name, values, leaves = member.forward.weights[slot], memory.values, member.leaves
    if member.backward.weights[slot] is None:
        again = member.forward.again
        return lambda: constant(values[name], again)
    place = member.first + sum(each is not None for each in member.backward.weights[:slot])
    dtype = _wider(member, slot)
    if dtype is not None:
        read = member.wide.expect(name, dtype)

        def wide() -> Tensor:
            leaves[place] = made = read()
            return made

        return wide
    if name in links.changed:

        def new() -> Tensor:
            value: Tensor = values[name]
            leaves[place] = made = value.detach().requires_grad_()
            return made

        return new
    of: list[Tensor] = []

    def kept() -> Tensor:
        value: Tensor = values[name]
        leaf = leaves[place]
        if leaf is None or of[0] is not value:
            of[:] = [value]
            leaves[place] = leaf = value.detach().requires_grad_()
        return leaf

    return kept


def _wider(member: SegmentMember, slot: int) -> torch.dtype | None:
    """The dtype of its running statistics, in which a norm that has them reads other weights."""
    buffers = kind_of(member.operator).buffers
    if not buffers:
        return None
    own, running = member.dtypes[0], member.dtypes[buffers[-1]]
    return running if own not in (None, running) and slot not in buffers else None


def backward(members: Sequence[SegmentMember], links: Links, memory: NamedValues) -> Action:
    """The action of the backward passes of a segment, whose operators come in their order."""
    starts = [(each.tape, total) for each in members for total in _totals(each, links, memory)]
    ends = [
        (member.tape, returns_of(outside), frozenset(member.backward.added))
        for member in members
        if (outside := _outside(member, links))
    ]
    leaves = members[0].leaves
    weights = [weight for each in members for weight in each.weights]
    names = [name for each in members for name in _trained(each)]
    passing = [n for n, name in enumerate(names) if name in links.changed]

    def act() -> None:
        given = [(tape.edges[0], total()) for tape, total in starts]
        reached = [(edge, total) for edge, total in given if edge is not None]
        inputs = [leaf for tape, _, _ in ends for leaf in tape.leaves]
        own = [leaf for leaf in leaves if leaf is not None]
        wanted = [*inputs, *own]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if reached and wanted:
            edges, totals = zip(*reached, strict=True)
            del given, reached
            found = torch.autograd.grad(edges, wanted, totals, allow_unused=True)
        at = 0
        for tape, returns, added in ends:
            mine = found[at : at + len(tape.leaves)]
            gradients = found_or_zeros(tape.leaves, tape.shapes, mine)
            give_back(returns, added, tape, gradients, memory)
            at += len(tape.leaves)
        _add_weights(weights, own, found[at:], memory)
        for n in passing:
            leaves[n] = None
        members[0].wide.fresh = False
        for tape, _ in starts:
            tape.edges = ()

    return act


def _add_weights(
    weights: Sequence[tuple[str, torch.dtype]],
    leaves: Sequence[Tensor],
    found: Sequence[Tensor | None],
    memory: NamedValues,
) -> None:
    """Add the gradients of weights to what is there, in the dtype in which that is.

    Those that are the first are cast by one call; others one by one, so that each is gone again
    before the next one is there.
    """
    casts: list[tuple[str, Tensor, Tensor]] = []
    for (name, dtype), leaf, gradient in zip(weights, leaves, found, strict=True):
        made = torch.zeros_like(leaf) if gradient is None else gradient
        if made.dtype == dtype or name in memory.values:
            memory.add(name, made.to(dtype))
        else:
            casts.append((name, torch.empty_like(made, dtype=dtype), made))
    if casts:
        torch._foreach_copy_([each for _, each, _ in casts], [each for _, _, each in casts])
    for name, made, _ in casts:
        memory.add(name, made)


def _trained(member: SegmentMember) -> list[str]:
    """The weights of an operator that have gradients."""
    found = zip(member.forward.weights, member.backward.weights, strict=True)
    return [weight for weight, name in found if name is not None]


def _totals(
    member: SegmentMember, links: Links, memory: NamedValues
) -> list[Callable[[], Tensor]]:
    """The gradient with which backward begins at an operator, if it does."""
    if not _begins(member.backward, links):
        return []
    (names,) = member.backward.gradients
    outside = tuple(name for name in names if name not in links.inside)
    arriving = replace(member.backward, gradients=(outside,))
    operator, shards = member.operator, member.shards
    return [total_of(arriving, operator, shards, 0, memory, lambda: member.tape)]
