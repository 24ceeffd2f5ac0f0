"""Where the operators of a stage repeat, as layers do, so that few of them are written out.

Whoever writes the tasks or tensors of a stage goes from operator to operator and looks at rows,
edges and segments, each relative to the operator. From one copy of a layer to the next what is
written then changes by the same numbers: places, tasks and indices of operators move on. So a few
copies are written, and where three of them in turn differ alike, the next ones are extrapolated:

    copy      0    1    2    3   │  4  …  n − 2   │  n − 1
              written, 1 to 3    │  extrapolated  │  written, as its neighbours differ
              compared           │                │
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.operators.repeats import Repeat, repeats

Item = TypeVar("Item")

WRITTEN = 4
"""Copies that are written before others are extrapolated; the last three are compared."""
LEAST = 10
"""Fewer copies are all written."""
REACH = 2
"""Operators that a rule may look ahead or back beside those that its edges name (prefetches)."""


def spared_copies(repeat: Repeat, more: int = 0) -> int:
    """How many copies need not be written; at both ends so many `more` are than as a rule."""
    return max(0, repeat.count - WRITTEN - 1 - REACH // repeat.length - 2 * more)


def sparing_repeat(kinds: Iterable[Hashable]) -> Repeat | None:
    """The repeat that spares most items, where items of equal kinds are alike.

    Example:
        >>> sparing_repeat([7, *[1, 2] * 20, 9])
        Repeat(start=1, length=2, count=20)
        >>> sparing_repeat([1, 2, 3]) is None
        True
    """
    found = repeats(kinds, fewest=LEAST)
    return max(found, key=lambda repeat: repeat.length * spared_copies(repeat), default=None)


def extrapolated(columns: Ints, times: int) -> Ints | None:
    """What follows three copies, `times` copies long; None where they do not differ alike.

    Example:
        >>> extrapolated(np.array([[1, 7, 3, 7, 5, 7]]), 2)
        array([[7, 7, 9, 7]])

    Args:
        columns: [rows, 3 · items], the three one after the other.
        times: copies to make.
    """
    first, second, third = np.split(columns, 3, axis=1)
    step = third - second
    if not np.array_equal(second - first, step):
        return None
    by = np.arange(1, times + 1)[:, None]
    found: Ints = (third[:, None, :] + step[:, None, :] * by).reshape(len(columns), -1)
    return found


def copy_length(marks: Sequence[int]) -> int:
    """What each of three copies wrote that lie between four marks; 0 where they do not agree.

    Example:
        >>> copy_length([4, 7, 10, 13]), copy_length([4, 7, 11, 13])
        (3, 0)
    """
    lengths = set(np.diff(marks).tolist())
    return lengths.pop() if len(lengths) == 1 else 0


def sparing(
    items: Sequence[Item],
    repeat: Repeat | None,
    mark: Callable[[], None],
    skip: Callable[[int], bool],
    more: int = 0,
) -> Iterator[Item]:
    """The items one by one, but those of copies that could be skipped.

    Args:
        items: in the order in which they are written.
        repeat: where they repeat.
        mark: called before copies 1, 2, 3 and 4.
        skip: then told how many copies come next; whether it made them.
        more: copies at both ends that differ from those between, beside the first and the last;
            `mark` and `skip` are called so many copies later.
    """
    place = 0
    while place < len(items):
        if repeat is not None and (spared := spared_copies(repeat, more)):
            copy, inside = divmod(place - repeat.start, repeat.length)
            if inside == 0 and 1 <= copy - more <= WRITTEN:
                mark()
                if copy == WRITTEN + more and skip(spared):
                    place += spared * repeat.length
                    repeat = None
                    continue
        yield items[place]
        place += 1
