"""Ranks that watch one another: what stops every rank when one is killed, hangs or is cut off.

Each process tells torch's store every second where it is. Rank 0 reads what all have told, and the
others read what rank 0 found, so a second takes as many messages as there are ranks.

    every rank   where it is ──▶ store ──▶ rank 0: is anyone silent? does anyone go on?
    every rank   ◀── fault ◀──── store ◀── the first rank that failed, or rank 0's finding

A rank that waits in a collective cannot be interrupted, so a thread ends its process: it leaves
the error for torchrun, writes it to standard error and exits.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from stratagem.executor.where import Place, Where

PERIOD = 1.0
"""Seconds between two messages of a rank."""

JUDGE_SECONDS = 0.25
"""How often a rank looks whether it must stop."""

CLOSING_SECONDS = 10.0
"""How long a rank that failed may take to end by itself."""


class RankError(RuntimeError):
    """Another rank died, stopped answering or failed; says which, and where it was."""


@dataclass(frozen=True)
class Limits:
    """How long ranks wait for one another.

    Attributes:
        silent: seconds after which a rank that says nothing counts as lost.
        stalled: seconds after which a step in which no rank goes on counts as stuck.
    """

    silent: float = 10.0
    stalled: float = 20.0

    @property
    def backend(self) -> float:
        """Seconds for an operation of the backend, which is to give up after the watch does."""
        return max(120.0, 4 * (self.silent + self.stalled))


@dataclass(frozen=True)
class Beat:
    """What a rank tells: where it is, how often it has told, and the process that it is."""

    count: int
    where: Where
    host: str
    pid: int
    done: bool = False


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
    """

    def __init__(self, rank: int, world_size: int, limits: Limits) -> None:
        self.place = Place()
        self._rank, self._world_size, self._limits = rank, world_size, limits
        self._store = _connect(limits)
        self._host = _host()
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._closing: float | None = None
        self._failure = ""
        self._unheard = 0
        self._ending = threading.Lock()
        self._count = 0
        self._signals = _Signals()
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
            self._accuse(text)
            error.add_note(f"rank {self._rank} was at {where}")
            raise
        else:
            self._stop.set()
            with suppress(RuntimeError):
                self._tell(done=True)

    # -- what a rank tells ----------------------------------------------------------------------

    def _beat(self) -> None:
        """Tell and read once a period, until the end or until the store is gone."""
        judge = _Judge(self._world_size, self._limits) if self._rank == 0 else _Follower()
        limit = max(2, round(self._limits.silent / PERIOD))
        while not self._stop.wait(PERIOD):
            try:
                if self._closing is None:
                    self._tell()
                beats = self._beats(range(self._world_size) if self._rank == 0 else [0])
                finding = judge(beats, limit)
                if finding is not None:
                    self._accuse(finding)
                fault = self._fault()
                self._unheard = 0
            except RuntimeError:
                continue
            if fault is not None and self._closing is None:
                self._end(fault)

    def _tell(self, *, done: bool = False) -> None:
        self._count += 1
        beat = Beat(self._count, self.place.now, self._host, os.getpid(), done)
        self._store.set(_beat_key(self._rank), msgspec.json.encode(beat).decode())

    def _beats(self, ranks: Any) -> dict[int, Beat]:
        """The last beat of each of `ranks` that has told anything."""
        known = [rank for rank in ranks if self._store.check([_beat_key(rank)])]
        texts = self._store.multi_get([_beat_key(rank) for rank in known]) if known else []
        return {
            rank: msgspec.json.decode(text, type=Beat)
            for rank, text in zip(known, texts, strict=True)
        }

    def _accuse(self, text: str) -> None:
        """Let every rank know of a fault, unless one is known."""
        with suppress(RuntimeError):
            self._store.compare_set("fault", "", text)

    def _fault(self) -> str | None:
        return self._store.get("fault").decode() if self._store.check(["fault"]) else None

    # -- what a rank concludes ------------------------------------------------------------------

    def _judge(self) -> None:
        """Stop the process when something is known to be wrong, whatever it waits in."""
        while not self._stop.is_set():
            terminated = self._signals.wait(JUDGE_SECONDS)
            self._unheard += 1
            if os.getppid() != self._parent:
                self._end("torchrun, which started this rank, is gone")
            if self._closing is not None:
                if time.monotonic() - self._closing > CLOSING_SECONDS:
                    self._end(self._failure)
            elif terminated:
                self._end(self._found() or f"it was asked to stop (SIGTERM) at {self.place.now}")
            elif self._unheard * JUDGE_SECONDS > self._limits.silent + PERIOD:
                self._end(
                    f"rank {self._rank} has been cut off from rank 0 and the store of the run for "
                    f"{self._limits.silent:g} s; it was at {self.place.now}"
                )

    def _blame(self, error: RuntimeError, where: Where) -> str:
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
                if ours and not beat.done and _is_dead(beat.pid):
                    text = f"rank {rank} (process {beat.pid}) died at {beat.where} or soon after"
                    self._accuse(text)
                    return text
        except RuntimeError:
            return None
        return None

    def _end(self, text: str) -> NoReturn:
        """End the process now, with an error that torchrun and people find."""
        with self._ending:
            error = RankError(f"{text}; rank {self._rank} stops at {self.place.now}")
            with suppress(OSError):
                get_error_handler().record_exception(error)
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{__name__}.{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            os._exit(1)


class _Judge:
    """Rank 0's eye on all ranks: who is silent, and whether anyone goes on."""

    def __init__(self, world_size: int, limits: Limits) -> None:
        self._limits = limits
        self._counts = [0] * world_size
        self._quiet = [0] * world_size
        self._places: dict[int, Where] = {}
        self._still = 0

    def __call__(self, beats: dict[int, Beat], limit: int) -> str | None:
        """What is wrong, if anything; is called once a period."""
        for rank, beat in beats.items():
            same = self._counts[rank] == beat.count and not beat.done
            self._quiet[rank] = self._quiet[rank] + 1 if same else 0
            self._counts[rank] = beat.count
            if self._quiet[rank] >= limit:
                return (
                    f"rank {rank} has been silent for {self._limits.silent:g} s (killed, frozen "
                    f"or cut off); it was last at {beat.where}"
                )
        places = {rank: beat.where for rank, beat in beats.items() if not beat.done}
        stuck = places == self._places and not all(w.slow for w in places.values())
        self._places = places
        self._still = self._still + 1 if stuck else 0
        if self._still * PERIOD >= self._limits.stalled:
            return _stalled(places, self._limits.stalled)
        return None


class _Follower:
    """The other ranks' eye on rank 0."""

    def __init__(self) -> None:
        self._count, self._quiet = 0, 0

    def __call__(self, beats: dict[int, Beat], limit: int) -> str | None:
        """What is wrong with rank 0, if anything; is called once a period."""
        leader = beats.get(0)
        if leader is None or leader.done:
            return None
        self._quiet = self._quiet + 1 if leader.count == self._count else 0
        self._count = leader.count
        if self._quiet < limit + 2:
            return None
        return f"rank 0 has been silent for {limit + 2:g} s; it was last at {leader.where}"


def _stalled(places: dict[int, Where], seconds: float) -> str:
    """Who keeps the others waiting: ranks that wait for nobody, or else all of them."""
    busy = {rank: where for rank, where in places.items() if not where.waits}
    told = "; ".join(f"rank {rank} is at {where}" for rank, where in (busy or places).items())
    rest = "while the others wait for it" if busy else "and each waits for another"
    return (
        f"no rank has gone on for {seconds:g} s: {told}, {rest} (a step that takes so long for "
        f"one instruction needs a longer timeout)"
    )


class _Signals:
    """SIGTERM, seen by a thread while the main thread is inside a collective."""

    _current: _Signals | None = None

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._caught = False

    def catch(self) -> None:
        """Begin, where Python lets us: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
            signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            self._caught = True
            _Signals._current = self

    def wait(self, seconds: float) -> bool:
        """Whether SIGTERM comes within some seconds."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        return signal.SIGTERM in self._ours.recv(64)

    def release(self) -> None:
        """Leave signals as they were."""
        if self._caught:
            self._caught, _Signals._current = False, None
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._ours.close()
        self._theirs.close()

    @classmethod
    def forget(cls) -> None:
        """Let a forked process, such as a worker of a DataLoader, end by SIGTERM as usual."""
        if cls._current is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            cls._current = None


os.register_at_fork(after_in_child=_Signals.forget)


def _connect(limits: Limits) -> Any:
    """A connection of our own to the store of the run, which waits for nobody else's."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=limits.silent),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"stratagem/watch/{attempt}/", store)  # type: ignore[attr-defined]


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _lost_contact(error: RuntimeError) -> bool:
    """Whether the backend complains that another rank is gone."""
    return isinstance(error, dist.DistError) or any(w in str(error) for w in ("gloo", "NCCL_"))


def _host() -> str:
    """What processes share that see each other's numbers; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_dead(pid: int) -> bool:
    """Whether a process of this machine has ended, if only in part (a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
