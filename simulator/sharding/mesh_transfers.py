"""Moving a tensor from one mesh to another: which device sends which tile to which.

Between two pipeline stages both the devices and the placements change, so there is no axis along
which to convert. Every device of the target mesh needs a box of the tensor (or several, see
`tensor_parts`); the source mesh holds the tensor cut into tiles, each on one device or on several.
A move is one tile's intersection with one box:

    source: 2 rows of tiles        target: 3 columns of boxes        6 moves
    ┌───────┐                      ┌──┬──┬──┐                        ┌──┬──┬──┐
    ├───────┤           →          │  │  │  │            =           ├──┼──┼──┤
    └───────┘                      └──┴──┴──┘                        └──┴──┴──┘

The executor sends the moves, the simulator prices them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stratagem.simulator.graph.placement import Partial, Placements
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.sharding.tensor_parts import (
    Box,
    TensorPart,
    box_elements,
    intersection,
    part_of,
)


@dataclass(frozen=True)
class Move:
    """Device `sender` sends `box` of the tensor to `receiver`; a local copy when they are one."""

    sender: int
    receiver: int
    box: Box

    @property
    def elements(self) -> int:
        """Number of elements that move."""
        return box_elements(self.box)


@dataclass(frozen=True)
class Transfer:
    """A tensor with factors of `sizes` on its way from one mesh and its placements to another.

    Raises:
        ValueError: when a placement is Partial, or their number is not that of the mesh's axes.
    """

    sizes: tuple[int, ...]
    source_mesh: DeviceMesh
    source_placements: Placements
    target_mesh: DeviceMesh
    target_placements: Placements

    def __post_init__(self) -> None:
        _check(self.source_mesh, self.source_placements)
        _check(self.target_mesh, self.target_placements)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """What is sent, see `tile_moves`."""
        return tile_moves(
            self.sizes,
            self.source_mesh,
            self.source_placements,
            self.target_mesh,
            self.target_placements,
        )

    def moves_from(self, device: int) -> tuple[Move, ...]:
        """What `device` sends, in order."""
        return self._by_sender.get(device, ())

    def moves_to(self, device: int) -> tuple[Move, ...]:
        """What `device` receives, in order."""
        return self._by_receiver.get(device, ())

    @cached_property
    def _by_sender(self) -> dict[int, tuple[Move, ...]]:
        return _grouped(self.moves, lambda move: move.sender)

    @cached_property
    def _by_receiver(self) -> dict[int, tuple[Move, ...]]:
        return _grouped(self.moves, lambda move: move.receiver)

    def source_part(self, device: int) -> TensorPart | None:
        """What `device` holds before; None when it takes no part."""
        if device not in self.source_mesh.devices:
            return None
        return part_of(self.sizes, self.source_placements, self.source_mesh, device)

    def target_part(self, device: int) -> TensorPart | None:
        """What `device` holds after; None when it takes no part."""
        if device not in self.target_mesh.devices:
            return None
        return part_of(self.sizes, self.target_placements, self.target_mesh, device)


def _grouped(moves: Sequence[Move], key: Callable[[Move], int]) -> dict[int, tuple[Move, ...]]:
    groups: dict[int, list[Move]] = {}
    for move in moves:
        groups.setdefault(key(move), []).append(move)
    return {device: tuple(group) for device, group in groups.items()}


def tile_moves(
    sizes: tuple[int, ...],
    source_mesh: DeviceMesh,
    source_placements: Placements,
    target_mesh: DeviceMesh,
    target_placements: Placements,
) -> tuple[Move, ...]:
    """The moves that bring a tensor from one mesh to another, each element once per receiver.

    Example:
        >>> from stratagem.simulator.hardware.device_mesh import MeshAxis
        >>> from stratagem.simulator.graph.placement import REPLICATE, Shard
        >>> one, two = (DeviceMesh((MeshAxis("x", 2),), devices) for devices in ((0, 1), (2, 3)))
        >>> for move in tile_moves((8,), one, (REPLICATE,), two, (Shard(0),)):
        ...     print(move.sender, move.receiver, move.box)
        0 2 ((0, 4),)
        1 3 ((4, 8),)

    A tile that several devices hold is sent by the receiver itself if it is one of them, else by
    the one that has sent the fewest elements so far, of equals by the one at the receiver's
    position in its mesh, then by the first. Moves are ordered by receiver, then box.

    Raises:
        ValueError: when a placement is Partial: reduce it first.
    """
    _check(source_mesh, source_placements)
    _check(target_mesh, target_placements)
    holders: dict[Box, list[int]] = {}
    for device in source_mesh.devices:
        held = part_of(sizes, source_placements, source_mesh, device)
        for tile in () if held is None else held.pieces:
            holders.setdefault(tile, []).append(device)
    sent: Counter[int] = Counter()
    moves: list[Move] = []
    for position, receiver in enumerate(target_mesh.devices):
        wanted = part_of(sizes, target_placements, target_mesh, receiver)
        if wanted is None:
            continue
        twin = source_mesh.devices[position % source_mesh.num_devices]
        for tile, piece in itertools.product(sorted(holders), wanted.pieces):
            box = intersection(tile, piece)
            if box_elements(box):
                sender = _sender(holders[tile], receiver, twin, sent)
                sent[sender] += box_elements(box) if sender != receiver else 0
                moves.append(Move(sender, receiver, box))
    return tuple(moves)


def _sender(candidates: Sequence[int], receiver: int, twin: int, sent: Counter[int]) -> int:
    if receiver in candidates:
        return receiver
    return min(candidates, key=lambda device: (sent[device], device != twin, device))


def _check(mesh: DeviceMesh, placements: Placements) -> None:
    if len(placements) != len(mesh.axes):
        raise ValueError(f"{len(placements)} placements for a mesh of {len(mesh.axes)} axes")
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Partial):
            raise ValueError(
                f"a tensor that is Partial on axis {axis.name!r} cannot go to another mesh; "
                "reduce it first"
            )
