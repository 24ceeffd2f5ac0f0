"""A rank's part of an operator on a mesh, and the collectives inside operators."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import Communicator, Group
from stratagem.executor.resharding.halo_exchange import Routes, fetched
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.graph.placement import Config, Shard, split_with
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.sliding_windows import shard_bounds
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.shards import Reach, Shards


def operator_shards(
    operator: Operator, config: Config, seat: Seat, comm: Communicator, random: RandomStream
) -> Shards:
    """What `seat` has of an operator under `config`.

    The all-reduce of the result runs over the axes that shard any of the dims it is given, one
    axis after the other; all ranks along them call it in the same order.
    """
    bounds = {}
    for dim in operator.dims:
        wanted = Shard(split_with(operator, dim.name))
        axes = [axis for axis, placement in enumerate(config) if placement == wanted]
        bounds[dim.name] = shard_bounds(
            dim.size,
            [seat.mesh.shape[axis] for axis in axes],
            [seat.coordinates[axis] for axis in axes],
        )

    def all_reduce(tensor: Tensor, dims: tuple[str, ...], op: Literal["sum", "max"]) -> Tensor:
        wanted = {Shard(name) for name in dims}
        for axis, placement in enumerate(config):
            if placement in wanted and seat.mesh.shape[axis] > 1:
                group = seat.group(axis)
                if op == "sum":
                    tensor = sum_over(tensor, group, comm)
                else:
                    tensor = comm.all_reduce(tensor.detach(), group, "max")
        return tensor

    def fetch(tensor: Tensor, dim: int, loop: str, reach: Reach) -> Tensor:
        axis = config.index(Shard(loop))
        ways = range(seat.mesh.shape[axis])
        whole = operator.sizes[operator.windows[loop]]
        held = [shard_bounds(whole, [len(ways)], [i]) for i in ways]
        needed = [reach(*shard_bounds(operator.sizes[loop], [len(ways)], [i])) for i in ways]
        routes = Routes(dim, held, needed, seat.coordinates[axis])
        return fetched(tensor, routes, seat.group(axis), comm)

    return Shards(bounds, all_reduce, random, fetch)


def sum_over(tensor: Tensor, group: Group, comm: Communicator) -> Tensor:
    """The sum of the members' tensors; the gradient is the sum of the members' gradients."""
    total: Tensor = _SumOver.apply(tensor, group, comm)  # type: ignore[no-untyped-call]
    return total


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, comm: Communicator) -> Tensor:
        ctx.group, ctx.comm = group, comm
        return comm.all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(gradient, ctx.group), None, None
