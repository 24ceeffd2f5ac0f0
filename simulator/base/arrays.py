"""Names of array types, by what they count."""

from __future__ import annotations

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
