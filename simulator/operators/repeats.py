"""Where equal sequences follow one another, such as the layers of a transformer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeat:
    """`count` copies of the same `length` items each, the first item at place `start`."""

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        """The place behind the last item of the last copy."""
        return self.start + self.length * self.count

    def backwards(self, size: int) -> Repeat:
        """The same of `size` items that are gone through from the last to the first."""
        return Repeat(size - self.stop, self.length, self.count)


Reads = Sequence[Sequence[int]]
"""Of each item, the places of those that it reads."""


def repeats(
    kinds: Iterable[Hashable], *, reads: Reads = (), shortest: int = 1, fewest: int = 2
) -> Iterator[Repeat]:
    """Runs of equal consecutive sequences, where items of equal kinds are alike.

    What stands at the same place of all copies also reads alike: each as far before itself, or all
    what is the same for them, before the first copy, as layers read the result of an encoder.

    Greedy from the left: at each item the length of a copy that covers most items, the shortest
    among equals.

    Example:
        >>> list(repeats([7, 1, 2, 1, 2, 1, 2, 9, 9]))
        [Repeat(start=1, length=2, count=3), Repeat(start=7, length=1, count=2)]
        >>> list(repeats([1, 2, 2, 2, 2], reads=[(), (0,), (0,), (0,), (3,)]))
        [Repeat(start=1, length=1, count=3)]

    Args:
        kinds: of each item; those of a kind read as many.
        reads: of each item; nothing if left out.
        shortest: items of a copy, at least.
        fewest: copies, at least; 2 or more.
    """
    numbers: dict[Hashable, int] = {}
    numbered = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    places: list[list[int]] = [[] for _ in numbers]
    for place, number in enumerate(numbered):
        places[number].append(place)
    start = 0
    while start < len(numbered):
        best = _longest(numbered, reads, start, places[numbered[start]], shortest, fewest)
        if best is not None:
            yield best
        start = start + 1 if best is None else best.stop


def _longest(
    kinds: Sequence[int],
    reads: Reads,
    start: int,
    alike: Sequence[int],
    shortest: int,
    fewest: int,
) -> Repeat | None:
    best: Repeat | None = None
    for place in alike[bisect_left(alike, start + shortest) :]:
        length, behind = place - start, len(kinds) - place
        if behind < length * (fewest - 1):
            continue
        if best is not None and len(kinds) - start <= best.length * best.count:
            break
        # A copy's last item differs the soonest where copies are not alike.
        if kinds[place - 1] != kinds[place + length - 1]:
            continue
        run, ways = 0, list[tuple[bool, ...]]()
        while run < behind and kinds[start + run] == kinds[place + run]:
            if reads:
                way = _way(reads, start + run, place + run, start)
                if way is None or (run >= length and way != ways[run - length]):
                    break
                ways.append(way)
            run += 1
        count = run // length + 1
        if count >= fewest and (best is None or count * length > best.count * best.length):
            best = Repeat(start, length, count)
    return best


def _way(reads: Reads, one: int, other: int, start: int) -> tuple[bool, ...] | None:
    """By read of two items whether it is the same for both, before `start`, not as far; or None
    where some is neither."""
    found: list[bool] = []
    for ours, theirs in zip(reads[one], reads[other], strict=True):
        if one - ours != other - theirs and not ours == theirs < start:
            return None
        found.append(ours == theirs)
    return tuple(found)
