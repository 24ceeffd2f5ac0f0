"""Whether a process does anything at all, whichever of its threads does it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from stratagem.executor.watching.rank_starter import PID_FILE

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


def ranks_here(
    setting: str, parent: int | None = None, *, store: Path | None = None
) -> dict[int, int]:
    """The processes of ranks on this machine, by rank.

    The system knows which they are. Those of a run with a folder may share their environment, as
    it shows there, so files of that folder (`rank_starter`) say which rank is which of them.

    Args:
        setting: that their environment has, such as ``NAME=value``.
        parent: the process that started them; any one when left out.
        store: the folder of a run on one machine; None for ranks that torchrun started by hand.
    """
    found = _in_environments(setting) if store is None else _in_folder(store)
    return {
        rank: pid
        for rank, pid in found.items()
        if _has(pid, setting) and (parent is None or _parent_of(pid) == parent)
    }


def _in_environments(setting: str) -> dict[int, int]:
    """Processes that say in their environment which rank they are, by rank."""
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")) if Path("/proc").is_dir() else ():
        if _has(int(name), setting):
            ranks = [each[5:] for each in _settings(int(name)) if each.startswith(b"RANK=")]
            found |= {int(each): int(name) for each in ranks}
    return found


def _in_folder(store: Path) -> dict[int, int]:
    """Processes that the folder of a run says are its ranks, by rank."""
    found = {}
    for path in store.glob(f"{PID_FILE}*"):
        with suppress(OSError, ValueError):  # It is gone, or being written.
            found[int(path.name.removeprefix(PID_FILE))] = int(path.read_text("utf-8"))
    return found


def _has(pid: int, setting: str) -> bool:
    """Whether a process runs and has this in its environment."""
    return setting.encode() in _settings(pid) and state_of(pid) not in "ZX"


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
