"""Random numbers by counter: each is a function of a key and a place, so any rank can draw it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
WORD_VALUES = 1 << 32
"""How many values a word has."""


Words = Callable[[Tensor, int, int, int, tuple[int, int]], Tensor]
"""What draws words for places, see `words`."""


@dataclass
class RandomStream:
    """Which random numbers operators draw: those of a seed, a training step and a microbatch.

    The executor moves `step` and `microbatch` on; what is computed again for backward has those of
    its first time, and so draws the same numbers. `draw` may be a faster way to the same words.
    """

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    num_microbatches: int = 1
    draw: Words | None = None

    def key(self, *names: object) -> tuple[int, int]:
        """Two words that differ for other names and other seeds, the same on every machine.

        Example:
            >>> RandomStream(1).key("a") == RandomStream(1).key("a") != RandomStream(2).key("a")
            True
        """
        text = repr((self.seed, *names)).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return digest & _WORD, digest >> 32


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox 4×32-10 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3).

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

    Args:
        counter: four int64 tensors of words from 0 to 2³² − 1 that broadcast.
        key: two such words.

    Returns:
        Four tensors of such words. Words are held in int64 because torch multiplies no others on
        every device; a product of two wraps into the sign, which the masks undo.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = (_high(right) ^ b) ^ first, (_high(left) ^ d) ^ second
        b, d = right & _WORD, left & _WORD
        first, second = (first + _KEY_STEPS[0]) & _WORD, (second + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _WORD


def words(rows: Tensor, start: int, stop: int, step: int, key: tuple[int, int]) -> Tensor:
    """One word for each place (row, column), columns from `start` to `stop`.

    Example:
        >>> rows = torch.arange(3)
        >>> every = words(rows, 0, 9, step=0, key=(1, 2))
        >>> bool((words(rows[1:], 2, 7, step=0, key=(1, 2)) == every[1:, 2:7]).all())
        True

    Four columns share a counter: (column // 4, step, row in two words).

    Args:
        rows: int64 numbers of rows, not negative.
        step: below 2³²; other steps give other words.

    Returns:
        int64 (row, column), from 0 to 2³² − 1.
    """
    first = start // 4
    blocks = torch.arange(first, (stop + 3) // 4, device=rows.device)
    rows = rows[:, None]
    moment = torch.full_like(rows, step)
    drawn = philox((blocks & _WORD, moment, rows & _WORD, rows >> 32), key)
    return torch.stack(drawn, -1).flatten(1)[:, start - 4 * first : stop - 4 * first]
