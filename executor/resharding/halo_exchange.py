"""Halos: rows of an image that ranks along one axis fetch from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import Communicator, Group

Range = tuple[int, int]


@dataclass(frozen=True)
class Routes:
    """Who holds and who needs what along tensor dim `dim`, by index along the axis.

    `index` is this rank's.
    """

    dim: int
    held: Sequence[Range]
    needed: Sequence[Range]
    index: int

    @property
    def leave(self) -> list[Range]:
        """What each member needs of this rank's part, counted in the part."""
        start, stop = self.held[self.index]
        return [_shared((start, stop), needed, start) for needed in self.needed]

    @property
    def arrive(self) -> list[int]:
        """How much comes from each member."""
        needed = self.needed[self.index]
        return [stop - start for start, stop in (_shared(h, needed, 0) for h in self.held)]

    @property
    def local(self) -> bool:
        """Whether every member has what it needs; the same on all of them."""
        pairs = zip(self.held, self.needed, strict=True)
        return all(h[0] <= n[0] and n[1] <= h[1] for h, n in pairs)


def _shared(a: Range, b: Range, origin: int) -> Range:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start - origin, stop - origin) if start < stop else (0, 0)


def fetched(tensor: Tensor, routes: Routes, group: Group, comm: Communicator) -> Tensor:
    """What this rank needs, in order; the gradient goes back and is added where it came from."""
    if routes.local:
        start, stop = routes.leave[routes.index]
        return tensor.narrow(routes.dim, start, stop - start)
    whole: Tensor = _Fetch.apply(tensor, routes, group, comm)  # type: ignore[no-untyped-call]
    return whole


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, routes: Routes, group: Group, comm: Communicator
    ) -> Tensor:
        ctx.routes, ctx.group, ctx.comm, ctx.shape = routes, group, comm, tensor.shape
        dim = routes.dim
        chunks = [tensor.narrow(dim, start, stop - start) for start, stop in routes.leave]
        shapes = [_resized(tensor.shape, dim, count) for count in routes.arrive]
        return torch.cat(comm.all_to_all(chunks, shapes, group), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        routes, dim = ctx.routes, ctx.routes.dim
        leave = routes.leave
        shapes = [_resized(ctx.shape, dim, stop - start) for start, stop in leave]
        chunks = torch.split(gradient, routes.arrive, dim)
        parts = ctx.comm.all_to_all(chunks, shapes, ctx.group)
        own = parts[routes.index]
        covers = own.shape == ctx.shape
        if covers:
            total = own.clone(memory_format=torch.contiguous_format)
        else:
            total = gradient.new_zeros(ctx.shape)
        for index, ((start, stop), part) in enumerate(zip(leave, parts, strict=True)):
            if not (covers and index == routes.index):
                total.narrow(dim, start, stop - start).add_(part)
        return total, None, None, None


def _resized(shape: torch.Size, dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
