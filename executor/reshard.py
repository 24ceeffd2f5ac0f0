"""Running resharding paths: each step of `simulator.resharding` is one collective here.

Tensors are in factor form: one tensor dim for each factor of the layout, in local sizes. All
members derive every shape from the placements, so that nothing but data is sent. The backward of a
conversion is another conversion, of the gradient; there is no autograd here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.executor.backends.base import Communicator, Group
from stratagem.executor.seats import Seat, TensorSpec, box_shape, cut
from stratagem.simulator.collectives import Collective
from stratagem.simulator.placement import Pin, Shard
from stratagem.simulator.resharding import Step
from stratagem.simulator.transfers import Box, Transfer, intersection


def run_steps(
    tensor: Tensor | None, spec: TensorSpec, steps: Sequence[Step], seat: Seat, comm: Communicator
) -> Tensor | None:
    """Convert a tensor along a path of steps; every rank of the mesh calls this.

    Example:
        >>> steps = resharder.path((8, 16), 4, (PARTIAL,), (Shard(1),))  # doctest: +SKIP
        >>> spec = TensorSpec((8, 16), torch.float32, (PARTIAL,))  # doctest: +SKIP
        >>> run_steps(addend, spec, steps, seat, comm).shape  # doctest: +SKIP
        torch.Size([8, 4])

    Args:
        tensor: this rank's part in factor form; None where the tensor is pinned elsewhere.
        spec: the tensor before the first step.
        steps: from `simulator.resharding.Resharder.path`.
        seat: this rank's place on the mesh.
        comm: how it talks to the others.

    Returns:
        This rank's part afterwards, None where it has none. It may be a view of `tensor`.

    Raises:
        ValueError: when `tensor` is not what `spec` says that this rank holds.
    """
    _check(tensor, spec, seat)
    for step in steps:
        tensor = _run_step(tensor, spec, step, seat, comm)
        spec = spec.after(step)
    return tensor


def _check(tensor: Tensor | None, spec: TensorSpec, seat: Seat) -> None:
    box = spec.box(seat)
    expected = None if box is None else box_shape(box)
    got = None if tensor is None else tuple(tensor.shape)
    if got != expected:
        raise ValueError(
            f"device {seat.device} has a tensor of shape {got}, but its placements on a mesh of "
            f"shape {seat.mesh.shape} give it {expected} of factors {spec.sizes}"
        )


@dataclass(frozen=True)
class _Line:
    """One step as one rank sees it: its group, and what each member holds before and after."""

    step: Step
    comm: Communicator
    group: Group
    index: int
    dtype: torch.dtype
    before: list[Box]
    after: list[Box]

    @property
    def root(self) -> int:
        """The rank that the tensor is pinned to, before or else after the step."""
        pin = self.step.source if isinstance(self.step.source, Pin) else self.step.target
        assert isinstance(pin, Pin)
        return self.group[pin.index]

    def chunks(self, tensor: Tensor) -> list[Tensor]:
        """What this member has of that which each member holds afterwards."""
        own = self.before[self.index]
        return [cut(tensor, own, intersection(own, box)) for box in self.after]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The members' pieces, which were shards of one dim, in one tensor."""
        assert isinstance(self.step.source, Shard)
        return torch.cat(list(pieces), int(self.step.source.dim))


def _run_step(
    tensor: Tensor | None, spec: TensorSpec, step: Step, seat: Seat, comm: Communicator
) -> Tensor | None:
    boxes, later = spec.boxes(seat, step.axis), spec.after(step).boxes(seat, step.axis)
    before = [box for box in boxes if box is not None]
    after = [box for box in later if box is not None]
    if not before:
        return None
    index = seat.coordinates[step.axis]
    pinned = isinstance(step.source, Pin), isinstance(step.target, Pin)
    line = _Line(
        step,
        comm,
        seat.group(step.axis),
        index,
        spec.dtype,
        before * len(boxes) if pinned[0] else before,
        after * len(boxes) if pinned[1] else after,
    )
    return _STEPS[step.collective](line, tensor)


