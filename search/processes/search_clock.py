"""The time that a search may take: what it does asks here whether any is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from stratagem.searcher.processes.interrupts import Interrupts

PLANNED, SURVEYED, WALKED = 0.3, 0.4, 0.6
"""Of the seconds of a budget, how many may pass before stages are planned no more, and before
walks over skeletons begin, and end."""
ASKED = 0.95
"""Of the seconds of a budget, when nothing is begun any more: what was begun has to end, too."""

Late = Callable[[bool], bool]
"""Whether it is too late for more, if something was found, and if nothing was."""


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
        interrupts: of the search, which end what asks, too.
    """

    until: float = inf
    brief: float = inf
    interrupts: Interrupts = field(default_factory=Interrupts, repr=False, compare=False)

    @property
    def is_brief(self) -> bool:
        """Whether looks at many things are to be brief by now."""
        return time.monotonic() > self.brief

    @property
    def seconds_left(self) -> float | None:
        """Until `until`, 0 behind it; None where nothing ends what asks.

        Example:
            >>> SearchClock().seconds_left, SearchClock(until=0.0).seconds_left
            (None, 0.0)
        """
        return None if self.until == inf else max(0.0, self.until - time.monotonic())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let what is done inside take as long as it does."""
        until, self.until = self.until, inf
        try:
            yield
        finally:
            self.until = until

    def check(self) -> None:
        """Raise `OutOfTimeError` where no time is left, and `KeyboardInterrupt` after Ctrl-C."""
        self.interrupts.check()
        if time.monotonic() > self.until:
            raise OutOfTimeError


@dataclass(frozen=True)
class BudgetShares:
    """What of the seconds of a budget has passed.

    Example:
        >>> BudgetShares(started=0.0, seconds=1.0).is_up(), BudgetShares(0.0, None).is_up()
        (True, False)

    Attributes:
        started: by `time.monotonic`.
        seconds: of the budget; None where it has no limit of them.
    """

    started: float
    seconds: float | None

    def until(self, share: float) -> float:
        """When a share of the seconds has passed; never without a limit."""
        return inf if self.seconds is None else self.started + share * self.seconds

    def past(self, share: float) -> Callable[[], bool]:
        """What says whether a share of the seconds has passed."""
        until = self.until(share)
        return lambda: time.monotonic() > until

    def late(self, share: float) -> Late | None:
        """The same, or None where there is no limit.

        What has found nothing may go on for as long as walks may.
        """
        if self.seconds is None:
            return None
        soon, last = self.past(share), self.past(WALKED)
        return lambda found: soon() if found else last()

    def is_up(self) -> bool:
        """Whether all have passed."""
        return self.past(1.0)()
