"""How often Python's garbage collector looks through what a search has made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 200_000
"""So many more objects made than freed let the collector look at them; Python's default is 700."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Within it the garbage collector runs seldom, or not at all if it was switched off before.

    A search makes millions of small objects, keeps most, and hardly makes a cycle: looking for
    cycles took a third of the time of pricing and simulating. They are still freed, later.

    Example:
        >>> before = gc.get_threshold()
        >>> with seldom_collected():
        ...     gc.get_threshold()[0] == OBJECTS
        True
        >>> gc.get_threshold() == before
        True
    """
    before = gc.get_threshold()
    gc.set_threshold(max(OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
