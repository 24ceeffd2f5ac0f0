"""Background load: processes that run the same operator while it is timed.

The ranks of a plan on one CPU compute at the same time and share its memory bandwidth, so an
operator that runs alone is faster than it will be. Each process runs what it was last given, again
and again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from stratagem.basics.allocator import keep_freed_memory

Work = Callable[[], object]
MakeWork = Callable[[], Work]
"""Makes the work inside a process; it must pickle, as a partial of a module's function does."""

START_SECONDS = 120.0
"""How long a process may take to start and to do its work once."""
_PROGRAM = "from stratagem.profiler.machine.background_load import run_worker; run_worker()"


class BackgroundLoad:
    """Processes that keep a CPU busy; close it, or leave its context, to end them.

    Example:
        >>> with BackgroundLoad(1, threads=1) as load:  # doctest: +SKIP
        ...     load.run(partial(operator_work, operator, Training()))
        ...     time_operator(operator, Training())

    They also end when this process does, however it does.

    Args:
        num_processes: 0 makes no load.
        threads: of each of them.
    """

    def __init__(self, num_processes: int, *, threads: int) -> None:
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        for _ in range(num_processes):
            ours, theirs = Pipe()
            with theirs:
                program = [sys.executable, "-P", "-c", _PROGRAM]
                command = [*program, str(theirs.fileno()), str(threads)]
                process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), start_new_session=True
                )
            self._workers.append((process, ours))

    def run(self, make_work: MakeWork) -> None:
        """Make every process run this work; return when all have done so once.

        Raises:
            RuntimeError: when a process cannot; says why.
        """
        for _, connection in self._workers:
            connection.send(make_work)
        for answer in [self._answer(*worker) for worker in self._workers]:
            if answer:
                raise RuntimeError(f"background load: {answer}")

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.wait()
        self._workers.clear()

    def __enter__(self) -> BackgroundLoad:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], connection: Connection) -> str:
        if not connection.poll(START_SECONDS):
            return f"no sign of process {process.pid} within {START_SECONDS:g} s"
        try:
            return str(connection.recv())
        except EOFError:
            return f"process {process.pid} ended with status {process.wait()}"


def run_worker(arguments: Sequence[str] | None = None) -> None:
    """What a background process does: run the last work it was sent, until the pipe closes."""
    descriptor, threads = map(int, sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(threads)
    keep_freed_memory()
    with Connection(descriptor) as connection:
        work: Work | None = None
        while True:
            if work is None or connection.poll():
                try:
                    work = _start(connection.recv(), connection)
                except (EOFError, ConnectionError):
                    return
            else:
                work()


def _start(make_work: MakeWork, connection: Connection) -> Work | None:
    """Run new work once and report: nothing, or what is wrong."""
    try:
        work = make_work()
        work()
    except (RuntimeError, MemoryError, ValueError) as error:
        connection.send(str(error) or repr(error))
        return None
    connection.send("")
    return work
