"""Other processes that do parts of a search.

Tables, bounds and baselines are Python, which uses one core. A part is a function of a state that
every process has and of its arguments, so it gives the same whoever does it, and a search the same
plan on any number of cores.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, TypeVar

import cloudpickle

from stratagem.searcher.processes.garbage_collection import seldom_collected

State = TypeVar("State")
Result = TypeVar("Result")

MOST, MOST_BYTES = 7, 4 * 10**9
"""Other processes at most, and the memory that each may come to need for tables of its own."""
LEAVING = 2.0
"""Seconds for threads to end in, which wait for nothing by then: an interrupt that struck while
the lock was taken must not keep the search from its end."""


def worker_count(cores: int | None = None) -> int:
    """How many other processes there are cores and memory for, in `Workers`.

    Example:
        >>> worker_count(1)
        0

    Args:
        cores: as many as this process may use when left out.
    """
    others = (usable_cores() if cores is None else cores) - 1
    return max(0, min(others, MOST, _memory_bytes() // MOST_BYTES - 1))


def _memory_bytes() -> int:
    """Memory of the machine, or of the container; much where neither says."""
    found = [2**62]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkPart(Generic[Result]):
    """Something to do, from `Workers.part`."""

    def __init__(
        self, workers: Workers[Any], job: Callable[..., Result], arguments: tuple[Any, ...]
    ) -> None:
        self.job, self.arguments = job, arguments
        self.future: Future[Result] = Future()
        self._workers = workers

    @property
    def is_done(self) -> bool:
        """Whether its result is there."""
        return self.future.done() and self.future.exception() is None

    def result(self) -> Result:
        """What the part gives; until it is there, this process does parts that nobody has begun.

        Raises:
            Exception: what the job raised.
        """
        self._workers.help_until(self)
        return self.future.result()


class Workers(Generic[State]):
    """Processes beside this one, each with a state, that do parts of a search.

    They start with the first part, as fresh interpreters: a fork is unsafe beside threads and
    devices, and `multiprocessing` would run a script that starts a search once more in each. Where
    one cannot start, or is killed, this process does what is left, and `failure` says why.

    Example:
        >>> with Workers([2.0, 3.0], list, ((2.0, 3.0),), count=0) as workers:
        ...     parts = [workers.part(list.count, x) for x in (1.0, 2.0)]
        ...     [part.result() for part in parts]
        [0, 1]

    Args:
        state: what jobs get first in this process.
        remake: makes the same state in another process.
        arguments: of `remake`; they and the jobs must be such that cloudpickle can write them.
        count: other processes (see `worker_count`); 0 does everything here.
    """

    def __init__(
        self,
        state: State,
        remake: Callable[..., State],
        arguments: tuple[Any, ...],
        count: int,
    ) -> None:
        self.failure = ""
        self._state, self._count = state, max(0, count)
        self._make = (remake, arguments)
        self._waiting: deque[WorkPart[Any]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = False
        self._once: set[Callable[..., object]] = set()

    def __enter__(self) -> Workers[State]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        with self._changed:
            self._is_over = True
            for process in self._processes:
                process.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(LEAVING)

    @property
    def is_alone(self) -> bool:
        """Whether this process does everything."""
        return self._count == 0

    def part(self, job: Callable[..., Result], *arguments: Any) -> WorkPart[Result]:
        """Have `job(state, *arguments)` done by whoever is free."""
        part = WorkPart(self, job, arguments)
        with self._changed:
            self._waiting.append(part)
            self._changed.notify_all()
        if not self._threads:
            self._start()
        return part

    def once(self, job: Callable[..., object]) -> None:
        """Have `job(state)` done, which nobody waits for, if it was not asked for before."""
        if job not in self._once:
            self._once.add(job)
            self.part(job)

    def results(
        self, parts: Iterable[WorkPart[Result]], stop: Callable[[], bool]
    ) -> Iterator[Result]:
        """What parts give, in order; those behind are forgotten where `stop` says so."""
        for part in parts:
            if stop():
                self.drop()
                return
            yield part.result()

    def drop(self) -> None:
        """Forget the parts that nobody has begun."""
        with self._changed:
            for part in self._waiting:
                part.future.cancel()
            self._waiting.clear()

    def help_until(self, part: WorkPart[Any]) -> None:
        """Do parts that nobody has begun until `part` is done."""
        while True:
            with self._changed:
                while not (part.future.done() or self._waiting):
                    self._changed.wait()
                if part.future.done():
                    return
                ours = part if part in self._waiting else self._waiting[0]
                self._waiting.remove(ours)
            try:
                ours.future.set_result(ours.job(self._state, *ours.arguments))
            except Exception as error:
                ours.future.set_exception(error)

    # -- in threads, one for each process ------------------------------------------------------

    def _start(self) -> None:
        """Start the processes, each with a thread that gives it parts."""
        if self._count == 0:
            return
        try:
            state = cloudpickle.dumps(self._make)
        except Exception as error:
            self._fail(error)
            return
        self._threads = [
            threading.Thread(target=self._serve, args=(state,), daemon=True)
            for _ in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, state: bytes) -> None:
        """Give one process part after part."""
        part: WorkPart[Any] | None = None
        try:
            with self._started() as process:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(state)
                while (part := self._next_part()) is not None:
                    process.stdin.write(cloudpickle.dumps((part.job, part.arguments)))
                    process.stdin.flush()
                    error, result = pickle.load(process.stdout)
                    with self._changed:
                        if error is None:
                            part.future.set_result(result)
                        else:
                            part.future.set_exception(error)
                        self._changed.notify_all()
                process.kill()
        except Exception as error:
            self._fail(error, part)

    def _started(self) -> subprocess.Popen[bytes]:
        """A process of its own session, so that Ctrl-C is left to this one."""
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        pipe = subprocess.PIPE
        with self._changed:
            if self._is_over:
                raise InterruptedError("the search is over")
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], stdin=pipe, stdout=pipe, start_new_session=True
            )
            self._processes.append(process)
        return process

    def _next_part(self) -> WorkPart[Any] | None:
        """A part that nobody has begun, once there is one; None when there will be none."""
        with self._changed:
            while not (self._waiting or self._is_over or self._count == 0):
                self._changed.wait()
            return self._waiting.popleft() if self._waiting and self._count else None

    def _fail(self, error: Exception, part: WorkPart[Any] | None = None) -> None:
        """Have this process do what is left."""
        with self._changed:
            if not self._is_over:
                self.failure = self.failure or f"{type(error).__name__}: {error}"
            self._count = 0
            if part is not None:
                self._waiting.appendleft(part)
            self._changed.notify_all()


def serve() -> None:
    """Do the parts that come through standard input, until it is closed.

    Results go to what standard output was; what a job prints goes to standard error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jobs: BinaryIO = sys.stdin.buffer
    remake, arguments = pickle.load(jobs)
    state = remake(*arguments)
    while True:
        try:
            job, arguments = pickle.load(jobs)
        except EOFError:
            return
        results.write(_answer(job, state, arguments))
        results.flush()


def _answer(job: Callable[..., object], state: object, arguments: tuple[Any, ...]) -> bytes:
    """(error, result) of a job, one of them None."""
    try:
        with seldom_collected():
            return pickle.dumps((None, job(state, *arguments)))
    except Exception as error:
        error.add_note(f"In another process:\n{traceback.format_exc()}")
        try:
            return pickle.dumps((error, None))
        except Exception:
            return pickle.dumps((RuntimeError(repr(error)), None))
