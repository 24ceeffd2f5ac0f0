"""The time that a search may take: what it does asks here whether any is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf


class OutOfTimeError(Exception):
    """The time of a budget was spent."""


@dataclass
class SearchClock:
    """Ends what asks it too late.

    Example:
        >>> SearchClock().check()
        >>> try:
        ...     SearchClock(until=0.0).check()
        ... except OutOfTimeError:
        ...     print("too late")
        too late

    Attributes:
        until: by `time.monotonic`, which all processes of a machine share.
        brief: likewise, from when looks at many things are to be brief ones.
    """

    until: float = inf
    brief: float = inf

    @property
    def is_brief(self) -> bool:
        """Whether looks at many things are to be brief by now."""
        return time.monotonic() > self.brief

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let what is done inside take as long as it does."""
        until, self.until = self.until, inf
        try:
            yield
        finally:
            self.until = until

    def check(self) -> None:
        """Raise `OutOfTimeError` where no time is left."""
        if time.monotonic() > self.until:
            raise OutOfTimeError
