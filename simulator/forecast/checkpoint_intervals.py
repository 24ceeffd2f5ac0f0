"""How often to write a checkpoint: closed forms for failures that forget how long a run lasted.

J. W. Young, A first order approximation to the optimum checkpoint interval, 1974, and J. T. Daly,
A higher order estimate of the optimum checkpoint interval for restart dumps, 2006:

    T(τ) = M · exp(R / M) · (exp((τ + δ) / M) − 1) · W / τ

seconds are expected for W seconds of work with a checkpoint of δ seconds behind every τ, where
failures come every M seconds in the mean, also while a checkpoint is written and in the R seconds
of a restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy

from stratagem.simulator.base.field_types import check_fields

LONGEST_EXPONENT = 700.0
"""Beyond it the exponential function is beyond floating point: such a run never ends."""

OFTENEST = 1e-3
"""Of the time between failures: to save more often gains less than 0.05 % of a run."""
SHORT = 1e-9
"""Checkpoints that take less of the time between failures are best written as Young says: there
Lambert's function is at its branch point, of which floating point knows too little."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, and what that takes.

    Example:
        >>> round(Checkpoints(seconds=30).interval(mtbf=3 * 3600.0))
        785

    Attributes:
        seconds: that training waits for one.
        every_seconds: of training between two; left out, the best interval (see `best_interval`),
            but not before the last one is written, nor more than a thousand times between two
            failures.
        write_seconds: how long it is written beside training after that. A failure until then
            goes back to the one before; the next one waits for it.

    Raises:
        ValueError: names the number that cannot be.
    """

    seconds: float = 0.0
    every_seconds: float | None = None
    write_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "checkpoints")
        for name in ("seconds", "write_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"checkpoints: {name} is {value}; it is 0 or more")
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ValueError(
                f"checkpoints: every_seconds is {self.every_seconds}; it is above 0, or left out"
            )

    def interval(self, mtbf: float) -> float:
        """Seconds of training between two checkpoints."""
        if self.every_seconds is not None:
            return self.every_seconds
        return max(best_interval(mtbf, self.seconds), self.write_seconds, mtbf * OFTENEST)


def expected_seconds(
    work: float, interval: float, *, mtbf: float, checkpoint: float, restart: float
) -> float:
    """The expected wall time T(τ) of a run, by Daly's formula.

    Example:
        >>> calm = expected_seconds(86400, 3600, mtbf=1e12, checkpoint=60, restart=300)
        >>> round(calm)  # 24 checkpoints
        87840

    Args:
        work: seconds of training.
        interval: seconds of training between two checkpoints.
        mtbf: mean seconds between two failures of the job.
        checkpoint: seconds that writing one takes.
        restart: seconds from a failure to the first step after it.
    """
    pieces = work / interval
    if math.isinf(mtbf):
        return work + checkpoint * pieces
    if max(restart, interval + checkpoint) / mtbf > LONGEST_EXPONENT:
        return math.inf
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf) * pieces


def best_interval(mtbf: float, checkpoint: float) -> float:
    """The interval for which Daly's formula is least; infinite where nothing fails.

    The derivative of (exp((τ + δ) / M) − 1) / τ is 0 where τ / M = 1 + W(−exp(−1 − δ / M)), W
    being Lambert's function. For checkpoints far shorter than M this is Young's √(2 δ M).

    Example:
        >>> round(best_interval(86400.0, 10.0)), round((2 * 10.0 * 86400.0) ** 0.5)
        (1308, 1315)
    """
    if math.isinf(mtbf):
        return math.inf
    if checkpoint < SHORT * mtbf:
        return math.sqrt(2.0 * checkpoint * mtbf)
    return mtbf * (1.0 + float(scipy.special.lambertw(-math.exp(-1.0 - checkpoint / mtbf)).real))