def _all_reduce(line: _Line, tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return line.comm.all_reduce(tensor, line.group)


def _reduce_scatter(line: _Line, tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return line.comm.reduce_scatter(line.chunks(tensor), line.group)


def _reduce(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert tensor is not None
    return line.comm.reduce(tensor, line.root, line.group)


def _all_gather(line: _Line, tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    shapes = [box_shape(box) for box in line.before]
    return line.joined(line.comm.all_gather(tensor, shapes, line.group))


def _all_to_all(line: _Line, tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    own = line.after[line.index]
    shapes = [box_shape(intersection(box, own)) for box in line.before]
    return line.joined(line.comm.all_to_all(line.chunks(tensor), shapes, line.group))


def _gather(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert tensor is not None
    shapes = [box_shape(box) for box in line.before]
    pieces = line.comm.gather(tensor, shapes, line.root, line.group)
    return None if pieces is None else line.joined(pieces)


def _slice(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert tensor is not None
    if isinstance(line.step.target, Pin):
        return tensor if line.group[line.index] == line.root else None
    return cut(tensor, line.before[line.index], line.after[line.index])


def _broadcast(line: _Line, tensor: Tensor | None) -> Tensor:
    shape = box_shape(line.after[line.index])
    return line.comm.broadcast(tensor, shape, line.dtype, line.root, line.group)


def _scatter(line: _Line, tensor: Tensor | None) -> Tensor:
    chunks = None if tensor is None else line.chunks(tensor)
    shape = box_shape(line.after[line.index])
    return line.comm.scatter(chunks, shape, line.dtype, line.root, line.group)


def _send(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert isinstance(line.step.target, Pin)
    target = line.group[line.step.target.index]
    if tensor is not None:
        line.comm.send(tensor, target)
        return None
    if line.group[line.index] != target:
        return None
    return line.comm.recv(box_shape(line.after[line.index]), line.dtype, line.root)


_STEPS: dict[Collective, Callable[[_Line, Tensor | None], Tensor | None]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.REDUCE: _reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.GATHER: _gather,
    Collective.SLICE: _slice,
    Collective.BROADCAST: _broadcast,
    Collective.SCATTER: _scatter,
    Collective.SEND: _send,
}


def run_transfer(
    tensor: Tensor | None,
    transfer: Transfer,
    dtype: torch.dtype,
    device: int,
    ranks: Mapping[int, int],
    comm: Communicator,
) -> Tensor | None:
    """Bring a tensor from one mesh to another; every rank of either mesh calls this.

    Args:
        tensor: this rank's part on the source mesh in factor form, None where it has none.
        transfer: what goes where.
        dtype: of the tensor.
        device: which device this rank is.
        ranks: which rank every device is.
        comm: how it talks to the others.

    Returns:
        This rank's part on the target mesh, None where it has none. It may be a view of `tensor`.
    """
    source, target = transfer.source_box(device), transfer.target_box(device)
    for move in transfer.moves_from(device):
        if move.receiver != device:
            assert tensor is not None
            assert source is not None
            comm.send(cut(tensor, source, move.box), ranks[move.receiver])
    if target is None:
        return None
    tiles: list[tuple[Box, Tensor]] = []
    for move in transfer.moves_to(device):
        if move.sender == device:
            assert tensor is not None
            assert source is not None
            tiles.append((move.box, cut(tensor, source, move.box)))
        else:
            tiles.append((move.box, comm.recv(box_shape(move.box), dtype, ranks[move.sender])))
    if len(tiles) == 1:
        return tiles[0][1]
    whole = torch.empty(box_shape(target), dtype=dtype, device=comm.device)
    for box, tile in tiles:
        cut(whole, target, box).copy_(tile)
    return whole
