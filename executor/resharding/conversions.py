"""Running resharding paths: each step of `sharding.resharding_paths` is one collective here.

Tensors are in factor form: one tensor dim for each factor of the layout, in local sizes; what is
flat is in a row. All members derive every shape from the placements, so that nothing but data is
sent. The backward of a conversion is another conversion, of the gradient; there is no autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import Communicator, Group, Pending, Shape, done
from stratagem.executor.communication.end_to_end import end_to_end
from stratagem.executor.resharding.seats import Seat, TensorSpec, box_shape, cut, cut_part
from stratagem.simulator.graph.placement import FLAT, Pin, Shard
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.sharding.resharding_paths import ReshardingStep
from stratagem.simulator.sharding.tensor_parts import Box, TensorPart, intersection

T = TypeVar("T")


def run_steps(
    tensor: Tensor | None,
    spec: TensorSpec,
    steps: Sequence[ReshardingStep],
    seat: Seat,
    comm: Communicator,
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
        steps: from `sharding.resharding_paths.Resharder.path`.
        seat: this rank's place on the mesh.
        comm: how it talks to the others.

    Returns:
        This rank's part afterwards, None where it has none. It may be a view of `tensor`.

    Raises:
        ValueError: when `tensor` is not what `spec` says that this rank holds.
    """
    return Route(spec, steps, seat, comm)(tensor)


class Route:
    """A path of steps as one rank sees it, worked out once and run many times.

    The arguments are those of `run_steps`; calling it with the rank's part runs the steps.
    """

    def __init__(
        self, spec: TensorSpec, steps: Sequence[ReshardingStep], seat: Seat, comm: Communicator
    ) -> None:
        self._spec, self._seat = spec, seat
        part = spec.part(seat)
        self._shape = None if part is None else part.shape
        self.lines: list[_Line | None] = []
        for step in steps:
            self.lines.append(_line(spec, step, seat, comm))
            spec = spec.after(step)

    def __call__(self, tensor: Tensor | None) -> Tensor | None:
        """This rank's part after the steps, None where it has none."""
        self._check(tensor)
        for line in self.lines:
            tensor = None if line is None else _STEPS[line.step.collective](line, tensor)
        return tensor

    def start(self, tensor: Tensor | None) -> Pending[Tensor]:
        """The same, but the last collective goes on meanwhile, where that can be.

        The rank must have a part of the tensor afterwards.
        """
        self._check(tensor)
        for line in self.lines[:-1]:
            tensor = None if line is None else _STEPS[line.step.collective](line, tensor)
        last = self.lines[-1]
        assert last is not None
        if tensor is not None and last.step.collective is Collective.ALL_REDUCE:
            return last.comm.start_all_reduce(tensor, last.group)
        if tensor is not None and last.step.collective is Collective.REDUCE_SCATTER:
            return last.comm.start_reduce_scatter(last.chunks(tensor), last.group)
        if tensor is not None and last.step.collective is Collective.ALL_GATHER:
            gathered = last.comm.start_all_gather(tensor, last.shapes, last.group)
            ending, is_over = gathered.ending, gathered.is_over
            return Pending(lambda: last.joined(gathered.finish()), ending, is_over)
        result = _STEPS[last.step.collective](last, tensor)
        assert result is not None
        return done(result)

    def _check(self, tensor: Tensor | None) -> None:
        got = None if tensor is None else tuple(tensor.shape)
        if got != self._shape:
            raise ValueError(
                f"device {self._seat.device} has a tensor of shape {got}, but its placements on a "
                f"mesh of shape {self._seat.mesh.shape} give it {self._shape} of factors "
                f"{self._spec.sizes}"
            )


def start_together(
    routes: Sequence[Route], tensors: Sequence[Tensor]
) -> tuple[Pending[list[Tensor]], list[Callable[[], Tensor]]]:
    """Begin routes of equal steps, all their tensors in one collective a step.

    Every rank has a part of every tensor, and steps are all-reduces, reduce-scatters, all-gathers
    and slices.

    Example:
        >>> pending, finish = start_together([one, other], [weight, bias])  # doctest: +SKIP
        >>> finish[0]().shape  # doctest: +SKIP
        torch.Size([8, 4])

    Returns:
        The last collective, and per tensor a function that waits for it and gives the result.
    """
    found = list(tensors)
    rows = [
        [line for line in lines if line] for lines in zip(*(r.lines for r in routes), strict=True)
    ]
    for lines in rows[:-1]:
        found = _start_step(lines, found).finish()
    last = _start_step(rows[-1], found)
    parts: dict[int, Tensor] = {}

    def part(number: int) -> Tensor:
        """Handed over, so that what was read and freed is gone although others are still here."""
        if not parts:
            parts.update(enumerate(last.finish()))
        return parts.pop(number)

    return last, [partial(part, number) for number in range(len(routes))]


