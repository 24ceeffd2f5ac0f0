"""One rank's part of one operator, what runs it, and how tensors line up by names of dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from stratagem.simulator.operators.operator import Layout, Operator, factors
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream, Words

AllReduce = Callable[[Tensor, tuple[str, ...], Literal["sum", "max"]], Tensor]
"""Reduces a tensor over the mesh axes that shard any of the named dims.

The backward of a sum is the sum of the gradients; a maximum has no gradient.
"""


Reach = Callable[[int, int], tuple[int, int]]
"""From start and stop of the results along a dim to those of the inputs that they need."""

Fetch = Callable[[Tensor, int, str, Reach], Tensor]
"""Brings an input, along one of its tensor dims, to what the local results along a dim of the
operator need; what is missing comes from the other ranks along the axis that shards it.

The backward adds what each rank's windows give back to where it came from.
"""


class LossKernels(Protocol):
    """Both passes over the logits of a cross entropy, (token, class), however they are made.

    Targets are int64; those that are `ignored` have no class here. Any other that is no class is
    refused, or makes a result that is not a number. Results are in float32, or in float64 for such
    logits. `loss.TorchLosses` runs anywhere.
    """

    def sums(self, rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        """Per token the largest logit M, Σ exp(x − M), and x[target], 0 where it is ignored."""
        ...

    def gradient(
        self,
        rows: Tensor,
        target: Tensor,
        ignored: int,
        largest: Tensor,
        factors: Tensor,
        addends: Tensor,
    ) -> Tensor:
        """exp(x − largest) · factor, plus the addend at the target; in the dtype of the logits."""
        ...


@dataclass(frozen=True)
class FasterKernels:
    """What a device has in place of several operators of torch; None where torch runs them.

    Attributes:
        words: draws the random words of dropout.
        losses: makes both passes over the logits of a cross entropy.
    """

    words: Words | None = None
    losses: LossKernels | None = None


def _nothing_missing(tensor: Tensor, dim: int, loop: str, reach: Reach) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Shards:
    """One rank's part of one operator.

    `bounds` are the start and stop of every dim on this rank; `random` says which random numbers
    are drawn, the same stream on all ranks. `places` has, for the dims of a token slice that count
    positions, the first one and how many there are (see `TokenSlice.places`). `products` is what
    operands of matrix products are rounded to; empty where they are multiplied as they are.
    `losses` may be a faster way over the logits of a cross entropy.
    """

    bounds: Mapping[str, tuple[int, int]]
    all_reduce: AllReduce
    random: RandomStream = field(default_factory=RandomStream)
    fetch: Fetch = _nothing_missing
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    products: str = ""
    losses: LossKernels | None = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each dim on this rank."""
        return {name: stop - start for name, (start, stop) in self.bounds.items()}

    def first(self, dims: Sequence[str]) -> bool:
        """Whether this rank holds index 0 of all `dims`; one of those that share a sum does."""
        return all(self.bounds[name][0] == 0 for name in dims)

    def split(self, operator: Operator, dims: Sequence[str]) -> bool:
        """Whether any of `dims` is not whole on this rank."""
        return any(self.bounds[name] != (0, operator.sizes[name]) for name in dims)


Tensors = Sequence[Tensor]

Run = Callable[[Tensors, Tensors], Tensor]
"""Makes an operator's local output of its inputs and weights."""

Kernel = Callable[[Operator, Shards, Tensors, Tensors], Tensor]
"""Does so of an operator and this rank's shards of it, too."""


@dataclass(frozen=True)
class PreparedKernel:
    """A kernel whose `prepare` gives what runs: the same for every step and microbatch.

    Example:
        >>> twice = PreparedKernel(lambda operator, shards: lambda inputs, weights: 2 * inputs[0])
        >>> twice(operator, shards, [torch.ones(1)], [])  # doctest: +SKIP
        tensor([2.])
    """

    prepare: Callable[[Operator, Shards], Run]

    def __call__(
        self, operator: Operator, shards: Shards, inputs: Tensors, weights: Tensors
    ) -> Tensor:
        """Prepare, and run."""
        return self.prepare(operator, shards)(inputs, weights)


