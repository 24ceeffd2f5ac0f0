"""Many whole numbers as a short text in a JSON file."""

from __future__ import annotations

import base64
import zlib

import numpy as np

from stratagem.simulator.base.arrays import Ints

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
