"""Ranks that watch one another: what stops every rank when one is killed, hangs or is cut off.

Each process tells torch's store every second where it is. Rank 0 reads what all have told, and the
others read what rank 0 found, so a second takes as many messages as there are ranks.

    every rank   where it is ──▶ store ──▶ rank 0: is anyone silent? does anyone go on?
    every rank   ◀── fault ◀──── store ◀── the first rank that failed, or rank 0's finding

A rank that waits in a collective cannot be interrupted, so a thread ends its process: it leaves
the error as torchrun wants it, writes it to standard error and exits.

Watching begins before the ranks join one another, so that it also tells of one that never comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from stratagem.executor.backends.rank_stores import STORE_FOLDER, WatchStore, watch_store
from stratagem.executor.watching.judges import PERIOD, Beat, Follower, Judge, Limits, not_arrived
from stratagem.executor.watching.process_activity import (
    Activity,
    ranks_in_folder,
    ranks_with_setting,
    state_of,
)
from stratagem.executor.watching.rank_place import Place, RunPoint
from stratagem.executor.watching.termination import TerminationSignal

JUDGE_SECONDS = 0.25
"""How often a rank looks whether it must stop."""

CLOSING_SECONDS = 10.0
"""How long a rank that failed may take to end by itself."""


class RankError(RuntimeError):
    """Another rank died, stopped answering or failed; says which, and where it was."""


class Watch:
    """This process's part in watching, as a context.

    Example:
        >>> with Watch(rank, world_size, Limits()) as watch:  # doctest: +SKIP
        ...     with watch.guard():
        ...         watch.place.enter(0, "taking the batch")

    Args:
        rank: of this process.
        world_size: number of ranks.
        limits: how long to wait for another rank.

    Raises:
        RankError: when the store of the run cannot be reached.
    """

    def __init__(self, rank: int, world_size: int, limits: Limits) -> None:
        self.place = Place()
        self._rank, self._world_size, self._limits = rank, world_size, limits
        self._store = _connect(rank, limits)
        self._host = _host()
        self._activity = Activity()
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._closing: float | None = None
        self._failure = ""
        self._unheard = 0
        self._backend: Callable[[], str] = str
        self._alone: float | None = None
        self._ending = threading.Lock()
        self._count = 0
        self._signals = TerminationSignal()
        self._threads = [
            threading.Thread(target=run, daemon=True, name=f"stratagem {name}")
            for name, run in (("beats", self._beat), ("judge", self._judge))
        ]

    def __enter__(self) -> Watch:
        self._tell()
        self._signals.catch()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PERIOD)
        self._signals.release()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Tell the other ranks of an error in the block; say which rank is to blame for it.

        Raises:
            RankError: instead of what the backend says when it loses another rank.
        """
        try:
            yield
        except BaseException as error:
            where = self.place.now
            if isinstance(error, RuntimeError) and _lost_contact(error):
                raise RankError(self._blame(error, where)) from error
            first = (str(error).splitlines() or [""])[0]
            text = f"rank {self._rank} failed at {where}: {type(error).__name__}: {first}"
            self._failed(text)
            error.add_note(f"rank {self._rank} was at {where}")
            if isinstance(error, Exception):  # Before others hear of it, and end this process.
                with suppress(OSError):
                    get_error_handler().record_exception(error)
            self._accuse(text)
            raise
        else:
            self._stop.set()
            with suppress(RuntimeError):
                self._tell(done=True)

    def ask(self, backend: Callable[[], str]) -> None:
        """Ask a backend now and then what it has found wrong, which it says in words.

        What was issued to a device goes wrong there, and whoever waits for it would never hear.
        """
        self._backend = backend

    # -- what a rank tells ----------------------------------------------------------------------

    def _beat(self) -> None:
        """Tell and read once a period, until the end or until the store is gone."""
        first = self._rank == 0
        judge = Judge(self._world_size, self._limits) if first else Follower(self._limits)
        while not self._stop.wait(PERIOD):
            try:
                if self._closing is None:
                    self._tell()
                beats = self._beats(range(self._world_size) if first else [0])
                finding = judge(beats, {rank: self._quiet(beats[rank]) for rank in beats})
                if finding is not None:
                    self._accuse(finding.text)
                    self._kill(finding.silent)
                fault = self._fault()
                self._unheard = 0
            except RuntimeError:
                continue
            if fault is not None and self._closing is None:
                self._end(fault)

    def _tell(self, *, done: bool = False) -> None:
        self._count += 1
        working = self._activity.is_working()
        beat = Beat(self._count, self.place.now, self._host, os.getpid(), done, working)
        self._store.set(_beat_key(self._rank), msgspec.json.encode(beat).decode())

    def _beats(self, ranks: Any) -> dict[int, Beat]:
        """The last beat of each of `ranks` that has told anything."""
        known = [rank for rank in ranks if self._store.check([_beat_key(rank)])]
        texts = self._store.multi_get([_beat_key(rank) for rank in known]) if known else []
        return {
            rank: msgspec.json.decode(text, type=Beat)
            for rank, text in zip(known, texts, strict=True)
        }

    def _quiet(self, beat: Beat) -> int:
        """Periods that a rank may say nothing; of one elsewhere nobody knows what it does."""
        here = self._host and beat.host == self._host
        return self._limits.quiet(state_of(beat.pid) if here else "")

    def _accuse(self, text: str) -> None:
        """Let every rank know of a fault, unless one is known."""
        with suppress(RuntimeError):
            self._store.compare_set("fault", "", text)

    def _kill(self, rank: int) -> None:
        """End a stopped rank of this machine, which cannot be asked to end.

        Only what the system shows to be a rank of this run: what is in a store decides about no
        other process.
        """
        store = os.environ.get(STORE_FOLDER)
        if store is None:
            run = f"TORCHELASTIC_RUN_ID={os.environ.get('TORCHELASTIC_RUN_ID', '')}"
            pid = ranks_with_setting(run, self._parent).get(rank)
        else:
            pid = ranks_in_folder(Path(store), self._parent).get(rank)
        if pid is not None and state_of(pid) in "Tt":
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _fault(self) -> str | None:
        return self._store.get("fault").decode() if self._store.check(["fault"]) else None

    # -- what a rank concludes ------------------------------------------------------------------

    def _judge(self) -> None:
        """Stop the process when something is known to be wrong, whatever it waits in."""
        while not self._stop.is_set():
            terminated = self._signals.wait(JUDGE_SECONDS)
            self._unheard += 1
            if os.getppid() != self._parent:
                self._end(f"{_starter()}, which started this rank, is gone")
            if self._closing is not None:
                if time.monotonic() - self._closing > CLOSING_SECONDS:
                    self._end(self._failure)
            elif terminated:
                self._end(
                    self._found()
                    or self._missing()
                    or f"it was asked to stop (SIGTERM) at {self.place.now}"
                )
            elif (trouble := self._trouble(self._backend())) is not None:
                self._end(trouble)
            elif self._unheard * JUDGE_SECONDS > self._limits.silent + PERIOD:
                self._end(
                    f"rank {self._rank} has been cut off from rank 0 and the store of the run for "
                    f"{self._limits.silent:g} s; it was at {self.place.now}"
                )

    def _trouble(self, told: str) -> str | None:
        """Why to stop for what the backend has told: at once, unless another rank is to blame.

        A lost rank is known by its silence, if not by its own words, a while later.
        """
        if not told:
            return None
        text = f"rank {self._rank} failed at {self.place.now}: {told}"
        if not _is_of_others(told):
            self._accuse(text)
            return text
        self._alone = self._alone or time.monotonic()
        waited = time.monotonic() - self._alone
        return self._found() or (text if waited > self._limits.silent + 3 * PERIOD else None)

    def _blame(self, error: RuntimeError, where: RunPoint) -> str:
        """Why the backend lost another rank, once that is known."""
        until = time.monotonic() + self._limits.silent + 3 * PERIOD
        while time.monotonic() < until:
            found = self._found()
            if found is not None:
                return self._failed(f"{found}; rank {self._rank} stops at {where}")
            time.sleep(PERIOD / 10)
        return self._failed(f"rank {self._rank} lost another rank at {where}: {error}")

    def _failed(self, text: str) -> str:
        """From now on this rank is ending by itself."""
        self._failure = text
        self._closing = time.monotonic()
        return text

    def _found(self) -> str | None:
        """The fault that is known, or that a process of this machine is dead."""
        try:
            fault = self._fault()
            if fault is not None:
                return fault
            for rank, beat in self._beats(range(self._world_size)).items():
                ours = rank != self._rank and self._host and beat.host == self._host
                if ours and not beat.done and state_of(beat.pid) in "ZX":
                    text = f"rank {rank} (process {beat.pid}) died; it was last at {beat.where}"
                    self._accuse(text)
                    return text
        except RuntimeError:
            return None
        return None

    def _missing(self) -> str | None:
        """That ranks have never told anything, which is why the others are stopped."""
        with suppress(RuntimeError):
            known = self._beats(range(self._world_size))
            missing = [rank for rank in range(self._world_size) if rank not in known]
            if missing:
                return not_arrived(missing, f"when {_starter()} stopped the others")
        return None

    def _end(self, text: str) -> NoReturn:
        """End the process now, with an error that people find, and what started it."""
        with self._ending:
            error = RankError(f"{text}; rank {self._rank} stops at {self.place.now}")
            with suppress(OSError):
                get_error_handler().record_exception(error)
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{__name__}.{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            os._exit(1)


def _connect(rank: int, limits: Limits) -> WatchStore:
    try:
        return watch_store(rank, connect=limits.stalled, answer=limits.silent)
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} does not reach the store of the run within {limits.stalled:g} s: {error}"
        ) from error


def _starter() -> str:
    """What has started this rank."""
    return "torchrun" if os.environ.get(STORE_FOLDER) is None else "the rank starter"


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


_LOST_BY_NCCL = ("NCCL_ERROR_REMOTE_ERROR", "NCCL_ERROR_SYSTEM_ERROR")
"""What NCCL says, through CuPy, when another rank is gone; all else is this rank's own fault."""


def _is_of_others(text: str) -> bool:
    return any(each in text for each in ("gloo", *_LOST_BY_NCCL))


def _lost_contact(error: RuntimeError) -> bool:
    """Whether the backend complains that another rank is gone."""
    return isinstance(error, dist.DistError) or _is_of_others(str(error))


def _host() -> str:
    """What processes share that see each other's numbers; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
