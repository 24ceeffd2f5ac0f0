"""What one mesh axis does to a tensor or an operator, and what that does to its tensors.

A *config* gives an operator one placement per mesh axis, over its own dims: `Shard("head")`,
`Replicate()` or `Pin(0)`. The placements of its tensors follow by rule; there `Shard` counts the
tensor's factors, because producer and consumer name their dims differently.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stratagem.simulator.operators.kinds.norms import LOCAL
from stratagem.simulator.operators.operator import (
    Dim,
    DimKind,
    Input,
    Layout,
    Operator,
    Output,
    Weight,
    factors,
)


@dataclass(frozen=True, order=True)
class Shard:
    """Split along a dim: a dim's name in a config, a factor's position in a tensor placement."""

    dim: str | int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, order=True)
class Replicate:
    """The same on every index of the axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, order=True)
class Partial:
    """Every index of the axis holds an addend; the tensor is their sum."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, order=True)
class Pin:
    """Lives on one index of the axis only."""

    index: int

    def __str__(self) -> str:
        return f"Pin({self.index})"


@dataclass(frozen=True, order=True)
class Flat:
    """A range of the elements that the axes which shard leave here (ZeRO); see `tensor_parts`."""

    def __str__(self) -> str:
        return "F"


Placement = Shard | Replicate | Partial | Pin | Flat
Config = tuple[Placement, ...]
"""Per mesh axis what it does to an operator: `Shard(dim name)`, `Replicate()` or `Pin(index)`."""
Placements = tuple[Placement, ...]
"""Per mesh axis what it does to a tensor: any placement, `Shard` counting factors."""

REPLICATE = Replicate()
PARTIAL = Partial()
FLAT = Flat()
_PRINTED = re.compile(r"^(?:R|P|S\((?P<dim>[^()]+)\)|Pin\((?P<pin>\d+)\))$")


def parse_placement(text: str) -> Placement:
    """Read back a printed placement.

    Example:
        >>> parse_placement("S(head)")
        Shard(dim='head')

    Raises:
        ValueError: when `text` is not ``R``, ``P``, ``S(dim)`` or ``Pin(index)``.
    """
    match = _PRINTED.match(text)
    if match is None:
        raise ValueError(f"placement {text!r} is none of R, P, S(dim), Pin(index)")
    if match["dim"] is not None:
        return Shard(match["dim"])
    if match["pin"] is not None:
        return Pin(int(match["pin"]))
    return REPLICATE if text == "R" else PARTIAL


def check_config(operator: Operator, config: Config, shape: Sequence[int]) -> None:
    """Refuse a config that an operator cannot have on a mesh of `shape`.

    Raises:
        ValueError: the number of placements is not the number of axes; one is Partial or Flat; a
            dim is unknown, must be whole, or has too few elements for its shards; a Pin is beyond
            its axis; a batch norm with statistics of its own has one value of a channel.
    """
    if len(config) != len(shape):
        raise ValueError(
            f"{_named(operator)}: {len(config)} placements for a mesh of {len(shape)} axes"
        )
    for axis, (placement, size) in enumerate(zip(config, shape, strict=True)):
        if isinstance(placement, Shard):
            _check_shard(operator, operator.dim(str(placement.dim)), config, shape)
        elif isinstance(placement, Pin) and not 0 <= placement.index < size:
            raise ValueError(
                f"{_named(operator)}: Pin({placement.index}) on axis {axis}, which has size {size}"
            )
        elif isinstance(placement, Partial):
            raise ValueError(
                f"{_named(operator)}: a config cannot be Partial (axis {axis}); outputs become so"
            )
        elif isinstance(placement, Flat):
            raise ValueError(
                f"{_named(operator)}: a config cannot be Flat (axis {axis}); give it a ZeRO stage"
            )

    if not statistics_fit(operator, config, shape):
        raise ValueError(
            f"{_named(operator)}: with statistics of its own a device needs at least 2 values of "
            "a channel, and the smallest shard has 1: use fewer devices, larger microbatches or "
            "shared statistics"
        )


def statistics_fit(operator: Operator, config: Config, shape: Sequence[int]) -> bool:
    """Whether every device can take the mean and variance that it normalises by."""
    if not operator.attributes.get(LOCAL):
        return True
    channel = factors(operator.weights[0].layout)
    values = 1
    for dim in operator.dims:
        if dim.name not in channel:
            own = dim.kind is DimKind.SAMPLE
            splits = splits_of(config, dim.name, shape) if own else []
            values *= smallest_shard(dim.size, splits)
    return values > 1


def _named(operator: Operator, dim: Dim | None = None) -> str:
    name = f"operator {operator.name!r} ({operator.kind})"
    return name if dim is None else f"{name}: dim {dim.name!r} of size {dim.size}"


def _check_shard(operator: Operator, dim: Dim, config: Config, shape: Sequence[int]) -> None:
    if dim.whole:
        raise ValueError(f"{_named(operator, dim)} cannot be split: {dim.whole}")
    if smallest_shard(dim.size, splits_of(config, dim.name, shape)) < 1:
        ways = math.prod(splits_of(config, dim.name, shape))
        raise ValueError(
            f"{_named(operator, dim)} cannot be split {ways} ways without an empty shard"
        )
    if dim.name in operator.windows:
        _check_window(operator, dim, config, shape)


def _check_window(operator: Operator, dim: Dim, config: Config, shape: Sequence[int]) -> None:
    if _window_fits(operator, dim.name, config, shape):
        return
    where = _named(operator, dim)
    splits = splits_of(config, dim.name, shape)
    if len(splits) > 1:
        raise ValueError(
            f"{where} is split by {len(splits)} axes; halos are exchanged along one axis only, so "
            "shard it on one of them"
        )
    inside = operator.dim(operator.windows[dim.name])
    raise ValueError(
        f"{where} cannot be split {splits[0]} ways: a shard of {inside.name!r} of size "
        f"{inside.size}, over which it slides, would be empty"
    )


def windows_fit(operator: Operator, config: Config, shape: Sequence[int]) -> bool:
    """Whether what slides over inputs is split along one axis each, which leaves none empty."""
    return all(_window_fits(operator, loop, config, shape) for loop in operator.windows)


def _window_fits(operator: Operator, loop: str, config: Config, shape: Sequence[int]) -> bool:
    splits = splits_of(config, loop, shape)
    inside = operator.sizes[operator.windows[loop]]
    return len(splits) < 2 and smallest_shard(inside, splits) > 0


def splits_of(placements: Sequence[Placement], dim: str | int, shape: Sequence[int]) -> list[int]:
    """Sizes of the mesh axes that shard `dim`, outermost first."""
    return [n for p, n in zip(placements, shape, strict=True) if type(p) is Shard and p.dim == dim]


@functools.lru_cache(maxsize=100_000)
def shards_between(size: int, splits: tuple[int, ...]) -> tuple[int, int]:
    """Numbers of elements of the smallest and the largest shard.

    Example:
        >>> shards_between(10, (4,)), shards_between(5, (4,))
        ((1, 3), (0, 2))
    """
    return smallest_shard(size, splits), largest_shard(size, splits)


def largest_shard(size: int, splits: Sequence[int]) -> int:
    """Number of elements of the largest shard."""
    for ways in splits:
        size = -(-size // ways)
    return size


def smallest_shard(size: int, splits: Sequence[int]) -> int:
    """Number of elements of the smallest shard; 0 when some shard is empty."""
    if size < 1 or not splits:
        return max(size, 0)
    chunk = -(-size // splits[0])
    last = size - (splits[0] - 1) * chunk
    return min(smallest_shard(chunk, splits[1:]), smallest_shard(last, splits[1:]))


def local_sizes(operator: Operator, config: Config, shape: Sequence[int]) -> dict[str, int]:
    """Size of each dim on the device with the most work."""
    sizes, cut = dict(operator.sizes), operator.cut_by
    for placement, ways in zip(config, shape, strict=True):
        if type(placement) is Shard:
            for dim in cut.get(str(placement.dim), ()):
                sizes[dim] = -(-sizes[dim] // ways)
    return sizes


def split_with(operator: Operator, dim: str) -> str:
    """The dim whose sharding shards `dim`: itself, or what slides over it (see `image_splits`)."""
    return next((by for by, dims in operator.cut_by.items() if dim in dims), dim)


@functools.cache
def _shard(factor: int) -> Shard:
    """Made once: this is asked for millions of times."""
    return Shard(factor)


def _place(
    layout: Layout, config: Config, absent: Placement, windows: Iterable[tuple[str, str]] = ()
) -> Placements:
    """Shard the factors that `layout` has; where a sharded dim is missing, `absent`.

    What slides over a dim of `layout` shards that one.
    """
    positions = {name: position for position, name in enumerate(factors(layout))}
    positions |= {loop: positions[inside] for loop, inside in windows}
    placed: list[Placement] = []
    for placement in config:
        if isinstance(placement, Shard):
            position = positions.get(str(placement.dim))
            placed.append(absent if position is None else _shard(position))
        else:
            placed.append(placement)
    return tuple(placed)


def output_placements(output: Output, config: Config) -> Placements:
    """How an output lies: sharding a dim that it lacks leaves a pending sum."""
    return _place(output.layout, config, PARTIAL)


def output_gradient_placements(output: Output, config: Config) -> Placements:
    """How the gradient of an output must lie: that of a pending sum is the same everywhere."""
    return _place(output.layout, config, REPLICATE)


def _through_view(read: Input, placements: Placements) -> Placements:
    """From the factors of the consumer's layout to those of the source tensor."""
    return tuple(_shard(read.order[int(p.dim)]) if isinstance(p, Shard) else p for p in placements)


