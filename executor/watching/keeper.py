"""Keeps the processes and the folder of a run: whoever ends the caller, nothing of either stays.

    caller ── command, end ──▶ keeper ── rank starter ── ranks and what they start
    caller ◀── exit code ───── keeper: is the caller there? is a process of the run left over?

This file is run by its path, alone and without site packages, so that it is there in an instant;
or it is forked (`fork_server`) from a process that has already imported what the ranks run. What a
run starts and leaves behind becomes a child of the keeper, which ends it. A keeper that is killed
takes the starter with it (`rank_starter`), and that its ranks.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

POLL_SECONDS = 0.1
"""How often the keeper looks around."""

STOP_SECONDS = 12.0
"""How long a command gets to stop what it has started."""

ORPHAN_SECONDS = 3.0
"""How long ranks whose starter is gone get to say so, and to end."""

STOP, END = b"stop\n", b"end\n"
"""What the caller says: stop the command; the folder is not needed any more."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Command(Protocol):
    """A command that runs, as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: when it runs for longer.
        """

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""

    def kill(self) -> None:
        """End it."""


def spawn(order: dict[str, Any]) -> Command:
    """Begin the command of an order as a program of its own, which ends with the keeper."""
    with open(order["log"], "wb") as log:
        return subprocess.Popen(
            order["command"],
            cwd=order["folder"],
            env=order["environment"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: _control(PR_SET_PDEATHSIG, signal.SIGTERM),
        )


class Keeper:
    """One run: its folder and its command.

    Args:
        folder: which is removed at the end.
        is_alone: whether the caller is gone.
        begin: begins the command of an order.
    """

    def __init__(
        self,
        folder: str,
        is_alone: Callable[[], bool],
        begin: Callable[[dict[str, Any]], Command] = spawn,
    ) -> None:
        self._folder, self._is_alone, self._begin = folder, is_alone, begin
        self._told = b""
        self._ended = False

    def main(self) -> None:
        """Run the command that the caller tells, and remove the folder when the caller ends."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        _control(PR_SET_CHILD_SUBREAPER, 1)
        try:
            order = self._line()
            if order:
                code = self._run(json.loads(order))
                os.write(1, f"{code}\n".encode())
                while not self._is_over() and END not in self._told:
                    self._listen(POLL_SECONDS)
        except BrokenPipeError:
            pass  # The caller has gone meanwhile.
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, order: dict[str, Any]) -> int:
        process = self._begin(order)
        try:
            while process.poll() is None and not self._is_over() and not self._told:
                self._listen(POLL_SECONDS)
        finally:
            _stop(process)
            end_descendants()
        return process.wait()

    def _is_over(self) -> bool:
        """Whether the caller wants no more, is gone, or the keeper has been asked to end."""
        return self._ended or self._is_alone()

    def _line(self) -> bytes:
        """The next line of the caller; nothing when it is gone before, or has nothing to run.

        More lines may have come with it, where the caller was quicker than this process began.
        """
        while b"\n" not in self._told and not self._is_over():
            self._listen(POLL_SECONDS)
        line, _, self._told = self._told.partition(b"\n")
        return b"" if self._is_over() or line == END.strip() else line

    def _listen(self, seconds: float) -> None:
        """Take what the caller says within some seconds; its end of the pipe is its life."""
        if can_be_read(0, seconds):
            said = os.read(0, 1 << 16)
            self._told += said
            self._ended = self._ended or not said

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ended = True


def can_be_read(file: int | Any, seconds: float | None = 0.0) -> bool:
    """Whether a file has something to say or has ended, within some seconds; None is for ever.

    Whatever its number is: `select` knows none from 1024 on.
    """
    waits = select.poll()
    waits.register(file, select.POLLIN)
    return bool(waits.poll(None if seconds is None else math.ceil(seconds * 1e3)))


def _control(option: int, value: int) -> None:
    """Ask Linux something about this process; elsewhere it is not asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stop(process: Command) -> None:
    """Ask the command to stop, and so its ranks; insist if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        end_descendants(patience=0.0)


def end_descendants(patience: float = ORPHAN_SECONDS) -> None:
    """Wait a little for what this process's processes have left behind, and then end it."""
    until = time.monotonic() + patience
    while left := _descendants():
        if time.monotonic() >= until:
            for pid in left:
                _kill(pid)
        _reap()
        time.sleep(POLL_SECONDS / 2)
    _reap()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> list[int]:
    """Processes that this one has started, or those that they have, and that still run."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    ended: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")) if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        children[int(parent)].append(int(name))
        if state in "ZX":
            ended.add(int(name))
    found: list[int] = []
    left = [os.getpid()]
    while left:
        own = children[left.pop()]
        found.extend(pid for pid in own if pid not in ended)
        left.extend(own)
    return found


if __name__ == "__main__":
    caller, place = int(sys.argv[1]), sys.argv[2]
    Keeper(place, lambda: os.getppid() != caller).main()
