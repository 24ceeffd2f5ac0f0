"""Running conversions, sends and receives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stratagem.executor.backends.base import Communicator
from stratagem.executor.instructions import Convert, Receive, Send
from stratagem.executor.memory import Memory
from stratagem.executor.reshard import Route
from stratagem.executor.seats import Seat, TensorSpec, box_shape, cut
from stratagem.simulator.graph import Layout
from stratagem.simulator.torch_ops.programs import torch_dtype
from stratagem.simulator.transfers import Box

Action = Callable[[], None]


def stored_shape(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a parameter's part whose factors have local `sizes`.

    Example:
        >>> stored_shape((("qkv", "head"), ("in",)), (3, 2, 8))
        (6, 8)
    """
    left = iter(sizes)
    return tuple(math.prod(next(left) for _ in group) for group in layout)


def convert(instruction: Convert, seat: Seat, comm: Communicator, memory: Memory) -> Action:
    """The action of a conversion."""
    spec = TensorSpec(instruction.sizes, torch_dtype(instruction.dtype), instruction.before)
    box = spec.box(seat)
    given = None if box is None else box_shape(box)
    values, source, target = memory.values, instruction.source, instruction.target
    keep = _keeper(target, instruction.adds, memory)
    layout, steps = instruction.layout, instruction.steps
    route = Route(spec, steps, seat, comm)

    def run() -> None:
        tensor: Tensor | None = None
        if source is not None:
            tensor = values[source]
            if layout is not None:
                assert given is not None
                tensor = tensor.reshape(given)
        if steps:
            tensor = route(tensor)
        if target is not None:
            assert tensor is not None
            if layout is not None:
                tensor = tensor.reshape(stored_shape(layout, tensor.shape))
            keep(tensor)

    return run


def send(instruction: Send, comm: Communicator, memory: Memory) -> Action:
    """The action of a send, which does not wait."""
    values, shape = memory.values, instruction.shape
    own = _whole(shape)

    def run() -> None:
        tensor: Tensor = values[instruction.value].reshape(shape)
        for piece in instruction.pieces:
            comm.send(cut(tensor, own, piece.box), piece.rank)

    return run


def receive(instruction: Receive, comm: Communicator, memory: Memory) -> Action:
    """The action of a receive: wait for the pieces and put them together."""
    dtype, shape = torch_dtype(instruction.dtype), instruction.shape
    own = _whole(shape)
    keep = _keeper(instruction.value, instruction.adds, memory)
    final = shape if instruction.layout is None else stored_shape(instruction.layout, shape)
    expected = [(piece.box, box_shape(piece.box), piece.rank) for piece in instruction.pieces]

    def run() -> None:
        pieces = [(box, comm.recv(size, dtype, rank)) for box, size, rank in expected]
        tensor = pieces[0][1]
        if len(pieces) > 1:
            tensor = torch.empty(shape, dtype=dtype, device=comm.device)
            for box, tile in pieces:
                cut(tensor, own, box).copy_(tile)
        keep(tensor.reshape(final))

    return run


def _keeper(target: str | None, adds: bool, memory: Memory) -> Callable[[Tensor], None]:
    """How a result becomes a value: it is added to it, or is it."""
    if target is None:
        return lambda tensor: None
    if adds:
        return lambda tensor: memory.add(target, tensor)
    return lambda tensor: memory.values.__setitem__(target, tensor)


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)
