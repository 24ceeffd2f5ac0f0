"""Starts the ranks of a run on one machine, and ends them together.

    keeper ──▶ starter, which imports what the ranks run ── fork ──▶ rank 0, rank 1, …

    logs/RANK/stdout.log, stderr.log, error.json   what a rank says, and the error that ends it
    logs/ended.json                                the rank that failed first, and its exit code
    store/rank-RANK                                the process of a rank

This file is run by its path. Importing torch and the executor takes longer than many a run, so it
is done once, and ranks are forked from what is there then. That is safe while there is one thread.
Modules of others, ranks that talk by NCCL (CUDA does not survive a fork), and all ranks where a
second thread runs are programs of their own instead, and import for themselves.

Ranks are told what torchrun tells its own, so one of them need not know which has started it.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

GRACE_SECONDS = 5.0
"""How long ranks that are asked to stop get until they are killed."""

ENDED = "ended.json"
"""The file, among the logs, of which rank failed first."""

PID_FILE = "rank-"
"""How the files in the folder of a run begin that have the process of a rank in them."""

FORK, EXEC = "fork", "exec"
"""How ranks are started: forked where that is safe, or as programs of their own."""

HEARD = (signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class Starter:
    """The ranks of one run.

    Args:
        num_ranks: how many.
        logs: folder for what they say.
        store: folder of the run, where they find one another.
        command: the module that they run, and its arguments.
    """

    def __init__(self, num_ranks: int, logs: Path, store: Path, command: list[str]) -> None:
        self._num_ranks, self._logs, self._store = num_ranks, logs, store
        self._command = command
        self._run, self._port = secrets.token_hex(16), _free_port()
        self._running: dict[int, int] = {}
        self._code = 0
        self._is_stopping = False

    def main(self, *, forks: bool) -> int:
        """Start the ranks and wait for their end; the exit code of the run."""
        module = self._forked_module() if forks else None
        # Without a handler some systems would not even keep it for `sigwait`.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        for rank in range(self._num_ranks):
            try:
                self._start(rank, module, before)
            except OSError as error:
                self._not_started(rank, error)
                break
        while self._running:
            self._hear(signal.sigwait(HEARD))
        return self._code

    def _forked_module(self) -> ModuleType | None:
        """What ranks run, imported for all of them; None, and why, where a fork is not safe."""
        module, others = load_for_forks(self._command[0])
        if others:
            _say(
                f"ranks are programs of their own, which takes them longer to start: a fork is "
                f"not safe beside {', '.join(others)}"
            )
            return None
        return module

    def _start(self, rank: int, module: ModuleType | None, before: Iterable[int]) -> None:
        (self._logs / str(rank)).mkdir()
        # Before the fork, so that what other libraries do at one can see which rank it makes.
        os.environ.update(self._settings(rank))
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(rank, starter, before)
                self._work(module)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._running[pid] = rank
        (self._store / f"{PID_FILE}{rank}").write_text(f"{pid} {begun_at(pid)}", "utf-8")

    def _settings(self, rank: int) -> dict[str, str]:
        """What torchrun tells a rank of one node, in its environment."""
        size = str(self._num_ranks)
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_PORT": self._port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self._run,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(self._logs / str(rank) / "error.json"),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }

    def _become(self, rank: int, starter: int, before: Iterable[int]) -> None:
        """Make this new process a rank's: it ends with the starter, and has its own files."""
        end_with_parent(starter)
        os.setsid()
        for number, name in ((1, "stdout.log"), (2, "stderr.log")):
            path = self._logs / str(rank) / name
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _work(self, module: ModuleType | None) -> NoReturn:
        """Run the module as `python -m` would, in this process or in place of it."""
        name, *arguments = self._command
        if module is None:
            os.execv(sys.executable, [sys.executable, "-u", "-m", name, *arguments])
        _draw_anew()
        sys.argv = [str(module.__file__), *arguments]
        sys.modules["__main__"] = module
        run_to_its_end(module.main)

    # -- the end --------------------------------------------------------------------------------

    def _hear(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGALRM:
            for pid in self._running:
                _signal(pid, signal.SIGKILL)
        else:
            self._code = self._code or 128 + number
            self._stop()

    def _reap(self) -> None:
        """Take note of ranks that have ended; the first that failed ends the others."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            rank = self._running.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if rank is not None and code != 0 and self._code == 0:
                self._code = 1
                _write(self._logs / ENDED, {"rank": rank, "code": code})
                _say(f"rank {rank} (process {pid}) ended with exit code {code}")
                self._stop()

    def _stop(self) -> None:
        """Ask the ranks that run to end, and set the time after which they are killed."""
        if not self._is_stopping:
            self._is_stopping = True
            for pid in self._running:
                _signal(pid, signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def _not_started(self, rank: int, error: OSError) -> None:
        """Leave word, in the rank's own place, that the system let us start no more."""
        self._code = 1
        text = f"{type(error).__name__}: it could not be started: {error}"
        extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
        path = self._logs / str(rank) / "error.json"
        _write(path, {"message": {"message": text, "extraInfo": extra}})
        _say(f"rank {rank} could not be started: {error}")
        self._stop()


def run_to_its_end(main: Callable[[], object]) -> NoReturn:
    """Run a function as a program's only one, and end the process as Python would.

    Hooks run, and threads that are no daemons are waited for. What Python and libraries in C then
    take apart is left to the system, as in every process that multiprocessing forks.
    """
    code = 0
    try:
        try:
            main()
        except SystemExit as end:
            code = _exit_code(end.code)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def _exit_code(told: object) -> int:
    """What `sys.exit` of something comes to: a number, or text to write and 1."""
    if told is None:
        return 0
    if isinstance(told, int):
        return told & 0xFF
    sys.stderr.write(f"{told}\n")
    return 1


def load_for_forks(name: str) -> tuple[ModuleType, list[str]]:
    """Import what ranks run, and what it would load in each of them.

    Returns:
        The module that `python -m` would run for a name, which has a `main`, and the other
        threads of this process, beside which a fork is not safe.
    """
    module = _imported(name)
    if hasattr(module, "before_fork"):
        module.before_fork()
    return module, other_threads()


def other_threads() -> list[str]:
    """The threads of this process but the main one, in words; empty where it has no other.

    A first fork lets libraries end the threads that they start again when they need them, as
    OpenBLAS does, of which numpy and scipy have a pool each from when they are imported.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return ["threads that nobody can count here"]
    if len(list(tasks.iterdir())) > 1:
        with warnings.catch_warnings(action="ignore"):  # That there are threads.
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    own = str(os.getpid())
    known = {str(each.native_id): each.name for each in threading.enumerate()}
    return [
        f"thread {known.get(each.name, each.name)!r}"
        for each in sorted(tasks.iterdir())
        if each.name != own
    ]


def _imported(name: str) -> ModuleType:
    """The module that `python -m` would run for a name, which has a `main`."""
    found = importlib.util.find_spec(name)
    is_package = found is not None and found.submodule_search_locations is not None
    return importlib.import_module(f"{name}.__main__" if is_package else name)


def _draw_anew() -> None:
    """Give this process random numbers of its own where a fork shares them.

    Python's own begin anew by themselves; torch's begin alike in every process.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def end_with_parent(parent: int) -> None:
    """Let Linux ask this process to stop when its parent ends, or end now if it has already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _signal(pid: int, number: int) -> None:
    """Send a signal to a rank and what is of its session, such as workers that load data."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # It has no session yet.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def begun_at(pid: int) -> str:
    """When the system began a process, in its ticks; with its number that tells it from others.

    Empty where it is gone, or where the system does not say.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _write(path: Path, value: object) -> None:
    """Write a file whole."""
    path.with_suffix(".new").write_text(json.dumps(value), "utf-8")
    path.with_suffix(".new").replace(path)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def start(arguments: list[str]) -> int:
    """Start ranks and wait for their end; the exit code of the run.

    Args:
        arguments: how they are started (`FORK` or `EXEC`), how many they are, folder of their
            logs, folder of the run, the module that they run, and its arguments.
    """
    how, count, logs, store, *command = arguments
    return Starter(int(count), Path(logs), Path(store), command).main(forks=how == FORK)


if __name__ == "__main__":
    os._exit(start(sys.argv[1:]))
