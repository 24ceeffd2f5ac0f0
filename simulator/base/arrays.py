"""Names of array types, by what they count; arithmetic of one number as of many."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Numbers of things, nanoseconds, bytes."""
Floats = npt.NDArray[np.float64]
"""Seconds, shares, weights."""
Amounts = float | Floats
"""One number or many, wherever the same arithmetic holds of both."""
Flags = npt.NDArray[np.bool_]
"""One yes or no each."""
Records = npt.NDArray[np.void]
"""Numbers that have names, entry by entry: ``records[3].position``, in kernels and outside."""
Indices = npt.NDArray[np.int32]
"""Positions in other arrays, where they are many."""
Words = npt.NDArray[np.uint64]
"""64 random or hashed bits each."""


def record(*names: str) -> np.dtype[np.void]:
    """Numbers of 64 bits by name.

    Example:
        >>> record("begin", "stop").names
        ('begin', 'stop')

    Raises:
        ValueError: a name is that of something else that every entry has.
    """
    for name in names:
        if hasattr(np.record, name):
            raise ValueError(f"record: all entries have another {name!r}: choose another name")
    return np.dtype([(name, np.int64) for name in names], align=True)


def records(shape: int | tuple[int, ...], of: np.dtype[np.void]) -> Records:
    """Entries of zeros.

    Example:
        >>> windows = records(2, record("begin", "stop"))
        >>> windows[1].stop = 7
        >>> windows["stop"].tolist()
        [0, 7]
    """
    return np.zeros(shape, of).view(np.recarray)


def larger(one: Amounts, other: Amounts) -> Amounts:
    """The larger of two numbers, or of each two of many: of numbers quicker than numpy.

    Example:
        >>> larger(2, 3.0), larger(np.array([1.0, 4.0]), 3.0)
        (3.0, array([3., 4.]))
    """
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        found: Floats = np.maximum(one, other)
        return found
    return max(one, other)


def smaller(one: Amounts, other: Amounts) -> Amounts:
    """The smaller of two numbers, or of each two of many.

    Example:
        >>> smaller(2, 3.0)
        2
    """
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        found: Floats = np.minimum(one, other)
        return found
    return min(one, other)


def chosen(condition: Amounts | Flags, one: Amounts, other: Amounts) -> Amounts:
    """One of two numbers by a condition, or of each two of many by conditions.

    Example:
        >>> chosen(True, 2.0, 3.0), chosen(np.array([True, False]), 2.0, 3.0)
        (2.0, array([2., 3.]))
    """
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other


def rounded_up(amounts: Amounts) -> Amounts:
    """A number, or each of many, rounded up.

    Example:
        >>> rounded_up(2.5), rounded_up(np.array([1.5, 3.0]))
        (3, array([2., 3.]))
    """
    if isinstance(amounts, np.ndarray):
        found: Floats = np.ceil(amounts)
        return found
    return math.ceil(amounts)


def rounded(amounts: Amounts) -> Amounts:
    """A number, or each of many, as the whole number that is nearest.

    Example:
        >>> rounded(2.6), rounded(np.array([1.4, 3.0]))
        (3, array([1., 3.]))
    """
    if isinstance(amounts, np.ndarray):
        return np.rint(amounts)
    return round(amounts)
