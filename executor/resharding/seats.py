"""Who holds what on a mesh: a rank's seat, what is known of a tensor, and boxes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import Group, Shape
from stratagem.simulator.graph.placement import REPLICATE, Placements
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.sharding.resharding_paths import ReshardingStep
from stratagem.simulator.sharding.tensor_parts import Box, TensorPart, box_elements, part_at


@dataclass(frozen=True)
class Seat:
    """A rank's place on a mesh: which device it is, and which rank every device is."""

    mesh: DeviceMesh
    device: int
    ranks: Mapping[int, int]

    @cached_property
    def coordinates(self) -> tuple[int, ...]:
        """Index along each axis."""
        return self.mesh.coordinates(self.device)

    def is_first(self, placements: Placements) -> bool:
        """Whether this is the first of the ranks that hold the same part of a tensor."""
        return all(
            index == 0
            for placement, index in zip(placements, self.coordinates, strict=True)
            if placement == REPLICATE
        )

    def group(self, axis: int) -> Group:
        """The ranks along `axis`, in axis order."""
        return tuple(self.ranks[device] for device in _group_of(self.mesh, self.device, axis))


@dataclass(frozen=True)
class TensorSpec:
    """What all ranks know of a tensor: sizes of its factors, dtype and placements on its mesh."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements

    def after(self, step: ReshardingStep) -> TensorSpec:
        """The same tensor after `step`.

        Raises:
            ValueError: when the step starts from a placement that the tensor does not have.
        """
        if self.placements[step.axis] != step.source:
            raise ValueError(
                f"step {step} cannot follow: the tensor is {self.placements[step.axis]} on axis "
                f"{step.axis}"
            )
        placed = list(self.placements)
        placed[step.axis] = step.target
        return replace(self, placements=tuple(placed))

    def parts(self, seat: Seat, axis: int) -> list[TensorPart | None]:
        """What each member along `axis` of the seat's group holds; None for nothing."""
        start, rest = seat.coordinates[:axis], seat.coordinates[axis + 1 :]
        return [
            part_at(self.sizes, self.placements, seat.mesh.shape, (*start, i, *rest))
            for i in range(seat.mesh.shape[axis])
        ]

    def part(self, seat: Seat) -> TensorPart | None:
        """What the seat holds; None for nothing."""
        return part_at(self.sizes, self.placements, seat.mesh.shape, seat.coordinates)


@lru_cache(maxsize=4096)
def _group_of(mesh: DeviceMesh, device: int, axis: int) -> tuple[int, ...]:
    return mesh.group_of(device, axis)


def mesh_groups(mesh: DeviceMesh, ranks: Mapping[int, int]) -> tuple[Group, ...]:
    """Every group of ranks that collectives on a mesh use, for `Communicator.prepare`."""
    return tuple(
        tuple(ranks[device] for device in group)
        for axis in range(len(mesh.axes))
        for group in mesh.groups(axis)
        if len(group) > 1
    )


def box_shape(box: Box) -> Shape:
    """The shape of the tensor that fills a box."""
    return tuple(stop - start for start, stop in box)


def cut(tensor: Tensor, own: Box, wanted: Box) -> Tensor:
    """The part `wanted` of a tensor that fills the box `own`; a view."""
    for dim, ((start, _), (first, stop)) in enumerate(zip(own, wanted, strict=True)):
        if stop - first != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first - start, stop - first)
    return tensor


def cut_part(tensor: Tensor, own: TensorPart, wanted: Box) -> Tensor:
    """The box `wanted`, inside one of its pieces, of the part `own` that a tensor is; a view."""
    if own.span is None:
        return cut(tensor, own.box, wanted)
    before, piece = own.piece_around(wanted)
    row = tensor.view(-1).narrow(0, before, box_elements(piece))
    return cut(row.view(box_shape(piece)), piece, wanted)
