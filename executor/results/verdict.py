"""The verdict on a plan's step: its errors, what each may be, and what it was compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LOSS_NAME = "loss"

BUFFER = "buffer "
"""Before the names of buffers among errors."""

OUTPUT = "output "
"""Before the names of what a forward pass gives back."""


@dataclass(frozen=True)
class Verdict:
    """Errors of a first step, what each may be, and what it was compared with.

    Example:
        >>> verdict = Verdict({"loss": 1e-7, "a.weight": 3.0}, {"loss": 1e-4, "a.weight": 1e-4})
        >>> verdict.worst, verdict.agrees
        ('a.weight', False)

    Attributes:
        errors: relative errors by name, max |a − b| / max |b|.
        allowed: how large each may be.
        reference: what was compared with, in words.

    Raises:
        ValueError: when there is no error, or one of which is not said how large it may be.
    """

    errors: Mapping[str, float]
    allowed: Mapping[str, float]
    reference: str = "one process of torch"

    def __post_init__(self) -> None:
        if not self.errors:
            raise ValueError("a verdict has 0 errors; it has at least that of the loss")
        for name in self.errors:
            if not self.allowed.get(name, 0.0) > 0.0:
                raise ValueError(
                    f"a verdict has an error of {name!r}, of which {self.allowed.get(name, 0.0)} "
                    "is allowed; say how large above 0 it may be"
                )

    @property
    def worst(self) -> str:
        """The name whose error is the largest part of what it may be, NaN before all."""
        return max(self.errors, key=self._weight)

    @property
    def agrees(self) -> bool:
        """Whether every error is within what it may be."""
        return all(self.errors[name] <= self.allowed[name] for name in self.errors)

    @property
    def max_error(self) -> float:
        """The largest of the errors."""
        return max(self.errors.values())

    def sentence(self) -> str:
        """The verdict in words.

        Example:
            >>> Verdict({"loss": 1e-7}, {"loss": 1e-4}).sentence()
            'agrees with one process of torch: loss and 0 gradients to 1.0e-07 (worst: loss, of 1.0e-04 allowed)'
        """  # noqa: E501
        worst, buffers = self.worst, sum(name.startswith(BUFFER) for name in self.errors)
        allowed = f"of {self.allowed[worst]:.1e} allowed"
        if not self.agrees:
            off = [name for name in self.errors if not self.errors[name] <= self.allowed[name]]
            return (
                f"DIFFERS from {self.reference}: worst is {worst}, by {self.errors[worst]:.1e} "
                f"{allowed}; {len(off)} of {len(self.errors)} values differ"
            )
        outputs = sum(name.startswith(OUTPUT) for name in self.errors)
        what = f"loss and {len(self.errors) - 1 - buffers} gradients"
        what += f" and {buffers} buffers" if buffers else ""
        what = f"{outputs} output{'s' if outputs > 1 else ''}" if outputs else what
        return (
            f"agrees with {self.reference}: {what} to {self.max_error:.1e} "
            f"(worst: {worst}, {allowed})"
        )

    def _weight(self, name: str) -> float:
        share = self.errors[name] / self.allowed[name]
        return math.inf if math.isnan(share) else share