def input_placements(read: Input, config: Config) -> Placements:
    """How an input must lie, counted in the factors of its source."""
    return _through_view(read, _place(read.layout, config, REPLICATE, read.windows))


def input_gradient_placements(read: Input, config: Config) -> Placements:
    """How the gradient of an input comes out, counted in the factors of its source."""
    return _through_view(read, _place(read.layout, config, PARTIAL, read.windows))


def weight_placements(weight: Weight, config: Config) -> Placements:
    """How a parameter must lie where an operator uses it."""
    return _place(weight.layout, config, REPLICATE)


def weight_gradient_placements(weight: Weight, config: Config) -> Placements:
    """How a parameter's gradient comes out: Partial on axes that shard a dim which it lacks."""
    return _place(weight.layout, config, PARTIAL)


def flat_axes(placements: Placements) -> tuple[int, ...]:
    """The axes on which a tensor is flat, the one that cuts first in front (see
    `tensor_parts`).
    """
    return tuple(i for i in reversed(range(len(placements))) if type(placements[i]) is Flat)


def local_elements(sizes: Sequence[int], placements: Placements, shape: Sequence[int]) -> int:
    """Elements of the largest part of a tensor whose factors have `sizes`."""
    left = list(sizes)
    for placement, ways in zip(placements, shape, strict=True):
        if type(placement) is Shard:
            factor = int(placement.dim)
            left[factor] = -(-left[factor] // ways)
    return largest_shard(math.prod(left), [shape[axis] for axis in flat_axes(placements)])
