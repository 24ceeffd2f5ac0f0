"""Which dims of calls may be split: guessed from sizes, and confirmed on small tensors.

A *place* is a factor of a dim of an operand. A *tie* says that some places, at most one of each
operand, are one loop, and where the result has it:

    gather(x (8, 5), 1, index (8, 3))      x.0 ─ index.0 ─ result.0      index.1 ─ result.1

First dims are made as small as torch allows, without computing. Then every guess is tried: the
calls run on the whole operands and on parts of them, and results and gradients are compared. Parts
are uneven, and one partition takes every other index, so that what passes does not look at order.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stratagem.simulator.torch_ops.generic.calls import Call
from stratagem.simulator.torch_ops.generic.recurrences import is_recurrence, recurrence_of
from stratagem.simulator.torch_ops.generic.trials import (
    FactorPlace,
    Mode,
    OperandShape,
    Sizes,
    Target,
    Trial,
)

SMALL = (4, 6, 8, 12, 16)
"""Sizes to which dims are cut for trials, the first that torch takes."""

MOST_GUESSES = 128
"""Guesses about one place."""


class Tie(NamedTuple):
    """Places that are one loop, which is free to split.

    Attributes:
        places: at most one of each operand.
        size: of the loop.
        target: where the result has it; None if it is summed over.
        mode: what the results of parts are to the whole.
    """

    places: tuple[FactorPlace, ...]
    size: int
    target: Target | None
    mode: Mode


def find_ties(
    calls: Sequence[Call], operands: Sequence[OperandShape], shape: Sequence[int]
) -> tuple[Tie, ...]:
    """The ties that passed every trial.

    Example:
        >>> flip = [["aten::flip.default", [["in", 0], [1]], {}]]
        >>> x = OperandShape(((8,), (3,)), "float32")
        >>> [tie.places for tie in find_ties(flip, [x], (8, 3))]
        [(FactorPlace(operand=0, dim=0, leaf=0),)]

    Args:
        calls: see `torch_ops.generic.calls`; all operands are called ``["in", i]``.
        operands: their shapes, with the factors of every dim.
        shape: of the result.
    """
    return _found(json.dumps(list(calls)), tuple(operands), tuple(shape))


@functools.lru_cache(4096)
def _found(
    written: str, operands: tuple[OperandShape, ...], shape: tuple[int, ...]
) -> tuple[Tie, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Search(json.loads(written), operands, shape).ties()


@dataclass(frozen=True)
class _Guess:
    places: tuple[FactorPlace, ...]
    target: Target | None


class _Search:
    def __init__(
        self, calls: list[Call], operands: tuple[OperandShape, ...], shape: tuple[int, ...]
    ) -> None:
        self._calls = calls
        self._operands = operands
        self._shape = shape
        self._trial = Trial(calls, operands)
        self._whole: Sizes = {
            FactorPlace(k, dim, leaf): size
            for k, operand in enumerate(operands)
            for dim, leaves in enumerate(operand.dims)
            for leaf, size in enumerate(leaves)
        }

    def ties(self) -> tuple[Tie, ...]:
        if is_recurrence(self._calls):
            return self._samples_of_recurrence()
        begun = self._begun()
        if begun is None:
            return ()
        sizes, shape = begun
        found: list[Tie] = []
        for place in self._whole:
            if any(place in tie.places for tie in found):
                continue
            for guess in self._guesses(place, [p for tie in found for p in tie.places], sizes):
                target = guess.target and self._scaled(guess.target, place, sizes, shape)
                mode = self._trial.confirms(guess.places, target)
                if mode is not None:
                    found.append(Tie(guess.places, self._whole[place], guess.target, mode))
                    break
        return _nested(found, self._shape)

    def _samples_of_recurrence(self) -> tuple[Tie, ...]:
        known = recurrence_of(self._calls, self._operands, self._shape)
        if known is None or not self._trial.begin(known.sizes, known.shape):
            return ()
        mode = self._trial.confirms(known.places, known.target)
        if mode is not Mode.EACH:
            return ()
        return (Tie(known.places, self._whole[known.places[0]], known.target, mode),)

    def _begun(self) -> tuple[Sizes, tuple[int, ...]] | None:
        """The sizes that trials run on: small ones, as far as torch can compute with them."""
        for kept in ((), *((place,) for place in self._whole), tuple(self._whole)):
            sizes, shape = self._shrunk(kept)
            if self._trial.begin(sizes, shape):
                return sizes, shape
        return None

    def _shrunk(self, kept: Sequence[FactorPlace] = ()) -> tuple[Sizes, tuple[int, ...]]:
        """Sizes of all places for trials, where those `kept` stay, and their result's shape."""
        sizes, shape = dict(self._whole), self._shape
        done: set[FactorPlace] = set(kept)
        for place in self._whole:
            if place in done or sizes[place] <= SMALL[0]:
                continue
            for small in (each for each in SMALL if each < sizes[place]):
                smaller = self._smaller(place, small, sizes, shape, done)
                if smaller is not None:
                    sizes, shape, changed = smaller
                    done.update(changed)
                    break
        return sizes, shape

    def _smaller(
        self,
        place: FactorPlace,
        small: int,
        sizes: Sizes,
        shape: tuple[int, ...],
        done: set[FactorPlace],
    ) -> tuple[Sizes, tuple[int, ...], tuple[FactorPlace, ...]] | None:
        for places in self._sets(place, done, sizes):
            changed = {**sizes, **dict.fromkeys(places, small)}
            for expected in self._shapes(shape, sizes[place], small):
                if self._trial.shape(changed, expected) == expected:
                    return changed, expected, places
            if not self._trial.told_shape:
                made = self._trial.shape(changed, ())
                if made is not None and len(made) == len(shape):
                    return changed, made, places
        return None

    def _shapes(self, shape: tuple[int, ...], size: int, small: int) -> Iterator[tuple[int, ...]]:
        """The shapes that the result may have when a dim gets smaller."""
        for at, whole in enumerate(shape):
            if whole % size == 0:
                yield (*shape[:at], whole // size * small, *shape[at + 1 :])
        yield shape

    def _sets(
        self, place: FactorPlace, taken: Sequence[FactorPlace] | set[FactorPlace], sizes: Sizes
    ) -> Iterator[tuple[FactorPlace, ...]]:
        """Places that may be one loop with `place`: those of most operands first."""
        alike: list[list[FactorPlace | None]] = []
        for k in range(len(self._operands)):
            if k == place.operand:
                continue
            fitting: list[FactorPlace | None] = [
                other
                for other in self._whole
                if other.operand == k
                and other not in taken
                and self._whole[other] == self._whole[place]
                and sizes[other] == sizes[place]
            ]
            if fitting:
                alike.append([*fitting, None])
        chosen = list(itertools.islice(itertools.product(*alike), MOST_GUESSES))
        chosen.sort(key=lambda each: each.count(None))
        for others in chosen:
            yield (place, *(other for other in others if other is not None))

    def _guesses(
        self, place: FactorPlace, taken: Sequence[FactorPlace], sizes: Sizes
    ) -> Iterator[_Guess]:
        size = self._whole[place]
        leaves = self._operands[place.operand].dims[place.dim]
        before = math.prod(leaves[: place.leaf])
        for places in self._sets(place, taken, sizes):
            for at, whole in enumerate(self._shape):
                if whole % size == 0:
                    outers = dict.fromkeys(
                        outer
                        for outer in (before, 1, whole // size)
                        if whole % (outer * size) == 0
                    )
                    for outer in outers:
                        yield _Guess(places, Target(at, outer))
            yield _Guess(places, None)

    def _scaled(
        self, target: Target, place: FactorPlace, sizes: Sizes, shape: tuple[int, ...]
    ) -> Target | None:
        """A target among the sizes of trials."""
        if target.outer == 1:
            return target
        leaves = self._operands[place.operand].dims[place.dim]
        if target.outer == math.prod(leaves[: place.leaf]):
            before = [FactorPlace(place.operand, place.dim, leaf) for leaf in range(place.leaf)]
            return Target(target.dim, math.prod(sizes[each] for each in before))
        return Target(target.dim, max(1, shape[target.dim] // sizes[place]))


def _nested(ties: Sequence[Tie], shape: Sequence[int]) -> tuple[Tie, ...]:
    """The ties whose factors of a dim of the result lie side by side."""
    kept: list[Tie] = [tie for tie in ties if tie.target is None]
    for dim in range(len(shape)):
        behind = 1
        for outer, tie in _factors(ties, dim):
            if outer % behind == 0:
                behind = outer * tie.size
                kept.append(tie)
    return tuple(tie for tie in ties if tie in kept)


def _factors(ties: Sequence[Tie], dim: int) -> list[tuple[int, Tie]]:
    """The ties that a dim of the result has, each behind the product of the factors outside it."""
    targets = ((tie.target, tie) for tie in ties)
    here = [(at.outer, tie) for at, tie in targets if at is not None and at.dim == dim]
    return sorted(here, key=lambda each: each[0])


def factors_of_result(
    ties: Sequence[Tie], shape: Sequence[int]
) -> list[list[tuple[int, Tie | None]]]:
    """Per dim of the result the sizes of its factors, outermost first, and the ties of those."""
    made: list[list[tuple[int, Tie | None]]] = []
    for dim, size in enumerate(shape):
        factors: list[tuple[int, Tie | None]] = []
        behind = 1
        for outer, tie in _factors(ties, dim):
            factors += [(outer // behind, None), (tie.size, tie)]
            behind = outer * tie.size
        factors.append((size // behind, None))
        made.append([(each, tie) for each, tie in factors if each > 1])
    return made
