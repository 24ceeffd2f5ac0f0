"""Parameters that are trained with a rate, a weight decay or other options of their own."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf
from typing import Any

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.saved_values import differing, shown
from stratagem.simulator.optimizers.factored_squares import FactoredSquares
from stratagem.simulator.optimizers.newton_schulz import NewtonSchulz

HAVING: dict[str, frozenset[str]] = {
    "betas": frozenset({"adam", "lion", "lamb", "adam8bit"}),
    "epsilon": frozenset({"adam", "lamb", "adam8bit"}),
    "amsgrad": frozenset({"adam"}),
    "coupled_decay": frozenset({"adam"}),
    "momentum": frozenset({"sgd", "muon"}),
    "dampening": frozenset({"sgd"}),
    "nesterov": frozenset({"sgd", "muon"}),
    "maximize": frozenset({"sgd", "adam", "lion", "lamb", "adafactor", "adam8bit"}),
    "newton_schulz": frozenset({"muon"}),
    "adafactor": frozenset({"adafactor"}),
}
"""Options that a group may have of its own, and the optimizers that have them."""


@dataclass(frozen=True, repr=False)
class ParameterGroup:
    """Which parameters they are, and how they are trained.

    Example:
        >>> group = ParameterGroup(("*.bias", "*norm*"), weight_decay=0.0)
        >>> [group.holds(name) for name in ("h.0.up.bias", "h.0.norm.weight", "h.0.up.weight")]
        [True, True, False]
        >>> group
        ParameterGroup(names=('*.bias', '*norm*'), weight_decay=0.0)

    Options that are None are those of all others, as `Training` has them.

    Attributes:
        names: of parameters, as `fnmatch` reads them: ``*`` is any number of characters, ``?``
            one, and ``[…]`` one of several.
        rate: what the learning rate is multiplied by.
        weight_decay: instead of that of all others; None for that one.
        optimizer: instead of that of all others; empty for that one. Muon, which trains matrices,
            is given to the whole and another one to a group of the rest, or the other way round.
        learning_rate: instead of `rate` times that of all others, which may be 0.
        betas: see `Training`, as all that follow but the last.
        epsilon: of Adam, LAMB and Adam in 8 bits.
        amsgrad: of Adam.
        coupled_decay: of Adam.
        momentum: of SGD and Muon.
        dampening: of SGD.
        nesterov: of SGD and Muon.
        maximize: of all but Muon.
        newton_schulz: of Muon.
        adafactor: of Adafactor.
        scheduled: whether an optimizer of torch has the group, so that a scheduler sees it;
            False for parameters that no optimizer has, whose rate is 0.

    Raises:
        ValueError: no names, or a rate or a decay below 0.
    """

    names: tuple[str, ...]
    rate: float = 1.0
    weight_decay: float | None = None
    optimizer: str = ""
    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    amsgrad: bool | None = None
    coupled_decay: bool | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    maximize: bool | None = None
    newton_schulz: NewtonSchulz | None = None
    adafactor: FactoredSquares | None = None
    scheduled: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "group of parameters")
        if not self.names:
            raise ValueError("a group of parameters has no names; give at least one pattern")
        if not (0 <= self.rate < inf and 0 <= (self.weight_decay or 0) < inf):
            raise ValueError(
                f"group {self.names[0]!r}: rate is {self.rate} and weight_decay "
                f"{self.weight_decay}; both must be 0 or more, and finite"
            )
        if self.learning_rate is not None and (
            self.rate != 1.0 or not 0 <= self.learning_rate < inf
        ):
            raise ValueError(
                f"group {self.names[0]!r}: learning_rate is {self.learning_rate} and rate "
                f"{self.rate}; give one of them, of 0 or more and finite"
            )
        if not self.scheduled and (self.rate or self.learning_rate):
            raise ValueError(
                f"group {self.names[0]!r} is trained at rate {self.rate}, but scheduled is False, "
                "as of parameters that no optimizer has; make the rate 0"
            )

    __repr__ = shown

    @property
    def options(self) -> dict[str, Any]:
        """The options of its own, by the name that `Training` gives them.

        Example:
            >>> ParameterGroup(("*",), rate=0.5, momentum=0.8).options
            {'momentum': 0.8}
        """
        return {name: value for name, value in differing(self).items() if name in HAVING}

    def check_options(self, optimizer: str, momentum: float) -> None:
        """Refuse options that an optimizer does not have, or that do nothing without momentum.

        Args:
            optimizer: of the group.
            momentum: that it has where it says none of its own.

        Raises:
            ValueError: names the group, the option and what would have it.
        """
        for name, value in self.options.items():
            if optimizer not in HAVING[name]:
                raise ValueError(
                    f"group {self.names[0]!r} has {name}={value!r}, but optimizer {optimizer!r} "
                    f"has none; leave it out, or take optimizer={usual_having(name)!r}"
                )
        own = momentum if self.momentum is None else self.momentum
        if (self.nesterov or self.dampening) and not own:
            raise ValueError(
                f"group {self.names[0]!r} has nesterov={self.nesterov} and dampening="
                f"{self.dampening}, but its momentum is 0; give a momentum above 0"
            )

    def holds(self, name: str) -> bool:
        """Whether a parameter is of the group."""
        exact, patterns = self._read
        return name in exact or any(fnmatchcase(name, pattern) for pattern in patterns)

    @cached_property
    def _read(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """The names that patterns fit alone, and the other patterns: there may be thousands."""
        meant = {each: _unescaped(each) for each in self.names}
        exact = frozenset(name for name in meant.values() if name is not None)
        return exact, tuple(each for each, name in meant.items() if name is None)


def usual_having(option: str) -> str:
    """The plainest optimizer that has an option.

    Example:
        >>> usual_having("momentum"), usual_having("amsgrad")
        ('sgd', 'adam')
    """
    return min(HAVING[option], key=lambda optimizer: (len(optimizer), optimizer))


def literally(name: str) -> str:
    """The pattern that one name alone fits.

    Example:
        >>> literally("a[0].weight"), ParameterGroup((literally("a[0].*"),)).holds("a[0].b")
        ('a[[]0].weight', False)
    """
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)


def _unescaped(pattern: str) -> str | None:
    """The one name that a pattern fits; None where it fits others."""
    for each in "*?":
        pattern = pattern.replace(f"[{each}]", f"\0{ord(each)}\0")
    pattern = pattern.replace("[[]", f"\0{ord('[')}\0")
    if any(each in pattern for each in "*?["):
        return None
    for each in "*?[":
        pattern = pattern.replace(f"\0{ord(each)}\0", each)
    return pattern
