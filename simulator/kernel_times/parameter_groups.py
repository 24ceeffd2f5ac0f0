"""Parameters that are trained at a rate, or with a weight decay, of their own."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class ParameterGroup:
    """Which parameters they are, and how they are trained.

    Example:
        >>> group = ParameterGroup(("*.bias", "*norm*"), weight_decay=0.0)
        >>> [group.holds(name) for name in ("h.0.up.bias", "h.0.norm.weight", "h.0.up.weight")]
        [True, True, False]

    Attributes:
        names: of parameters, as `fnmatch` reads them: ``*`` is any number of characters, ``?``
            one, and ``[…]`` one of several.
        rate: what the learning rate is multiplied by.
        weight_decay: instead of that of all others; None for that one.
        optimizer: instead of that of all others; empty for that one. Muon, which trains matrices,
            is given to the whole and another one to a group of the rest, or the other way round.

    Raises:
        ValueError: no names, or a rate or a decay below 0.
    """

    names: tuple[str, ...]
    rate: float = 1.0
    weight_decay: float | None = None
    optimizer: str = ""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("a group of parameters has no names; give at least one pattern")
        if self.rate < 0 or (self.weight_decay or 0) < 0:
            raise ValueError(
                f"group {self.names[0]!r}: rate is {self.rate} and weight_decay "
                f"{self.weight_decay}; both must be 0 or more"
            )

    def holds(self, name: str) -> bool:
        """Whether a parameter is of the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)


def literally(name: str) -> str:
    """The pattern that one name alone fits.

    Example:
        >>> literally("a[0].weight"), ParameterGroup((literally("a[0].*"),)).holds("a[0].b")
        ('a[[]0].weight', False)
    """
    return "".join(f"[{each}]" if each in "*?[" else each for each in name)
