"""What begins the keeper of a run: a program, or from the second run on a fork of what stays.

The first run of a caller imports torch and the executor for its ranks; most callers run one. A
second one in the same environment has them imported by a process that stays (`fork_server`), so
that those behind it begin in an instant; so has a first one that others follow as a rule, such as
the measurement of a link.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from stratagem.executor.watching import fork_server, keeper

LOAD_SECONDS = 120.0
"""How long imports may take; the run then begins as a first one does, and says what is wrong."""

CLOSE_SECONDS = 1.0
"""How long a process that is needed no more is waited for; with a run of its own it lives on."""

STDERR = 2

CHANGING = ("PYTEST_CURRENT_TEST",)
"""Variables that are another in every run, and that nothing reads when it is imported."""


class RunKeeper(Protocol):
    """The keeper of a run, as `subprocess.Popen` has it; `stdin` and `stdout` are pipes."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, when it has ended; None where the system tells only its parent.

        Raises:
            subprocess.TimeoutExpired: when it lives on for longer.
        """

    def kill(self) -> None:
        """End it."""


BeginKeeper = Callable[[Path], RunKeeper]
"""Begins the keeper of a folder."""


def spawned_keeper(folder: Path) -> RunKeeper:
    """A keeper that is a program of its own."""
    command = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def keeper_for(
    module: str, environment: Mapping[str, str], *, others_follow: bool = False
) -> BeginKeeper:
    """What begins the keeper of a run whose ranks are forked.

    Example:
        >>> from stratagem.executor.watching.run_folder import Scratch
        >>> with Scratch(keeper_for("stratagem.executor", os.environ)) as scratch:
        ...     scratch.run(["true"], log=scratch.folder / "log")
        0

    Args:
        module: what the ranks run, one of ours. Where it is to be forked it is imported here.
        environment: of the run, without what is said of this run only.
        others_follow: whether a first run in an environment is taken for one of several.
    """
    with _LOCK:
        _ENDING[:] = [each for each in _ENDING if each.poll() is None]
        return _kept().keeper_for(module, environment, others_follow)


@atexit.register
def keep_no_more() -> None:
    """End the process that keeps imports for the next run, if there is one."""
    with _LOCK:
        _kept().close()


class ForkedKeeper:
    """A keeper that a fork server has forked: its process is known by a handle."""

    def __init__(self, pid: int, handle: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self._handle = pid, handle
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout

    def __del__(self) -> None:
        os.close(self._handle)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: when it lives on for longer.
        """
        if not keeper.can_be_read(self._handle, timeout):
            raise subprocess.TimeoutExpired("the keeper", timeout or 0.0)

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class _Server:
    """A fork server, as its caller sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = map(_beside_streams, pair)
        number = theirs.fileno()
        self._connection = ours
        ours.settimeout(LOAD_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", fork_server.__name__, str(number)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )

    def load(self, module: str) -> bool:
        """Have a module imported; whether keepers can then be forked.

        Raises:
            OSError: when the process is gone, or does not answer in time.
        """
        answer, _ = self._ask({"module": module}, [])
        return not answer["threads"]

    def fork(self, folder: Path) -> RunKeeper:
        """Have a keeper forked for a folder.

        Raises:
            OSError: when the process is gone, or does not answer in time.
        """
        opened: list[int] = []
        try:
            opened.append(_stderr())
            opened.extend(os.pipe())
            opened.extend(os.pipe())
            stderr, theirs_in, stdin, stdout, theirs_out = opened
            answer, handles = self._ask({"folder": str(folder)}, [theirs_in, theirs_out, stderr])
            if not handles:  # The system drops what this process may not open.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except BaseException:
            for each in opened:
                os.close(each)
            raise
        for each in (stderr, theirs_in, theirs_out):
            os.close(each)
        (handle,) = handles
        os.set_inheritable(handle, False)
        return ForkedKeeper(answer["pid"], handle, open(stdin, "wb"), open(stdout, "rb"))

    def _ask(self, request: dict[str, str], files: list[int]) -> tuple[dict[str, int], list[int]]:
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        said, handles, _, _ = socket.recv_fds(self._connection, fork_server.MESSAGE_BYTES, 1)
        if not said:
            raise ConnectionResetError("the fork server has ended")
        return json.loads(said), handles

    def close(self) -> None:
        """Let it end, which it does when its last keeper has."""
        with suppress(OSError):  # Also where a fork of this process has the connection, too.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            _ENDING.append(self._process)


class _KeptServer:
    """What one process keeps for its next run: a fork server, once two runs were alike."""

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None
        self._inherited: tuple[object, ...] = ()
        self._server: _Server | None = None
        self._unsafe: set[str] = set()

    def keeper_for(
        self, module: str, environment: Mapping[str, str], others_follow: bool
    ) -> BeginKeeper:
        """What `keeper_for` says; modules that cannot be forked are known from then on."""
        told = {name: each for name, each in environment.items() if name not in CHANGING}
        inherited = _inherited()
        if (told, inherited) != (self._environment, self._inherited):
            self.close()
            self._environment, self._inherited, self._unsafe = told, inherited, set()
            if not others_follow:
                return spawned_keeper
        if module in self._unsafe or not _can_stay(told):
            return spawned_keeper
        if not self._is_loaded(module, told):
            self._unsafe.add(module)
            return spawned_keeper
        return partial(self._fork, self._server)

    def close(self) -> None:
        """Keep nothing any more."""
        if self._server is not None:
            self._server.close()
        self._server = None

    def _is_loaded(self, module: str, environment: Mapping[str, str]) -> bool:
        """Have a module imported; whether keepers of its runs can be forked."""
        had = self._server is not None
        if self._server is None:
            self._server = _Server(environment)
        try:
            return self._server.load(module)
        except OSError:
            self.close()
            # One that had been idle for long has ended.
            return had and self._is_loaded(module, environment)
        except BaseException:
            self.close()  # Its answer is still to come.
            raise

    def _fork(self, server: _Server | None, folder: Path) -> RunKeeper:
        with _LOCK:
            # Another thread may have begun one with another environment meanwhile.
            if server is not None and server is self._server:
                try:
                    return server.fork(folder)
                except BaseException as error:
                    self.close()  # An answer may still be to come.
                    if not isinstance(error, OSError):
                        raise
        return spawned_keeper(folder)


def _can_stay(environment: Mapping[str, str]) -> bool:
    """Whether this system has handles of processes, and paths mean the same in all folders."""
    paths = environment.get("PYTHONPATH")
    return hasattr(os, "pidfd_open") and (
        not paths or all(Path(each).is_absolute() for each in paths.split(os.pathsep))
    )


def _inherited() -> tuple[object, ...]:
    """What a process has from the one that begins it, beside the environment: cores and limits."""
    if sys.platform != "linux":
        return ()
    umask = ""
    with suppress(OSError):
        umask = Path("/proc/self/status").read_text().partition("Umask:")[2].partition("\n")[0]
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = tuple(resource.getrlimit(getattr(resource, name)) for name in names)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return frozenset(os.sched_getaffinity(0)), nice, umask, limits


def _beside_streams(connection: socket.socket) -> socket.socket:
    """A connection whose number is that of no standard stream, which a child has its own of."""
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, STDERR + 1))


def _stderr() -> int:
    """This process's stream for errors; where it has closed it, what is written goes nowhere."""
    try:
        return os.dup(STDERR)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _lock_anew() -> None:
    """Let a fork begin with a lock of its own: the thread that had it is not in there."""
    global _LOCK
    _LOCK = threading.RLock()


_LOCK = threading.RLock()
os.register_at_fork(after_in_child=_lock_anew)
_ENDING: list[subprocess.Popen[bytes]] = []
"""Processes that end with their last run."""

_KEPT: dict[int, _KeptServer] = {}
"""What each process keeps, by its number: a fork of one that has run something has its own."""


def _kept() -> _KeptServer:
    return _KEPT.setdefault(os.getpid(), _KeptServer())