def _start_step(lines: Sequence[_Line], tensors: Sequence[Tensor]) -> Pending[list[Tensor]]:
    """One collective for all tensors laid end to end."""
    first = lines[0]
    match first.step.collective:
        case Collective.ALL_REDUCE:
            summed = first.comm.start_all_reduce(_flat(tensors), first.group, overwrite=True)
            return _then(summed, partial(_parted, shapes=[tensor.shape for tensor in tensors]))
        case Collective.REDUCE_SCATTER:
            each = _by_member(lines, tensors)
            scattered = first.comm.start_reduce_scatter(each, first.group)
            return _then(scattered, partial(_parted, shapes=[line.shape for line in lines]))
        case Collective.ALL_GATHER:
            totals = [(sum(map(math.prod, each)),) for each in _shapes_by_member(lines)]
            gathered = first.comm.start_all_gather(_flat(tensors), totals, first.group)
            return _then(gathered, partial(_joined, lines))
        case _:
            run = _STEPS[first.step.collective]
            cuts = [run(line, tensor) for line, tensor in zip(lines, tensors, strict=True)]
            there = [tensor for tensor in cuts if tensor is not None]
            return done(_parted(_flat(there), [tensor.shape for tensor in there]))


def _then(pending: Pending[T], last: Callable[[T], list[Tensor]]) -> Pending[list[Tensor]]:
    """A collective whose result is taken apart when it is there."""
    return Pending(lambda: last(pending.finish()), pending.ending, pending.is_over)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _shapes_by_member(lines: Sequence[_Line]) -> list[tuple[Shape, ...]]:
    """Per member what it has of each tensor."""
    return list(zip(*(line.shapes for line in lines), strict=True))


