"""The process that keepers of runs are forked from, which has imported what their ranks run.

    caller ── module ──▶ fork server, which imports it ──▶ caller
    caller ── folder of a run, ends of pipes ──▶ fork server ── fork ──▶ keeper
    caller ◀────────── handle of the keeper ──── fork server

Importing torch and the executor takes longer than many a run, and a notebook runs one plan after
the other. So what a second run imports stays for those that follow it: its keeper is forked from
here, from that the rank starter, and from that the ranks. Nothing of a run is kept, and no model
is ever imported here. The process ends when its caller closes the connection or is gone, when it
was idle for `IDLE_SECONDS`, and never before the keepers that it forked have ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from stratagem.executor.watching import keeper, rank_starter

IDLE_SECONDS = 120.0
"""How long the process waits for the next run, with its few hundred megabytes."""

POLL_SECONDS = 0.5
"""How often it looks around meanwhile."""

MESSAGE_BYTES = 1 << 16
"""The most that is said at once, with as many as three files."""


class ForkServer:
    """Forks keepers for one caller.

    Args:
        connection: to the caller, of sequenced packets.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._caller = os.pidfd_open(os.getppid())
        self._keepers: set[int] = set()

    def main(self) -> None:
        """Answer requests to the end."""
        last = time.monotonic()
        while not keeper.can_be_read(self._caller):
            self._reap()
            if keeper.can_be_read(self._connection, POLL_SECONDS):
                if not self._answer():
                    break
                last = time.monotonic()
            elif not self._keepers and time.monotonic() - last > IDLE_SECONDS:
                return
        self._connection.close()
        while self._keepers:  # Each ends when its caller does.
            time.sleep(POLL_SECONDS)
            self._reap()

    def _answer(self) -> bool:
        """Import a module and say what is in the way of forks, or fork; False at the end."""
        said, files, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 3)
        if not said:
            return False
        request = json.loads(said)
        if "module" in request:
            _, others = rank_starter.load_for_forks(request["module"])
            self._say({"threads": len(others)}, [])
        else:
            pid = self._fork(request["folder"], files)
            handle = os.pidfd_open(pid)
            self._say({"pid": pid}, [handle])
            for each in (handle, *files):
                os.close(each)
        return True

    def _say(self, answer: dict[str, int], files: list[int]) -> None:
        socket.send_fds(self._connection, [json.dumps(answer).encode()], files)

    def _fork(self, folder: str, files: list[int]) -> int:
        gc.collect()
        gc.freeze()  # What is imported is no garbage, and pages that nobody writes to are shared.
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self._connection.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                caller = self._caller
                keeper.Keeper(folder, lambda: keeper.can_be_read(caller), begin).main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        self._keepers.add(pid)
        return pid

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._keepers.discard(ended)


class ForkedCommand:
    """A forked process, as `subprocess.Popen` has those that it begins."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: when it runs for longer.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def begin(order: dict[str, Any]) -> keeper.Command:
    """Begin the command of an order: the rank starter by a fork, all others as programs."""
    head = ["-u", rank_starter.__file__]
    if order["command"][1:3] != head:
        return keeper.spawn(order)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rank_starter.end_with_parent(parent)
            _become(order)
            code = rank_starter.start(order["command"][3:])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return ForkedCommand(pid)


def _become(order: dict[str, Any]) -> None:
    """Make this new process what it would be, had the order's command been run as a program."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    os.close(log)
    os.close(nothing)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])


if __name__ == "__main__":
    try:
        ForkServer(socket.socket(fileno=int(sys.argv[1]))).main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # Whatever threads an import has left.
