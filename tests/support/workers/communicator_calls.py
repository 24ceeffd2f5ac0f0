"""Every collective once, with values that say who sent them."""

from __future__ import annotations

import torch

from stratagem.executor.communication.communicator import Communicator


def ramp(*shape: int, dtype: torch.dtype = torch.float32, base: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) + base).reshape(shape).to(dtype)


def uneven(comm: Communicator, group: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of pieces that are one row larger for every next member."""
    return [(1 + i, 3) for i in range(len(group))]


def operations(
    comm: Communicator, group: tuple[int, ...], dtype: torch.dtype
) -> dict[str, object]:
    """What a rank gets from each collective of a group, whose sizes are uneven where they may."""
    n, me = len(group), group.index(comm.rank)
    shapes = uneven(comm, group)
    own = ramp(4, 5, dtype=dtype, base=10 * comm.rank).t()
    pieces = [ramp(*shape, dtype=dtype, base=100 * me + j) for j, shape in enumerate(shapes)]
    columns = [ramp(1 + me, 2 + j, dtype=dtype, base=7 * me + j) for j in range(n)]
    root = group[-1]
    at_root = comm.rank == root
    return {
        "sum": comm.all_reduce(own, group),
        "max": comm.all_reduce(own, group, "max"),
        "all_gather": comm.all_gather(pieces[me], shapes, group),
        "reduce_scatter": comm.reduce_scatter(pieces, group),
        "all_to_all": comm.all_to_all(columns, [(1 + i, 2 + me) for i in range(n)], group),
        "broadcast": comm.broadcast(own if at_root else None, (5, 4), dtype, root, group),
        "reduce": comm.reduce(own, root, group),
        "gather": comm.gather(pieces[me], shapes, root, group),
        "scatter": comm.scatter(pieces if at_root else None, shapes[me], dtype, root, group),
    }


def of_views(comm: Communicator, group: tuple[int, ...], dtype: torch.dtype) -> dict[str, object]:
    """Pieces that are views of one tensor, one of them empty, also going on meanwhile."""
    me = group.index(comm.rank)
    lengths = [2 * i for i in range(len(group))]
    shapes = [(length,) for length in lengths]
    views = torch.split(ramp(sum(lengths), dtype=dtype, base=100 * me), lengths)
    own = ramp(lengths[me], dtype=dtype, base=100 * me)
    return {
        "reduce_scatter of views": comm.reduce_scatter(views, group),
        "later": comm.start_reduce_scatter(views, group).finish(),
        "all_gather with none": comm.all_gather(own, shapes, group),
        "later too": comm.start_all_gather(own, shapes, group).finish(),
        "all_to_all of views": comm.all_to_all(views, [shapes[me]] * len(group), group),
        "unchanged": [view.clone() for view in views],
    }
