"""Learning rates over a run, and what else a scheduler moves, at each step.

    1 ┤   ╭────╮              linear warm-up, then a half cosine down to the floor
      │  ╱      ╲             (Loshchilov and Hutter 2017, without restarts)
floor ┤ ╱        ╰────
      └─┴────┴────┴──▶ step
        warm-up  total
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stratagem.executor.optimizers.settings import Settings, scaled, settings_of
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


REMEMBERED = 4096
"""Steps whose settings are kept: ranks that are threads ask for the same ones, more or less."""

_STEPPING = threading.Lock()
"""Ranks that are threads of one process share their rates, and each asks for the same step."""


@dataclass
class TorchRate:
    """What a scheduler of torch makes of the settings of a plan's training, as it is.

    Example:
        >>> from torch.optim.lr_scheduler import OneCycleLR, StepLR
        >>> halved = TorchRate(lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5))
        >>> [halved(step) for step in (0, 1, 2, 5)]
        [1.0, 1.0, 0.5, 0.25]
        >>> sgd = Training(optimizer="sgd", momentum=0.9)
        >>> cycle = TorchRate(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9), sgd)
        >>> [round(cycle.settings(step)[0].first, 2) for step in (0, 2, 8)]
        [0.95, 0.85, 0.95]

    A run makes the scheduler of an optimizer with the groups of the plan's training: first all
    parameters of no group, then each group in its order, with its rate, weight decay, momentum or
    betas, and epsilon. So rates that a scheduler is told (``max_lr``, ``eta_min``), and lists of
    functions by group, are what they are in torch. All of these numbers may be moved.

    Attributes:
        make: a scheduler of the optimizer that it is given, which steps once a step.
        training: whose settings that optimizer has; one group at rate 1 when left out.

    Raises:
        ValueError: when it is called: the scheduler needs what a run makes, such as a loss, is of
            another optimizer, or changes what no update reads.
    """

    make: Callable[[torch.optim.Optimizer], Any]
    training: Training | None = None
    _found: deque[tuple[Settings, ...]] = field(init=False, repr=False)
    _steps: int = field(default=0, init=False, repr=False)
    _going: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Forget all steps: a scheduler goes forwards alone."""
        self._found, self._steps, self._going = deque(maxlen=REMEMBERED), 0, None

    def __call__(self, step: int) -> float:
        """The factor of the rate of parameters of no group at a step; infinite if that is 0."""
        rate = self._training.by_group[0].learning_rate
        now = self.settings(step)[0].rate
        return now / rate if rate else math.inf if now else 1.0

    def settings(self, step: int) -> tuple[Settings, ...]:
        """The settings of parameters of no group and of each group at a step."""
        with _STEPPING:
            return self._at(step)

    @property
    def _training(self) -> Training:
        return self.training or Training(learning_rate=1.0)

    def _at(self, step: int) -> tuple[Settings, ...]:
        if step < self._steps - len(self._found):
            self._begin()
        if self._going is None:
            optimizer = optimizer_like(self._training)
            begun = [dict(group) for group in optimizer.param_groups]
            self._going = optimizer, begun, self._scheduler_of(optimizer)
            self._note()
        optimizer, _, scheduler = self._going
        while self._steps <= step:
            optimizer.step()
            try:
                scheduler.step()
            except TypeError as error:
                raise ValueError(
                    f"{type(scheduler).__name__} needs more than the number of the step "
                    f"({error}), which is all that a rate is made of; take another scheduler, or "
                    "give a function of the step"
                ) from error
            self._note()
        return self._found[step - self._steps]

    def _note(self) -> None:
        self._found.append(self._read())
        self._steps += 1

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

    def _read(self) -> tuple[Settings, ...]:
        """The settings that the optimizer has now."""
        optimizer, begun, scheduler = self._going
        groups = zip(begun, optimizer.param_groups, strict=True)
        training = self._training
        found = []
        for how, is_scheduled in zip(training.by_group, _scheduled(training), strict=True):
            settings = Settings.of(how)
            if is_scheduled:
                before, group = next(groups)
                self._check(how, before, group, type(scheduler).__name__)
                settings = _moved(settings, group)
            found.append(settings)
        return tuple(found)

    def _check(
        self, how: Training, before: Mapping[str, Any], group: Mapping[str, Any], name: str
    ) -> None:
        """Refuse what an update does not read, and what it has no place for."""
        step = self._steps
        told = f"{name} changes {{}} from {{}} to {{}} at step {step}, but "
        for key in self._going[0].defaults:
            old, new = before[key], group[key]
            if old != new and key not in _read_of(group):
                raise ValueError(
                    f"{told.format(key, old, new)}a plan trains with the same at every step; "
                    "leave it as it is"
                )
        now = group.get("momentum")
        if now and how.optimizer == "sgd" and not how.momentum:
            raise ValueError(
                f"{told.format('momentum', 0, now)}the plan's SGD has none, and so no memory for "
                "it; give the scheduler cycle_momentum=False, or the training a momentum above 0"
            )
        if how.dampening and now == 0 and not step:
            raise ValueError(
                f"{name} begins with momentum 0, but dampening is {how.dampening}: which gradient "
                "is the first that momentum sees would be unknown; begin above 0"
            )
        decay = group["weight_decay"]
        if how.optimizer == "adam" and decay and not (how.weight_decay or how.coupled_decay):
            raise ValueError(
                f"{told.format('weight_decay', 0, decay)}a plan of Adam without any does not say "
                "whether it is that of Adam or of AdamW; give the training a weight decay above 0"
            )
        for key, new in (("momentum", now), ("betas", max(group.get("betas", (0,))))):
            if new is not None and not 0 <= new < (1 if key == "betas" else math.inf):
                raise ValueError(
                    f"{told.format(key, before[key], group[key])}it must be at least 0"
                    + (" and below 1" if key == "betas" else "")
                )

    def __getstate__(self) -> dict[str, Any]:
        """Another process goes through the steps itself."""
        return {"make": self.make, "training": self.training}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.make, self.training = state["make"], state["training"]
        self._begin()


