"""What a step does with its gradients before it updates: their norm, and cutting them to it.

Few kernels work on many tensors at a time, since each costs the host as much as a layer's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import Communicator

T = TypeVar("T")

HANDFUL_BYTES = 2**26
"""Of gradients that are worked on at a time: what is made of them is in memory meanwhile."""


class GradientChange(NamedTuple):
    """A parameter that is to be changed in place by its gradient; a `copy` of it follows."""

    name: str
    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None = None


def sum_of_powers(gradients: Sequence[Tensor], device: torch.device, order: float = 2.0) -> Tensor:
    """Of the sizes of all their elements, a number of float64; with order infinity the largest.

    Example:
        >>> given = [torch.tensor([3.0]), torch.tensor([-4.0, 0.0])]
        >>> sum_of_powers(given, torch.device("cpu"))
        tensor(25., dtype=torch.float64)
        >>> sum_of_powers(given, torch.device("cpu"), math.inf)
        tensor(4., dtype=torch.float64)
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for each in _alike((g for g in gradients if g.numel()), lambda gradient: gradient.dtype):
        widest = torch.promote_types(each[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(each, order, dtype=widest)).double()
        if math.isinf(order):
            total = torch.maximum(total, norms.max())
        else:
            total += (norms.square() if order == 2 else norms.pow(order)).sum()
    return total


def norm_of_all(comm: Communicator, powers: Tensor, order: float) -> Tensor:
    """The norm of gradients of which every rank has a part.

    The largest of all ranks is found by a sum over places of their own, as what reduces to a
    maximum may lose what is not a number.

    Args:
        comm: with all ranks, that have powers alike.
        powers: `sum_of_powers` of this rank's part.
        order: of the norm.
    """
    everyone = tuple(range(comm.world_size))
    if not math.isinf(order):
        total = comm.all_reduce(powers, everyone)
        return total.sqrt() if order == 2 else total.pow(1 / order)
    places = torch.zeros(comm.world_size, dtype=powers.dtype, device=powers.device)
    places[comm.rank] = powers
    return comm.all_reduce(places, everyone).max()


def clipped(gradients: Sequence[Tensor], norm: Tensor, longest: float) -> list[Tensor]:
    """Gradients, shorter where the `norm` of all gradients of the model is above `longest`.

    The formula of `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013, arXiv 1211.5063); no
    value is read back, so that a device is not waited for.

    Example:
        >>> clipped([torch.tensor([3.0, 4.0])], torch.tensor(5.0), 1.0)
        [tensor([0.6000, 0.8000])]
    """
    return list(torch._foreach_mul(list(gradients), clip_scale(norm, longest)))


def clip_scale(norm: Tensor, longest: float) -> Tensor:
    """What gradients are multiplied by, to be no longer than `longest` together.

    Example:
        >>> clip_scale(torch.tensor(4.0), 2.0)
        tensor(0.5000)
    """
    return (longest / (norm + 1e-6)).clamp(max=1.0)


def handfuls(changes: Sequence[GradientChange]) -> Iterator[list[GradientChange]]:
    """Changes in their order, as many at a time as have `HANDFUL_BYTES` of gradients, or one."""
    taken: list[GradientChange] = []
    nbytes = 0
    for change in changes:
        size = change.gradient.nbytes
        if taken and nbytes + size > HANDFUL_BYTES:
            yield taken
            taken, nbytes = [], 0
        taken.append(change)
        nbytes += size
    if taken:
        yield taken


def by_dtype(changes: Sequence[GradientChange]) -> Iterable[list[GradientChange]]:
    """Changes of parameters of one dtype at a time, which kernels can work on together."""
    return _alike(changes, lambda change: change.parameter.dtype)


def _alike(things: Iterable[T], dtype_of: Callable[[T], torch.dtype]) -> Iterable[list[T]]:
    """Things in lists of one dtype, in the order in which dtypes first come."""
    found: dict[torch.dtype, list[T]] = defaultdict(list)
    for thing in things:
        found[dtype_of(thing)].append(thing)
    return found.values()
