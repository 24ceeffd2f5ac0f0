"""Other processes that do parts of a search.

Tables, bounds and baselines are Python, which uses one core. A part is a function of a state that
every process has and of its arguments, so it gives the same whoever does it, and a search the same
plan on any number of cores.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

import cloudpickle
import loky

from stratagem.search.collecting import seldom_collected

State = TypeVar("State")
Result = TypeVar("Result")

MOST = 7
"""Other processes at most: each has tables of its own in memory."""

_there: list[Any] = []
"""The state of a worker process, once it has begun."""


class Part(Generic[Result]):
    """Something to do, from `Workers.part`."""

    def __init__(
        self, workers: Workers[Any], job: Callable[..., Result], arguments: tuple[Any, ...]
    ) -> None:
        self.job, self.arguments = job, arguments
        self.future: Future[Result] = Future()
        self._workers = workers

    def result(self) -> Result:
        """What the part gives; until it is there, this process does parts that nobody has begun.

        Raises:
            Exception: what the job raised.
        """
        self._workers.help_until(self)
        return self.future.result()


class Workers(Generic[State]):
    """Processes beside this one, each with a state, that do parts of a search.

    They start with the first part. Where they cannot start, or one is killed, this process does
    what is left, and `failure` says why.

    Example:
        >>> with Workers([2.0, 3.0], list, ((2.0, 3.0),), count=0) as workers:
        ...     parts = [workers.part(list.count, x) for x in (1.0, 2.0)]
        ...     [part.result() for part in parts]
        [0, 1]

    Args:
        state: what jobs get first in this process.
        remake: makes the same state in another process.
        arguments: of `remake`; they and the jobs must be such that cloudpickle can write them.
        count: other processes, `MOST` at most; 0 does everything here.
    """

    def __init__(
        self,
        state: State,
        remake: Callable[..., State],
        arguments: tuple[Any, ...],
        count: int,
    ) -> None:
        self.failure = ""
        self._state, self._count = state, min(count, MOST)
        self._make = (remake, arguments)
        self._executor: loky.ProcessPoolExecutor | None = None
        self._waiting: deque[Part[Any]] = deque()
        self._busy = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Workers[State]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drop()
        executor, self._executor, self._count = self._executor, None, 0
        if executor is not None:
            executor.shutdown(wait=True, kill_workers=True)

    @property
    def is_alone(self) -> bool:
        """Whether this process does everything."""
        return self._count <= 0

    def part(self, job: Callable[..., Result], *arguments: Any) -> Part[Result]:
        """Have `job(state, *arguments)` done by whoever is free."""
        part = Part(self, job, arguments)
        with self._changed:
            self._waiting.append(part)
        self._feed()
        return part

    def drop(self) -> None:
        """Forget the parts that nobody has begun."""
        with self._changed:
            for part in self._waiting:
                part.future.cancel()
            self._waiting.clear()

    def help_until(self, part: Part[Any]) -> None:
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

    def _feed(self) -> None:
        """Give parts to processes that have none."""
        while True:
            with self._changed:
                if not self._waiting or self._busy >= self._count:
                    return
                part = self._waiting.popleft()
                self._busy += 1
            try:
                there = self._started().submit(_do, part.job, part.arguments)
            except Exception as error:
                self._give_up(part, error)
            else:
                there.add_done_callback(partial(self._done, part))

    def _started(self) -> loky.ProcessPoolExecutor:
        if self._executor is None:
            state = cloudpickle.dumps(self._make)
            self._executor = loky.ProcessPoolExecutor(
                self._count, timeout=None, initializer=_begin, initargs=(state,)
            )
        return self._executor

    def _done(self, part: Part[Any], there: Future[Any]) -> None:
        if there.cancelled():
            return
        error = there.exception()
        if isinstance(error, BrokenProcessPool):
            self._give_up(part, error)
            return
        if error is not None:
            part.future.set_exception(error)
        else:
            part.future.set_result(there.result())
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()
        self._feed()

    def _give_up(self, part: Part[Any], error: Exception) -> None:
        """Have this process do what is left."""
        with self._changed:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            self._count, self._busy = 0, self._busy - 1
            self._waiting.appendleft(part)
            self._changed.notify_all()


def _begin(state: bytes) -> None:
    """Make the state of a worker process, which leaves Ctrl-C to the one that it works for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remake, arguments = cloudpickle.loads(state)
    _there.append(remake(*arguments))


def _do(job: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    with seldom_collected():
        return job(_there[0], *arguments)
