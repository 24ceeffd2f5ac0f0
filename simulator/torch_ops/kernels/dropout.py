"""Dropout and random numbers that do not depend on the plan.

Which elements are dropped, and what is drawn, is a function of the plan's seed, the operator, the
training step and the element's index in the tensor of the *whole batch*, so that every sharding
and every number of microbatches and token slices draws the same. It is not what torch's own
generator would draw: that one numbers the elements that a device happens to have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stratagem.simulator.operators.operator import DimKind, Layout, Operator, factors, shape_of
from stratagem.simulator.operators.step_programs import DRAWING, references
from stratagem.simulator.torch_ops.kernels.randomness import WORD_VALUES, words
from stratagem.simulator.torch_ops.kernels.shards import Shards

_LOST_BITS = 9


def dropout(x: Tensor, p: float, dropped: Tensor) -> Tensor:
    """Zeros where dropped, else x / (1 − p); keeps the mask, a byte an element, for backward."""
    if p >= 1:
        return x * 0.0
    return (x * (1 / (1 - p))).masked_fill(dropped, 0.0)


def drop_mask(
    operator: Operator, shards: Shards, layout: Layout, p: float, place: int, device: torch.device
) -> Tensor:
    """Which local elements of a tensor of `layout` are dropped, each with probability p.

    Args:
        layout: of dims of the operator.
        place: tells several dropouts of one operator apart.

    Returns:
        Bool, in the local shape of `layout`.
    """
    return is_dropped(_words_of(operator, shards, layout, place, device), p)


def is_dropped(drawn: Tensor, p: float) -> Tensor:
    """Which elements are dropped, of words that were drawn for them."""
    return drawn < round(p * WORD_VALUES)


def uniform(drawn: Tensor, like: Tensor) -> Tensor:
    """Numbers between 0 and 1, neither of which is drawn, of words.

    They have 23 bits, so that float32 holds each of them and its distance from 1.
    """
    return _unit(drawn).to(like.dtype)


def normal(drawn: Tensor, like: Tensor) -> Tensor:
    """Numbers of the normal distribution, by the inverse of its distribution function."""
    return (math.sqrt(2.0) * torch.erfinv(2.0 * _unit(drawn) - 1.0)).to(like.dtype)


def _unit(drawn: Tensor) -> Tensor:
    return ((drawn >> _LOST_BITS).double() + 0.5) / (WORD_VALUES >> _LOST_BITS)


def _words_of(
    operator: Operator, shards: Shards, layout: Layout, place: int, device: torch.device
) -> Tensor:
    """A word for each local element of a tensor of `layout`."""
    *outer, last = factors(layout) or ("",)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for name in outer:
        start, stop, size = _span(operator, shards, name)
        own = torch.arange(start, stop, device=device)
        rows = (rows[:, None] * size + own).flatten()
    start, stop, _ = _span(operator, shards, last) if last else (0, 1, 1)
    stream = shards.random
    draw = stream.draw or words
    drawn = draw(rows, start, stop, stream.step, stream.key(operator.name, place))
    return drawn.reshape(shape_of(layout, shards.sizes))


def _span(operator: Operator, shards: Shards, name: str) -> tuple[int, int, int]:
    """Start, stop and size of a dim in the whole batch."""
    start, stop = shards.bounds[name]
    size = operator.sizes[name]
    if name in shards.places:
        first, total = shards.places[name]
        return first + start, first + stop, total
    if operator.dim(name).kind is not DimKind.SAMPLE:
        return start, stop, size
    before = shards.random.microbatch * size
    return before + start, before + stop, size * shards.random.num_microbatches


def step_words(operator: Operator, shards: Shards, device: torch.device) -> Iterator[Tensor]:
    """Words for each step of an elementwise chain that draws random numbers, in order.

    A step's tensor has the dims of the operands that it was made of; those of the output that it
    lacks have size 1.
    """
    target = operator.outputs[0].layout
    made: list[set[str]] = []
    for place, (function, arguments) in enumerate(operator.attributes["steps"]):
        made.append(set().union(*(_dims_of(operator, made, *r) for r in references(arguments))))
        if function in DRAWING:
            shared = arguments[2:]
            alone = len(target) - (shared[0] if shared else 0)
            layout = tuple(
                group if i < alone and made[place].intersection(group) else ()
                for i, group in enumerate(target)
            )
            yield _words_of(operator, shards, layout, place, device)


def _dims_of(operator: Operator, made: list[set[str]], kind: str, number: int) -> set[str]:
    if kind == "step":
        return made[number]
    read = operator.inputs[number] if kind == "in" else operator.weights[number]
    return set(factors(read.layout))
