"""The named values of one rank while a program runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

from torch import Tensor

from stratagem.executor.communication.endings import Ending


class Values(dict[str, Any]):
    """Values by name; one that is promised is waited for when it is first read."""

    def __init__(self, settle: Callable[[str], Any]) -> None:
        super().__init__()
        self._settle = settle

    def __missing__(self, name: str) -> Any:
        return self._settle(name)


class NamedValues:
    """Values by name: tensors, and the tapes that forward passes leave for backward passes.

    A value that several instructions add to is first shared with whoever made it, so the first sum
    makes a new tensor and only later ones are in place. What a collective that goes on will give
    is promised, and added when it is read or freed. A collective holds all that it works on until
    then, so sums are added when the next one is promised and they are over, and none is begun
    while what was promised to the same value before is not there.

    Attributes:
        begun: when collectives that were begun since somebody last looked will have ended.
        waits: whether a promised value is waited for just now.
        waited_ns: until when one was, by `time.perf_counter_ns`.
        seed: the gradient with which backward begins at the loss.
    """

    def __init__(self) -> None:
        self.values = Values(self._settle)
        self.begun: list[Ending] = []
        self.waits = False
        self.waited_ns = 0
        self.seed = 1.0
        self._own: set[str] = set()
        self._promised: dict[str, list[Callable[[], Tensor]]] = {}
        self._sums: deque[tuple[str, Callable[[], Tensor], Callable[[], bool]]] = deque()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to a value, or make it the value."""
        if name in self._promised:
            self._settle(name)
        there: Tensor | None = self.values.get(name)
        if there is None:
            self.values[name] = tensor
        elif name in self._own:
            there.add_(tensor)
        else:
            self.values[name] = there + tensor
            self._own.add(name)

    def promise(self, name: str, finish: Callable[[], Tensor]) -> None:
        """Add what `finish` waits for to a value, later."""
        there: Tensor | None = self.values.pop(name, None)
        owed = self._promised.setdefault(name, [])
        if there is not None:
            owed.append(lambda: there)
        owed.append(finish)

    def before_sum(self, names: Iterable[str]) -> None:
        """Say that sums for values are to be begun: what was promised to them is waited for.

        Sums that are over are added, too, those that were begun first; they let go of gradients.
        """
        for name in names:
            if name in self._promised:
                self._settle(name)
        while self._sums:
            name, finish, is_over = self._sums[0]
            if finish in self._promised.get(name, ()):
                if not is_over():
                    break
                self._settle(name)
            self._sums.popleft()

    def promise_sum(
        self, name: str, finish: Callable[[], Tensor], is_over: Callable[[], bool]
    ) -> None:
        """Promise a sum; `is_over` says whether nobody would wait for it."""
        self.promise(name, finish)
        self._sums.append((name, finish, is_over))

    def _settle(self, name: str) -> Tensor:
        for finish in self._promised.pop(name):
            self.waits = True
            made = finish()
            self.waits = False
            self.waited_ns = perf_counter_ns()
            self.add(name, made)
        tensor: Tensor = self.values[name]
        return tensor

    def everything(self) -> list[Any]:
        """All values, once those that are promised have come."""
        for name in list(self._promised):
            self._settle(name)
        return list(self.values.values())

    def forget(self, name: str) -> None:
        """Let go of a value that another one takes the place of, also of what it was promised."""
        if name in self._promised:
            self._settle(name)
        self.values.pop(name, None)
        self._own.discard(name)

    def free(self, names: tuple[str, ...]) -> None:
        """Let go of values."""
        for name in names:
            if name in self._promised:
                self._settle(name)
            del self.values[name]
        self._own.difference_update(names)
