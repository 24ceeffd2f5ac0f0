"""What a property is: cases drawn at random, each with how far it is from what must hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Try:
    """One case of a property.

    Attributes:
        what: the case, for a person to make it again.
        excess: how far it is over what is allowed; up to 0 it holds.
    """

    what: str
    excess: float

    @property
    def holds(self) -> bool:
        """Whether the property holds here."""
        return self.excess <= 0.0


Property = Callable[[random.Random], Iterator[Try]]
"""Cases without end, as the generator draws them."""


def score(name: str, made: Property, count: int, seed: int) -> dict[str, object]:
    """Try a property, and say how often it failed.

    Returns:
        The line of the property: how many cases there were, the greatest excess, how many failed,
        and the worst case if one did.
    """
    cases = made(random.Random(seed))
    tried = [case for case, _ in zip(cases, range(count), strict=False)]
    worst = max(tried, key=lambda case: case.excess)
    line = {
        "property": name,
        "tried": len(tried),
        "worst": worst.excess,
        "failed": sum(not case.holds for case in tried),
    }
    return line if worst.holds else {**line, "case": worst.what}
