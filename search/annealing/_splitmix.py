"""Random numbers for kernels that count no references: SplitMix64 (Steele, Lea and Flood 2014)."""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Words
from stratagem.simulator.base.compiling import uncounted

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11, _32 = (np.uint64(bits) for bits in (30, 27, 31, 11, 32))


def seeded(seed: int) -> Words:
    """The state of a stream of random numbers: [1]."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64).astype(np.uint64)


@uncounted(inner=True)
def next_word(state: Words) -> np.uint64:
    """The next 64 random bits."""
    state[0] += _STEP
    word = state[0]
    word = (word ^ (word >> _30)) * _FIRST
    word = (word ^ (word >> _27)) * _SECOND
    return np.uint64(word ^ (word >> _31))


@uncounted(cache=True)
def random_float(state: Words) -> float:
    """A number from 0 to below 1."""
    return float(np.float64(next_word(state) >> _11) * 2.0**-53)


@uncounted(cache=True)
def random_below(state: Words, bound: int) -> int:
    """A whole number from 0 to below `bound`, which is below 2**31."""
    # As int64: an `int` of Python would be unsigned in numba.
    return np.int64(((next_word(state) >> _32) * np.uint64(bound)) >> _32)  # type: ignore[return-value]
