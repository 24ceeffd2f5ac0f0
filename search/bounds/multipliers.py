"""The multipliers of a lower bound (see `cutting_planes`), and the conditions that they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from stratagem.simulator.base.arrays import Floats


@dataclass(eq=False)
class Multipliers:
    """y by (stage, kind, measure), μ by path, ν by moment (ns).

    Example:
        >>> one, other = Multipliers({}, [1.0]), Multipliers({}, [0.0, 1.0])
        >>> one.toward(other, 0.5).path
        [0.5, 0.5]
    """

    block: dict[tuple[int, int, int], float] = field(default_factory=dict)
    path: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def toward(self, other: Multipliers, step: float) -> Multipliers:
        """The same conditions hold for every mean of two."""
        keys = self.block.keys() | other.block.keys()

        def mean(a: float, b: float) -> float:
            return (1.0 - step) * a + step * b

        def padded(ours: list[float], theirs: list[float]) -> list[float]:
            return [mean(a, b) for a, b in zip_longest(ours, theirs, fillvalue=0.0)]

        return Multipliers(
            {k: mean(self.block.get(k, 0.0), other.block.get(k, 0.0)) for k in sorted(keys)},
            padded(self.path, other.path),
            padded(self.memory, other.memory),
        )


def scaled(
    y: dict[tuple[int, int, int], float],
    mu: Floats,
    nu: Floats,
    paths: Sequence[Mapping[tuple[int, int], int]],
) -> Multipliers:
    """Multipliers that meet the conditions exactly, whatever a solver's tolerance left.

    Σ_p μ_p = 1, and what the measures of a block have together is Σ_p μ_p · n_pb.

    Args:
        y: by measure.
        mu: by path; their sum is not 0.
        nu: by moment.
        paths: how often each block is on each path.

    Example:
        >>> import numpy as np
        >>> found = scaled({(0, 0, 0): 3.0}, np.array([2.0]), np.zeros(0), [{(0, 0): 4}])
        >>> found.path, found.block
        ([1.0], {(0, 0, 0): 4.0})
    """
    mu = mu / mu.sum()
    wanted: dict[tuple[int, int], float] = {}
    for share, path in zip(mu.tolist(), paths, strict=True):
        for key, times in path.items():
            wanted[key] = wanted.get(key, 0.0) + share * times
    sums: dict[tuple[int, int], float] = {}
    for name, value in y.items():
        sums[name[:2]] = sums.get(name[:2], 0.0) + value
    block = {
        name: value * (wanted[name[:2]] / sums[name[:2]]) if sums[name[:2]] > 0 else 0.0
        for name, value in y.items()
    }
    return Multipliers(block, mu.tolist(), nu.tolist())
