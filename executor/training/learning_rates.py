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

    Attributes:
        make: a scheduler of an optimizer whose rate is 1, which steps once a step.

    Raises:
        ValueError: when it is called: the scheduler needs what a run makes, such as a loss.
    """

    make: Callable[[torch.optim.Optimizer], Any]
    _rates: list[float] = field(default_factory=list, init=False, repr=False)
    _going: Any = field(default=None, init=False, repr=False)

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        with _STEPPING:
            return self._at(step)

    def _at(self, step: int) -> float:
        if self._going is None:
            optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
            self._going = optimizer, self.make(optimizer)
            self._rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer, scheduler = self._going
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
            self._rates.append(float(optimizer.param_groups[0]["lr"]))
        return self._rates[step]

    def __getstate__(self) -> dict[str, Any]:
        """Another process goes through the steps itself."""
        return {"make": self.make, "_rates": [], "_going": None}
