"""Learning rates over a run: what a plan's rate is multiplied by at each step.

    1 ┤   ╭────╮              linear warm-up, then a half cosine down to the floor
      │  ╱      ╲             (Loshchilov and Hutter 2017, without restarts)
floor ┤ ╱        ╰────
      └─┴────┴────┴──▶ step
        warm-up  total
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from stratagem.simulator.kernel_times.training import Training

Shape = Literal["constant", "linear", "cosine"]

Rate = Callable[[int], float]
"""The factor of the learning rate at a step, which counts from 0."""


@dataclass(frozen=True)
class RateSchedule:
    """A warm-up, and then constant, linear down, or half a cosine down.

    Example:
        >>> rate = RateSchedule("cosine", warmup=2, total=10, floor=0.1)
        >>> [round(rate(step), 3) for step in (0, 1, 2, 6, 10, 99)]
        [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]

    Attributes:
        shape: ``constant``, ``linear`` or ``cosine``.
        warmup: steps in which the rate rises linearly; the last of them has the whole rate.
        total: steps after which the rate is at the floor; only where it falls.
        floor: the share of the rate that is left in the end.

    Raises:
        ValueError: on an unknown shape, a floor outside [0, 1], or a fall that has no steps.
    """

    shape: Shape = "constant"
    warmup: int = 0
    total: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            known = ", ".join(get_args(Shape))
            raise ValueError(f"no learning-rate schedule {self.shape!r}; there are {known}")
        if self.warmup < 0 or not 0 <= self.floor <= 1:
            raise ValueError(
                f"warmup={self.warmup}, floor={self.floor}; the warm-up takes 0 steps or more, "
                f"and the floor is a share of the learning rate"
            )
        if self.shape != "constant" and self.total <= self.warmup:
            raise ValueError(
                f"the learning rate falls until step {self.total}, but its warm-up takes "
                f"{self.warmup}; give a later step as total, or a shorter warm-up"
            )

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.floor + (1 - self.floor) * left


_STEPPING = threading.Lock()
"""Ranks that are threads of one process share their rates, and each asks for the same step."""


@dataclass
class TorchRate:
    """The rates of a scheduler of torch, as it is.

    Example:
        >>> from torch.optim.lr_scheduler import StepLR
        >>> halved = TorchRate(lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5))
        >>> [halved(step) for step in (0, 1, 2, 5)]
        [1.0, 1.0, 0.5, 0.25]

    A run makes the scheduler of an optimizer that has the rates, groups and momentum of the plan's
    training, so that rates that a scheduler is told (``max_lr``, ``eta_min``) are what they are in
    torch.

    Attributes:
        make: a scheduler of the optimizer that it is given, which steps once a step.
        training: whose rates that optimizer has; one rate, 1, when left out.

    Raises:
        ValueError: when it is called: the scheduler needs what a run makes, such as a loss, is of
            another optimizer, or changes what a plan keeps: momentum, or the rate of one group
            against another's.
    """

    make: Callable[[torch.optim.Optimizer], Any]
    training: Training | None = None
    _rates: list[float] = field(default_factory=list, init=False, repr=False)
    _going: Any = field(default=None, init=False, repr=False)

    def __call__(self, step: int) -> float:
        """The factor of all rates at a step."""
        with _STEPPING:
            return self._at(step)

    def _at(self, step: int) -> float:
        if self._going is None:
            optimizer = _optimizer_like(self.training or Training(learning_rate=1.0))
            begun = [dict(group) for group in optimizer.param_groups]
            self._going = optimizer, begun, self._scheduler_of(optimizer)
            self._rates.append(self._factor())
        optimizer, _, scheduler = self._going
        while len(self._rates) <= step:
            optimizer.step()
            try:
                scheduler.step()
            except TypeError as error:
                raise ValueError(
                    f"{type(scheduler).__name__} needs more than the number of the step "
                    f"({error}), which is all that a rate is made of; take another scheduler, or "
                    "give a function of the step"
                ) from error
            self._rates.append(self._factor())
        return self._rates[step]

    def _scheduler_of(self, optimizer: torch.optim.Optimizer) -> Any:
        try:
            made = self.make(optimizer)
        except Exception as error:
            count = len(optimizer.param_groups)
            raise ValueError(
                f"no scheduler can be made of an optimizer with {count} groups, one of all "
                f"parameters and {count - 1} that the plan's training trains otherwise "
                f"({type(error).__name__}: {error}); give it what each of these needs"
            ) from error
        if getattr(made, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                f"{type(made).__name__} is of another optimizer, whose rates it would change; "
                "make it of the one that the function is given"
            )
        return made

    def _factor(self) -> float:
        """What the rates of all groups are multiplied by, which is one number."""
        optimizer, begun, scheduler = self._going
        name, step = type(scheduler).__name__, len(self._rates)
        factors = []
        for before, group in zip(begun, optimizer.param_groups, strict=True):
            for key in ("momentum", "betas"):
                if group.get(key) != before.get(key):
                    raise ValueError(
                        f"{name} changes {key} from {before[key]} to {group[key]} at step {step}, "
                        "but a plan trains with the same at every step; give the scheduler "
                        "cycle_momentum=False, or take another one"
                    )
            rate, now = float(before["lr"]), float(group["lr"])
            if rate or now:
                factors.append(now / rate if rate else math.inf)
        if not factors:
            return 1.0
        if max(factors) - min(factors) > 1e-9 * max(factors):
            raise ValueError(
                f"{name} multiplies the rates of groups by {', '.join(f'{f:g}' for f in factors)} "
                f"at step {step}, but a plan multiplies all of them by one number; leave out what "
                "it adds to each (eta_min), or take a scheduler that multiplies"
            )
        return factors[0]

    def __getstate__(self) -> dict[str, Any]:
        """Another process goes through the steps itself."""
        return {"make": self.make, "training": self.training, "_rates": [], "_going": None}


def rate_of(rate: Rate, training: Training) -> Rate:
    """What a training's learning rate is multiplied by: a scheduler of torch sees what it is."""
    if isinstance(rate, TorchRate) and rate.training is None:
        return TorchRate(rate.make, training)
    return rate


def rates_of(rate: Rate, training: Training, steps: int) -> list[float]:
    """What it is at each of so many steps."""
    factor = rate_of(rate, training)
    return [factor(step) for step in range(steps)]


def _optimizer_like(training: Training) -> torch.optim.Optimizer:
    """One of torch with the rates, momentum and groups of a training."""
    rates = [1.0, *(group.rate for group in training.groups if group.rate)]
    groups = [
        {"params": [torch.zeros(())], "lr": (training.learning_rate or 1.0) * rate}
        for rate in rates
    ]
    if training.optimizer in ("sgd", "muon"):
        return torch.optim.SGD(groups, lr=1.0, momentum=training.momentum)
    return torch.optim.AdamW(groups, lr=1.0, betas=training.betas)
