"""Learning from a few measured operators how far a device model is off for the others.

What is fitted is y = ln(measured / fallback) over the operators of a group (a kind, direction and
precision on a device). Candidates, from no freedom to much:

* ``scale``: y is the same for all, the geometric mean;
* ``size``: y = c + a·ln p, where p is what the fallback says;
* ``work``: y = c + a·ln flops + b·ln bytes;
* ``power law``: ln measured = c + a·ln flops + b·ln bytes, which does not ask the fallback.

Slopes are shrunk by ridge regression (Hoerl and Kennard 1970), those of ``size`` and ``work``
towards the fallback's own shape; the constant c is free. Model and shrinkage are those with the
least leave-one-out error, which a linear smoother gives without fitting anew (Allen 1974, PRESS):
e_i / (1 − h_ii). A model that is no better than the scale is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Floats

SCALE = "scale"
RIDGES = (0.01, 0.1, 1.0, 10.0)
"""In units of squared logarithms: with 1, one pair of operators e times apart counts for half."""
LEAST_GAIN = 0.05
"""By how much a model must beat a simpler one, since the best of several is so by chance too."""


@dataclass(frozen=True)
class Sample:
    """An operator: seconds that the fallback says, floating-point operations, bytes."""

    plain_s: float
    flops: float
    nbytes: float


@dataclass(frozen=True)
class Correction:
    """What was learned of a group.

    Attributes:
        model: the candidate that was taken.
        num_samples: how many operators it was learned from.
        error: root mean square of ln(predicted / measured) of operators left out in turn; None
            where there was one only.
        plain_error: the same of the fallback.
        constant: c.
        slopes: of the features of the model.
    """

    model: str
    num_samples: int
    error: float | None
    plain_error: float
    constant: float
    slopes: tuple[float, ...]

    def seconds(self, sample: Sample) -> float:
        """Corrected seconds of another operator of the group."""
        y = self.constant + float(_features(self.model, [sample])[0] @ np.array(self.slopes))
        return math.exp(y + _base(self.model, sample))


def learn(samples: Sequence[Sample], measured_s: Sequence[float]) -> Correction:
    """The correction that predicts left-out operators best.

    Example:
        >>> samples = [Sample(n * 1e-9, 2.0 * n, 4.0 * n) for n in (1e3, 1e5, 1e6, 1e7)]
        >>> learned = learn(samples, [1e-6 * (1e9 * s.plain_s) ** 0.5 for s in samples])
        >>> round(learned.seconds(Sample(1e-5, 2e4, 4e4)) * 1e6)
        100

    Raises:
        ValueError: when there are no samples, or a time is not above 0.
    """
    if not samples or min(*measured_s, *(s.plain_s for s in samples)) <= 0:
        raise ValueError(
            f"{len(samples)} samples with times from {min(measured_s, default=0.0)} s: a "
            "correction is learned from at least 1, all above 0"
        )
    best = _fit(SCALE, 1.0, samples, measured_s)
    for model in ("size", "work", "power law"):
        fits = [_fit(model, ridge, samples, measured_s) for ridge in RIDGES]
        usable = [f for f in fits if f.error is not None and _grows(f)]
        if best.error is None or not usable or len(samples) < len(usable[0].slopes) + 2:
            continue
        found = min(usable, key=lambda fit: fit.error or 0.0)
        if (found.error or 0.0) < (1 - LEAST_GAIN) * best.error:
            best = found
    return best


def _fit(
    model: str, ridge: float, samples: Sequence[Sample], measured_s: Sequence[float]
) -> Correction:
    """Fit one candidate and find its leave-one-out error."""
    truth = np.log(np.array(measured_s))
    plain_error = _rms(truth - np.log([sample.plain_s for sample in samples]))
    y = truth - np.array([_base(model, sample) for sample in samples])
    x = _features(model, samples)
    middle = x.mean(axis=0)
    centred = x - middle
    # The constant is not shrunk, so it takes the mean and the slopes see what is centred.
    solve = np.linalg.solve(centred.T @ centred + ridge * np.eye(x.shape[1]), centred.T)
    slopes = solve @ (y - y.mean())
    left = y - y.mean() - centred @ slopes
    leverage = 1 / len(y) + np.einsum("ij,ji->i", centred, solve)
    return Correction(
        model=model,
        num_samples=len(y),
        error=_rms(left / (1 - leverage)) if len(y) > 1 else None,
        plain_error=plain_error,
        constant=float(y.mean() - middle @ slopes),
        slopes=tuple(float(slope) for slope in slopes),
    )


def _features(model: str, samples: Sequence[Sample]) -> Floats:
    """A row of features for each sample."""
    if model == SCALE:
        return np.zeros((len(samples), 0))
    if model == "size":
        return np.log([[sample.plain_s] for sample in samples])
    return np.log([[max(s.flops, 1.0), max(s.nbytes, 1.0)] for s in samples])


def _base(model: str, sample: Sample) -> float:
    """The logarithm of the time that the model's y comes on top of."""
    return 0.0 if model == "power law" else math.log(sample.plain_s)


def _grows(fit: Correction) -> bool:
    """Whether more work is not said to take less time; the fallback's own exponents sum to 1."""
    return min(fit.slopes) >= 0 if fit.model == "power law" else 1 + sum(fit.slopes) >= 0


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