def _joined(lines: Sequence[_Line], rows: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of what each member had of all of them."""
    pieces = [
        _parted(row, shapes) for row, shapes in zip(rows, _shapes_by_member(lines), strict=True)
    ]
    return [line.joined(each) for line, *each in zip(lines, *pieces, strict=True)]


def _by_member(lines: Sequence[_Line], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Per member its chunks of all tensors end to end, the members one behind the other.

    Chunks that are cut across a tensor would be copied one by one before they are put together; a
    tensor that is cut evenly is copied to its places at once, so each element once.
    """
    chunks = [line.chunks(tensor) for line, tensor in zip(lines, tensors, strict=True)]
    sizes = [[chunk.numel() for chunk in row] for row in chunks]
    whole = all(chunk.is_contiguous() for row in chunks for chunk in row)
    if whole or any(len(set(row)) > 1 for row in sizes):
        rows = list(zip(*chunks, strict=True))
        flat = torch.cat([chunk.reshape(-1) for row in rows for chunk in row])
        return torch.split(flat, [sum(chunk.numel() for chunk in row) for row in rows])
    made = tensors[0].new_empty(len(chunks[0]), sum(row[0] for row in sizes))
    places = torch.split(made, [row[0] for row in sizes], dim=1)
    for line, tensor, place in zip(lines, tensors, places, strict=True):
        cut_up = line.stacked(tensor)
        place.view(cut_up.shape).copy_(cut_up)
    return torch.unbind(made)


def _parted(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(frozen=True)
class _Line:
    """One step as one rank sees it: its group, and what each member holds before and after.

    Steps to ranges of a box and back see a row of elements; `result` is the shape in the end.
    """

    step: ReshardingStep
    comm: Communicator
    group: Group
    index: int
    dtype: torch.dtype
    before: list[Box]
    after: list[Box]
    result: Shape | None

    @property
    def root(self) -> int:
        """The rank that the tensor is pinned to, before or else after the step."""
        pin = self.step.source if isinstance(self.step.source, Pin) else self.step.target
        assert isinstance(pin, Pin)
        return self.group[pin.index]

    @cached_property
    def shapes(self) -> list[Shape]:
        """What every member holds before."""
        return [box_shape(box) for box in self.before]

    @cached_property
    def shape(self) -> Shape:
        """What this member holds after."""
        return box_shape(self.after[self.index])

    @cached_property
    def received(self) -> list[Shape]:
        """What each member has of that which this member holds afterwards."""
        own = self.after[self.index]
        return [box_shape(intersection(box, own)) for box in self.before]

    @cached_property
    def _chunk_boxes(self) -> list[Box]:
        return [intersection(self.before[self.index], box) for box in self.after]

    def chunks(self, tensor: Tensor) -> list[Tensor]:
        """What this member has of that which each member holds afterwards."""
        own, tensor = self.before[self.index], self.in_order(tensor)
        return [cut(tensor, own, box) for box in self._chunk_boxes]

    def in_order(self, tensor: Tensor) -> Tensor:
        """The tensor as the step cuts it: its elements in a row where it becomes flat."""
        return tensor.reshape(-1) if self.step.target == FLAT else tensor

    def stacked(self, tensor: Tensor) -> Tensor:
        """The same chunks, all of one shape, as a view with the members in front."""
        tensor = self.in_order(tensor)
        dim = int(self.step.target.dim) if isinstance(self.step.target, Shard) else 0
        return torch.unflatten(tensor, dim, (len(self.after), -1)).movedim(dim, 0)

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The members' pieces, which were shards of one dim or ranges, in one tensor.

        It is a view of them where they lie one behind the other, as a gather leaves them.
        """
        assert self.result is not None
        if self.step.source == FLAT:
            return end_to_end(pieces).view(self.result)
        assert isinstance(self.step.source, Shard)
        dim = int(self.step.source.dim)
        if math.prod(self.result[:dim]) == 1:
            return end_to_end(pieces).view(self.result)
        return torch.cat(list(pieces), dim)


def _line(spec: TensorSpec, step: ReshardingStep, seat: Seat, comm: Communicator) -> _Line | None:
    """A step as the rank of `seat` sees it; None where it takes no part."""
    parts, later = spec.parts(seat, step.axis), spec.after(step).parts(seat, step.axis)
    in_rows = FLAT in (step.source, step.target)
    before = [_extent(part, in_rows=in_rows) for part in parts if part is not None]
    after = [_extent(part, in_rows=in_rows) for part in later if part is not None]
    if not before:
        return None
    index = seat.coordinates[step.axis]
    ours = later[index]
    pinned = isinstance(step.source, Pin), isinstance(step.target, Pin)
    return _Line(
        step,
        comm,
        seat.group(step.axis),
        index,
        spec.dtype,
        before * len(parts) if pinned[0] else before,
        after * len(parts) if pinned[1] else after,
        None if ours is None else ours.shape,
    )


def _extent(part: TensorPart, *, in_rows: bool) -> Box:
    """The box that a part is, or its range of elements, of a whole box too where it is in rows."""
    return ((0, part.elements),) if in_rows and part.span is None else part.extent


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
    return line.joined(line.comm.all_gather(tensor, line.shapes, line.group))


def _all_to_all(line: _Line, tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    chunks = line.chunks(tensor)
    return line.joined(line.comm.all_to_all(chunks, line.received, line.group))


def _gather(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert tensor is not None
    pieces = line.comm.gather(tensor, line.shapes, line.root, line.group)
    return None if pieces is None else line.joined(pieces)


def _slice(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert tensor is not None
    if isinstance(line.step.target, Pin):
        return tensor if line.group[line.index] == line.root else None
    return cut(line.in_order(tensor), line.before[line.index], line.after[line.index])


def _broadcast(line: _Line, tensor: Tensor | None) -> Tensor:
    return line.comm.broadcast(tensor, line.shape, line.dtype, line.root, line.group)


def _scatter(line: _Line, tensor: Tensor | None) -> Tensor:
    chunks = None if tensor is None else line.chunks(tensor)
    return line.comm.scatter(chunks, line.shape, line.dtype, line.root, line.group)


def _send(line: _Line, tensor: Tensor | None) -> Tensor | None:
    assert isinstance(line.step.target, Pin)
    target = line.group[line.step.target.index]
    if tensor is not None:
        line.comm.send(tensor, target)
        return None
    if line.group[line.index] != target:
        return None
    return line.comm.recv(line.shape, line.dtype, line.root)


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
    source, target = transfer.source_part(device), transfer.target_part(device)
    for move in transfer.moves_from(device):
        if move.receiver != device:
            assert tensor is not None
            assert source is not None
            comm.send(cut_part(tensor, source, move.box), ranks[move.receiver])
    if target is None:
        return None
    tiles: list[tuple[Box, Tensor]] = []
    for move in transfer.moves_to(device):
        if move.sender == device:
            assert tensor is not None
            assert source is not None
            tiles.append((move.box, cut_part(tensor, source, move.box)))
        else:
            tiles.append((move.box, comm.recv(box_shape(move.box), dtype, ranks[move.sender])))
    return put_together(tiles, target, dtype, comm.device)


def put_together(
    tiles: Sequence[tuple[Box, Tensor]],
    target: TensorPart,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The part `target` of a tensor, of tiles that fill it; a view of one that is all of it."""
    if len(tiles) == 1:
        return tiles[0][1].reshape(target.shape)
    whole = torch.empty(target.shape, dtype=dtype, device=device)
    for box, tile in tiles:
        cut_part(whole, target, box).copy_(tile)
    return whole
