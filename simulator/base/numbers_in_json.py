"""Numbers as JSON files have them: infinities, which JSON has no name for, and many at once."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import numpy as np

from stratagem.simulator.base.arrays import Ints

_NUMBER = "number"

MOST_PACKED = 2**28
"""Bytes of numbers that one text may hold."""


def packed(numbers: Ints) -> str:
    """Whole numbers in base64: their differences in 64 bits, little end first, by zlib.

    Example:
        >>> unpacked(packed(np.array([5, 7, 7]))).tolist()
        [5, 7, 7]

    Raises:
        ValueError: when there are more than may be read again.
    """
    if 8 * numbers.size > MOST_PACKED:
        raise ValueError(
            f"{numbers.size:,} numbers in one column of a file; at most {MOST_PACKED // 8:,} can "
            "be read again, so save a step of fewer microbatches"
        )
    steps = np.diff(numbers.astype(np.int64), prepend=np.int64(0))
    return base64.b64encode(zlib.compress(steps.astype("<i8").tobytes())).decode()


def unpacked(text: str) -> Ints:
    """The numbers that `packed` wrote.

    Raises:
        ValueError: the text is damaged, or holds more than `MOST_PACKED` bytes.
    """
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(base64.b64decode(text, validate=True), MOST_PACKED)
    except zlib.error as error:
        raise ValueError(f"packed numbers cannot be unpacked: {error}") from error
    if reader.unconsumed_tail:
        raise ValueError(f"packed numbers unpack to more than {MOST_PACKED / 2**20:g} MiB")
    if not reader.eof or len(content) % 8:
        raise ValueError(f"packed numbers end early, after {len(content)} bytes")
    steps = np.frombuffer(content, "<i8").astype(np.int64)
    numbers: Ints = np.cumsum(steps)
    return numbers


def marked(value: Any) -> Any:
    """A value for JSON, in which ``-inf`` becomes ``{"number": "-inf"}``.

    Example:
        >>> marked([1.0, float("inf")])
        [1.0, {'number': 'inf'}]
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if isinstance(value, dict):
        return {key: marked(each) for key, each in value.items()}
    return [marked(each) for each in value] if isinstance(value, list) else value


def unmarked(value: Any) -> Any:
    """The value that `marked` was given."""
    if isinstance(value, dict) and set(value) == {_NUMBER}:
        return float(value[_NUMBER])
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items()}
    return [unmarked(each) for each in value] if isinstance(value, list) else value
