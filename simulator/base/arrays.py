"""Names of array types, by what they count."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Numbers of things, nanoseconds, bytes."""
Floats = npt.NDArray[np.float64]
"""Seconds, shares, weights."""
Flags = npt.NDArray[np.bool_]
"""One yes or no each."""
Indices = npt.NDArray[np.int32]
"""Positions in other arrays, where they are many."""
Words = npt.NDArray[np.uint64]
"""64 random or hashed bits each."""
