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


def ranks_here(setting: str, parent: int | None = None) -> dict[int, int]:
    """The processes of ranks on this machine, by rank: what the system knows, not what they say.

    Args:
        setting: that their environment has, such as ``NAME=value``.
        parent: the process that started them; any one when left out.
    """
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")) if Path("/proc").is_dir() else ():
        try:
            settings = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if setting.encode() not in settings or state_of(int(name)) in "ZX":
                continue
            if parent is not None and _parent_of(int(name)) != parent:
                continue
        except OSError:
            continue
        found |= {int(each[5:]): int(name) for each in settings if each.startswith(b"RANK=")}
    return found


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
