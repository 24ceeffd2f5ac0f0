"""Values that are remembered: those that were asked for last, and what is worked out of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

Value = TypeVar("Value")
Derived = TypeVar("Derived")


class RecentValues(Generic[Value]):
    """Values by key; those that nobody asked for the longest are forgotten.

    Example:
        >>> squares = RecentValues[int](2)
        >>> [squares.get(n, lambda n=n: n * n) for n in (2, 3, 2, 4)]
        [4, 9, 4, 16]
        >>> 2 in squares, 3 in squares
        (True, False)

    Args:
        most: sum of the weights that are kept; the newest value is, whatever it weighs.
    """

    def __init__(self, most: int) -> None:
        self._most, self._weight = most, 0
        self._kept: dict[Hashable, tuple[Value, int]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Value], weight: int = 1) -> Value:
        """The value of a key, made if it is not kept.

        Args:
            key: says all that the value depends on. Of what it tells by identity the value keeps
                hold, so that nothing else comes to have the same.
            make: makes the value.
            weight: what it counts for, such as how large it is.
        """
        found = self._kept.pop(key, None)
        if found is None:
            found = make(), weight
            self._weight += weight
        self._kept[key] = found
        while self._weight > self._most and len(self._kept) > 1:
            self._weight -= self._kept.pop(next(iter(self._kept)))[1]
        return found[0]


class DerivedValues:
    """What is worked out of a value: once, and kept as long as it.

    Example:
        >>> values = DerivedValues()
        >>> values.derive(id) == id(values)
        True
    """

    @cached_property
    def _derived(self) -> dict[Callable[..., Any], Any]:
        return {}

    def derive(self, make: Callable[[Self], Derived]) -> Derived:
        """What `make` works out of this value, or did."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: Derived = self._derived[make]
        return found
