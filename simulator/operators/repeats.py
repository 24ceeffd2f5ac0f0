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


def repeats(kinds: Iterable[Hashable], *, shortest: int = 1, fewest: int = 2) -> Iterator[Repeat]:
    """Runs of equal consecutive sequences, where items of equal kinds are alike.

    Greedy from the left: at each item the length of a copy that covers most items, the shortest
    among equals.

    Example:
        >>> list(repeats([7, 1, 2, 1, 2, 1, 2, 9, 9]))
        [Repeat(start=1, length=2, count=3), Repeat(start=7, length=1, count=2)]

    Args:
        kinds: of each item.
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
        best = _longest(numbered, start, places[numbered[start]], shortest, fewest)
        if best is not None:
            yield best
        start = start + 1 if best is None else best.stop


def _longest(
    kinds: Sequence[int], start: int, alike: Sequence[int], shortest: int, fewest: int
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
        run = 0
        while run < behind and kinds[start + run] == kinds[place + run]:
            run += 1
        count = run // length + 1
        if count >= fewest and (best is None or count * length > best.count * best.length):
            best = Repeat(start, length, count)
    return best
