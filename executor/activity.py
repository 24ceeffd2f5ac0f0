"""Whether a process does anything at all, whichever of its threads does it."""

from __future__ import annotations

import os
import time
from pathlib import Path

WORKING_SHARE = 0.02
"""Processor time, as a share of the time passed, above which a process counts as working."""


class Activity:
    """Whether this process computes, waits for a disk, or has started others.

    The thread that asks is not counted.

    Example:
        >>> activity = Activity()
        >>> compute_in_another_thread()  # doctest: +SKIP
        >>> activity.is_working()  # doctest: +SKIP
        True
    """

    def __init__(self) -> None:
        self._worked, self._asked = _computed(), time.monotonic()

    def is_working(self) -> bool:
        """Whether it did since the last call, from the same thread."""
        worked, now = _computed(), time.monotonic()
        computes = worked - self._worked > WORKING_SHARE * (now - self._asked)
        self._worked, self._asked = worked, now
        return computes or state_of(os.getpid()) == "D" or _has_children()


def _computed() -> float:
    """Seconds that the other threads of this process have computed."""
    return time.process_time() - time.thread_time()


def _has_children() -> bool:
    """Whether the main thread has started processes that still run, such as a compiler."""
    own = os.getpid()
    try:
        return bool(Path(f"/proc/{own}/task/{own}/children").read_text())
    except OSError:
        return False


def state_of(pid: int) -> str:
    """The state of a process of this machine, by its letter in /proc; X where it is gone.

    It is that of the main thread: D while it waits for a disk, T when it was stopped.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