@dataclass(frozen=True)
class ToldSettings:
    """The settings of each step, as another process found them.

    Example:
        >>> numbers = torch.tensor([[[0.5, 0.0, 0.9, 0.999, 1e-8, 0.0]]], dtype=torch.float64)
        >>> ToldSettings(numbers).settings(0)[0].rate
        0.5

    Attributes:
        numbers: of `Settings`, by step and group (step, group, number) in float64.
    """

    numbers: Tensor

    def __call__(self, step: int) -> float:
        """It has no factor: settings are as they are."""
        raise AssertionError(f"step {step} has settings of its own")

    def settings(self, step: int) -> tuple[Settings, ...]:
        """See `TorchRate.settings`."""
        return tuple(Settings(*row) for row in self.numbers[step].tolist())


def settings_by_step(rate: Rate, training: Training) -> Callable[[int], tuple[Settings, ...]]:
    """What parameters of no group and of each group are updated by at a step.

    Raises:
        ValueError: when it is called: a rate that is below 0, infinite or no number.
    """
    if isinstance(rate, TorchRate) and rate.training is None:
        rate = TorchRate(rate.make, training)
    if isinstance(rate, TorchRate | ToldSettings):
        told = rate.settings
        return lambda step: _checked(told(step), step)
    usual = settings_of(training)
    return lambda step: scaled(usual, _checked_factor(rate(step), step))


def told_to_others(rate: Rate, training: Training, steps: int) -> list[float] | Tensor:
    """Factors of so many steps, or the numbers of their settings, for other processes."""
    if not isinstance(rate, TorchRate):
        return [rate(step) for step in range(steps)]
    at, shape = settings_by_step(rate, training), (len(training.by_group), len(Settings._fields))
    numbers = torch.empty((steps, *shape), dtype=torch.float64)
    for step in range(steps):
        numbers[step] = torch.tensor(at(step), dtype=torch.float64)
    return numbers


def rate_told(told: list[float] | Tensor) -> Rate:
    """The rate of which `told_to_others` told."""
    return ToldSettings(told) if isinstance(told, Tensor) else told.__getitem__


def moves_more_than_rates(rate: Rate, training: Training, steps: int) -> bool:
    """Whether a scheduler moves momentum or another number beside the rate in so many steps.

    Example:
        >>> moves_more_than_rates(RateSchedule(), Training(), 100)
        False
    """
    if not isinstance(rate, TorchRate | ToldSettings):
        return False
    at, usual = settings_by_step(rate, training), settings_of(training)
    return any(
        now._replace(rate=0.0) != before._replace(rate=0.0)
        for step in range(steps)
        for now, before in zip(at(step), usual, strict=True)
    )


def _checked_factor(factor: float, step: int) -> float:
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"the learning rate of step {step} is multiplied by {factor}; give a rate that is a "
            f"number of at least 0 for every step"
        )
    return factor


def _checked(settings: tuple[Settings, ...], step: int) -> tuple[Settings, ...]:
    for each in settings:
        for name, value in each._asdict().items():
            if not 0 <= value < math.inf:
                told = {"rate": "learning rate", "decay": "weight decay", "first": "momentum"}
                raise ValueError(
                    f"the {told.get(name, name)} of step {step} is {value}; give a scheduler that "
                    "makes numbers of at least 0"
                )
    return settings


def _read_of(group: Mapping[str, Any]) -> Iterator[str]:
    """The settings of a group of an optimizer of torch that may differ from step to step."""
    yield from ("lr", "weight_decay")
    yield from ("betas", "eps") if "betas" in group else ()
    yield from ("momentum", "dampening") if "momentum" in group else ()


def _moved(settings: Settings, group: Mapping[str, Any]) -> Settings:
    """Settings with what a group of an optimizer of torch has of them."""
    own: dict[str, Any] = {"rate": float(group["lr"]), "decay": float(group["weight_decay"])}
    if "betas" in group:
        own |= {"first": float(group["betas"][0]), "second": float(group["betas"][1])}
        own["epsilon"] = float(group["eps"])
    if "momentum" in group:
        own |= {"first": float(group["momentum"]), "damp": float(group["dampening"])}
    return settings._replace(**own)


def _scheduled(training: Training) -> list[bool]:
    """Of parameters of no group, and of each group, whether an optimizer has them."""
    return [True, *(group.scheduled for group in training.groups)]


def optimizer_like(training: Training) -> torch.optim.Optimizer:
    """One of torch with the settings and groups of a training, for schedulers to move.

    Several optimizers are one that has rates and decays alone.
    """
    kinds = set(training.optimizers)
    own = [how for how, has in zip(training.by_group, _scheduled(training), strict=True) if has]
    usual = [
        {"params": [torch.zeros(())], "lr": how.learning_rate, "weight_decay": how.weight_decay}
        for how in own
    ]
    if kinds <= {"sgd", "muon"}:
        groups = [
            group | {"momentum": how.momentum, "dampening": how.dampening}
            for group, how in zip(usual, own, strict=True)
        ]
        return torch.optim.SGD(groups, lr=1.0)
    if kinds <= {"adam", "lion", "lamb", "adam8bit"}:
        groups = [
            group | {"betas": how.betas, "eps": how.epsilon}
            for group, how in zip(usual, own, strict=True)
        ]
        return torch.optim.AdamW(groups, lr=1.0)
    return torch.optim.Adafactor(usual, lr=1.0)
