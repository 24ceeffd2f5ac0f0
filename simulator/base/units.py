"""Durations, sizes and sets of numbers in words that a person reads."""

from __future__ import annotations

import math
from collections.abc import Iterable


def readable_unit(seconds: float) -> tuple[str, float]:
    """Choose the unit in which a time is read best, and its length in seconds."""
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= length:
            return unit, length
    return "ns", 1e-9


def format_duration(seconds: float) -> str:
    """Write a time as a person would.

    Example:
        >>> format_duration(0.00254)
        '2.54 ms'
    """
    unit, length = readable_unit(seconds)
    value = seconds / length
    decimals = 0 if unit == "ns" else max(0, 2 - int(math.log10(value)))
    return f"{value:,.{decimals}f} {unit}"


def format_bytes(count: float) -> str:
    """Write a number of bytes as a person would.

    Example:
        >>> format_bytes(2.5 * 2**30)
        '2.50 GiB'
    """
    if count >= 2**30:
        value = count / 2**30
        return f"{value:,.{2 if value < 10 else 0}f} GiB"
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"


def format_numbers(numbers: Iterable[int]) -> str:
    """Whole numbers in order, three and more that follow one another by the first and the last.

    Example:
        >>> format_numbers([4, 0, 1, 2, 3, 8, 9])
        '0–4, 8, 9'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
