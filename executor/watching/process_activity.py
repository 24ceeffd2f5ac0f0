"""Whether a process does anything at all, whichever of its threads does it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from stratagem.executor.watching.rank_starter import PID_FILE, begun_at

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


def ranks_in_folder(store: Path, parent: int | None = None) -> dict[int, int]:
    """The processes of the ranks of a run on this machine, by rank.

    Files of the run's folder (`rank_starter`) say which they are, and when each was begun; the
    system says whether that process still runs. Its environment says nothing: that of a forked
    process is, as it shows there, its first parent's.

    Args:
        store: the run's folder.
        parent: the process that started them; any one when left out.
    """
    found = {}
    for path in store.glob(f"{PID_FILE}*"):
        with suppress(OSError, ValueError):  # It is gone, or being written.
            pid, begun = path.read_text("utf-8").split()
            if begun_at(int(pid)) == begun and _runs_under(int(pid), parent):
                found[int(path.name.removeprefix(PID_FILE))] = int(pid)
    return found


def ranks_with_setting(setting: str, parent: int | None = None) -> dict[int, int]:
    """The processes of ranks that torchrun started by hand on this machine, by rank.

    Args:
        setting: that their environment has, such as ``NAME=value``.
        parent: the process that started them; any one when left out.
    """
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")) if Path("/proc").is_dir() else ():
        settings = _settings(int(name))
        if setting.encode() in settings and _runs_under(int(name), parent):
            ranks = [each[5:] for each in settings if each.startswith(b"RANK=")]
            found |= {int(each): int(name) for each in ranks}
    return found


def _runs_under(pid: int, parent: int | None) -> bool:
    """Whether a process runs, and that one started it."""
    return state_of(pid) not in "ZX" and (parent is None or _parent_of(pid) == parent)


def _settings(pid: int) -> list[bytes]:
    """The environment that a process was given; nothing where it is not ours or gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _parent_of(pid: int) -> int | None:
    """The process that started another one; None where that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
