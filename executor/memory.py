"""The named values of one rank while a program runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Memory:
    """Values by name: tensors, and the tapes that forward passes leave for backward passes.

    A value that several instructions add to is first shared with whoever made it, so the first sum
    makes a new tensor and only later ones are in place.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._own: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to a value, or make it the value."""
        there: Tensor | None = self.values.get(name)
        if there is None:
            self.values[name] = tensor
        elif name in self._own:
            there.add_(tensor)
        else:
            self.values[name] = there + tensor
            self._own.add(name)

    def free(self, names: tuple[str, ...]) -> None:
        """Let go of values."""
        for name in names:
            del self.values[name]
        self._own.difference_update(names)
