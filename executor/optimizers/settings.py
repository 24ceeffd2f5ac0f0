"""The numbers that parameters are updated by at one step, which a scheduler may move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stratagem.simulator.kernel_times.training import Training


class Settings(NamedTuple):
    """What the parameters of a group are updated by.

    Example:
        >>> Settings.of(Training(betas=(0.8, 0.9)))
        Settings(rate=0.001, decay=0.0, first=0.8, second=0.9, epsilon=1e-08, damp=0.0)

    Attributes:
        rate: the learning rate.
        decay: the weight decay.
        first: the momentum of SGD and Muon, or the first of the betas of others.
        second: of the betas.
        epsilon: see `Training`.
        damp: see `Training.dampening`.
    """

    rate: float
    decay: float
    first: float
    second: float
    epsilon: float
    damp: float

    @classmethod
    def of(cls, training: Training) -> Settings:
        """Those of a training whose parameters are trained alike."""
        beta, second = training.betas
        return cls(
            training.learning_rate,
            training.weight_decay,
            training.momentum if training.optimizer in ("sgd", "muon") else beta,
            second,
            training.epsilon,
            training.dampening,
        )


def settings_of(training: Training) -> tuple[Settings, ...]:
    """Those of the parameters of no group, and of each group, as `Training.by_group` has them."""
    return tuple(map(Settings.of, training.by_group))


def scaled(settings: Sequence[Settings], factor: float) -> tuple[Settings, ...]:
    """Settings at so much of their rates.

    Example:
        >>> [each.rate for each in scaled(settings_of(Training(learning_rate=0.1)), 0.5)]
        [0.05]
    """
    return tuple(each._replace(rate=each.rate * factor) for each in settings)