def whole(operator: Operator, products: str = "") -> Shards:
    """The one part of an operator that is not sharded; see `Shards` for `products`.

    Example:
        >>> from stratagem.simulator.operators.operator import Dim, DimKind
        >>> dims = (Dim("sample", 8, DimKind.SAMPLE),)
        >>> whole(Operator("x", "source", dims, (), (), ())).bounds
        {'sample': (0, 8)}
    """
    bounds = {dim.name: (0, dim.size) for dim in operator.dims}
    return Shards(bounds, _alone, products=products)


def _alone(tensor: Tensor, dims: tuple[str, ...], op: Literal["sum", "max"]) -> Tensor:
    return tensor.detach() if op == "max" else tensor


def extent(operator: Operator, shards: Shards, group: Sequence[str]) -> tuple[int, int]:
    """Index of the first and of the last local element of a tensor dim in the whole one."""
    first = last = 0
    for name in group:
        start, stop = shards.bounds[name]
        first = first * operator.sizes[name] + start
        last = last * operator.sizes[name] + stop - 1
    return first, last


def positions(
    operator: Operator, shards: Shards, group: Sequence[str], device: torch.device
) -> Tensor:
    """Where the elements of a local tensor dim, the product of dims `group`, are in the whole one.

    Returns:
        Ascending int64 indices, one per local element.
    """
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for name in group:
        own = torch.arange(*shards.bounds[name], device=device)
        index = (index[:, None] * operator.sizes[name] + own).flatten()
    return index


def look_up(
    ids: Tensor, operator: Operator, shards: Shards, group: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Where this rank holds elements `ids` of a tensor dim, and whether it holds them at all.

    Returns:
        Local indices (0 or another valid one for what is not held) and a bool mask, shaped like
        ids.
    """
    held = positions(operator, shards, group, ids.device)
    index = torch.searchsorted(held, ids.contiguous()).clamp_(max=len(held) - 1)
    return index, held[index] == ids


def place_of(element: int, operator: Operator, shards: Shards, group: Sequence[str]) -> int | None:
    """Where this rank holds one element of a tensor dim, None where it does not.

    It is worked out on the host, which then has nothing to ask a device for.

    Example:
        >>> from stratagem.simulator.operators.operator import Dim, DimKind
        >>> dims = (Dim("a", 3, DimKind.REDUCTION), Dim("b", 4, DimKind.REDUCTION))
        >>> operator = Operator("x", "source", dims, (), (), ())
        >>> right = Shards({"a": (0, 3), "b": (2, 4)}, _alone)
        >>> [place_of(element, operator, right, ("a", "b")) for element in (0, 2, 5, 6)]
        [None, 0, None, 2]
    """
    place, weight = 0, 1
    for name in reversed(group):
        element, index = divmod(element, operator.sizes[name])
        start, stop = shards.bounds[name]
        if not start <= index < stop:
            return None
        place += weight * (index - start)
        weight *= stop - start
    return place


def is_unlike(layout: Layout, target: Layout) -> bool:
    """Whether a tensor of `layout` does not broadcast against one of `target` as it is."""
    if len(layout) > len(target):
        return True
    last = target[len(target) - len(layout) :]
    return not all(own in ((), wanted) for own, wanted in zip(layout, last, strict=True))


def aligned(tensor: Tensor, layout: Layout, target: Layout, sizes: Mapping[str, int]) -> Tensor:
    """A tensor of `layout` seen with the dims of `target`, so that it broadcasts against such.

    Example:
        >>> keys = torch.ones(2, 5)
        >>> heads = aligned(keys, (("kv",), ("e",)), (("kv", "group"), ("e",)),
        ...                 {"kv": 2, "group": 3, "e": 5})
        >>> tuple(heads.shape)
        (6, 5)

    Tensor dims of `target` of which `layout` has nothing get size 1; of those of which it has some
    factors, the other factors are repeated. `layout` may have fewer tensor dims, which are the
    last, or more, which then are of size 1.
    """
    if not is_unlike(layout, target):
        return tensor
    have, wanted = factors(layout), factors(target)
    tensor = tensor.reshape([sizes[name] for name in have])
    tensor = tensor.permute([have.index(name) for name in wanted if name in have])
    tensor = tensor.reshape([sizes[name] if name in have else 1 for name in wanted])
    shown = [group if any(name in have for name in group) else () for group in target]
    seen = set(factors(tuple(shown)))
    tensor = tensor.expand([sizes[name] if name in seen else 1 for name in wanted])
    return tensor.reshape([math.prod(sizes[name] for name in group) for group in shown])
