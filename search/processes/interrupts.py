"""Ctrl-C during a search: the first ends it with the best plan known, a second one without.

Python raises `KeyboardInterrupt` between any two instructions. Where it strikes in a function that
compiled code calls, or that frees an object, it is lost or becomes another error, so it is kept as
well, and raised again where a search asks. While a plan is made into a result it is only kept.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TWICE = 0.3
"""Seconds from which on a second interrupt is another one: what runs a program may hand on the
Ctrl-C that the program had from the terminal, too."""


class Interrupts:
    """Interrupts of a search, from `heard` on.

    Signals come to the main thread of a process: in another one nothing is heard or kept.

    Example:
        >>> with Interrupts().heard() as interrupts:
        ...     signal.raise_signal(signal.SIGINT)
        ...     print(interrupts.count, interrupts.is_pending)
        1 True

    Attributes:
        count: how many there were.
        is_pending: whether there was one that nothing has ended for by now.
    """

    def __init__(self) -> None:
        self.count, self.is_pending = 0, False
        self._is_held, self._is_heard, self._last = True, False, -math.inf

    @contextmanager
    def heard(self) -> Iterator[Interrupts]:
        """Hear interrupts inside, the first one kept only until `release`; as before outside.

        What a program ignores, or leaves to the system, stays as it is.
        """
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_heard or not is_main or not callable(before):
            yield self
            return
        self._is_heard = True

        def hear(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self.count and now < self._last + TWICE:
                return
            self.count, self.is_pending, self._last = self.count + 1, True, now
            if self.count > 1 or not self._is_held:
                before(number, frame)

        signal.signal(signal.SIGINT, hear)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)
            self._is_heard = False

    def release(self) -> None:
        """From here on an interrupt raises at once.

        Raises:
            KeyboardInterrupt: one was kept.
        """
        self._is_held = False
        self.check()

    def hold(self) -> None:
        """From here on a first interrupt is only kept, and `check` raises it."""
        self._is_held = True

    def check(self) -> None:
        """Raise what is pending.

        Raises:
            KeyboardInterrupt: there was an interrupt, and it was not `taken`.
        """
        if self.is_pending:
            raise KeyboardInterrupt

    def taken(self) -> None:
        """The search ends for the interrupt that is pending, if one is.

        Raises:
            KeyboardInterrupt: there was more than one.
        """
        self.is_pending = False
        if self.count > 1:
            raise KeyboardInterrupt
