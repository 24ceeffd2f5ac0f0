"""How threads that play ranks meet: rendezvous, mailboxes, and what happens when a rank fails.

All state is under one lock. A rank that must wait says what for, and whoever brings that wakes it.
So when every running rank waits, nothing can ever come: that is a deadlock, reported at once.

    rank 0   meet ─ waits ──────────┐ woken with its result
    rank 1   ········ meet ─ last: computes all results
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class Aborted(BaseException):
    """Raised in a rank that stops because another one failed; never seen by the caller."""


@dataclass(frozen=True)
class CollectiveCall:
    """What a rank calls; the members of a group must agree on it."""

    operation: str
    dtype: torch.dtype | None = None
    shape: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        details = [str(d) for d in (self.dtype, self.shape) if d is not None]
        return self.operation + (f" ({', '.join(details)})" if details else "")


@dataclass
class _Meeting:
    """One collective of one group: what each member gave, and what each one gets."""

    call: CollectiveCall
    first: int
    given: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)


class World:
    """The ranks of one process, and all that is between them."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._woken = [threading.Condition(self._lock) for _ in range(size)]
        self._ended = threading.Condition(self._lock)
        self._running = size
        self._waiting: dict[int, str] = {}
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._num_meetings: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._mail: defaultdict[tuple[int, int, int], deque[Any]] = defaultdict(deque)

    def meet(
        self,
        rank: int,
        group: tuple[int, ...],
        call: CollectiveCall,
        given: Any,
        finish: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Give something, wait for every member of `group`, and get this member's result.

        `finish` makes the results of all members, in group order, from what they gave; the member
        that comes last runs it.

        Raises:
            RuntimeError: when `call` is not what the first member called, or all ranks wait.
            TimeoutError: when the others take longer than the timeout.
        """
        with self._lock:
            meeting, number = self._join(rank, group, call)
            meeting.given[rank] = given
            if len(meeting.given) < len(group):
                why = f"in {call} number {number} of group {group}"
                self._wait(rank, why, lambda: rank in meeting.results)
                return meeting.results.pop(rank)
            del self._meetings[group, number]
        results = finish([meeting.given[member] for member in group])
        with self._lock:
            meeting.results = dict(zip(group, results, strict=True))
            for member in group:
                self._wake(member)
            return meeting.results.pop(rank)

    def post(self, source: int, target: int, tag: int, message: Any) -> None:
        """Put a message into the mailbox from `source` to `target` of that tag."""
        with self._lock:
            self._check()
            self._mail[source, target, tag].append(message)
            if self._waiting.get(target) == _for_message(source, tag):
                self._wake(target)

    def take(self, source: int, target: int, tag: int) -> Any:
        """The oldest message in a mailbox from `source` to `target`, once there is one."""
        with self._lock:
            self._check()
            box = self._mail[source, target, tag]
            if not box:
                self._wait(target, _for_message(source, tag), lambda: bool(box))
            return box.popleft()

    def finish(self, rank: int) -> None:
        """Say that `rank` has done all it had to do."""
        with self._lock:
            self._running -= 1
            self._detect_deadlock(f"rank {rank} has finished")
            self._ended.notify()

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Stop every rank; of several failures the first one counts."""
        with self._lock:
            self._fail(rank, error)

    def wait_for_end(self) -> None:
        """Return when all ranks have finished or one has failed."""
        with self._lock:
            self._ended.wait_for(lambda: self._running == 0 or self.failure is not None)

    def _join(
        self, rank: int, group: tuple[int, ...], call: CollectiveCall
    ) -> tuple[_Meeting, int]:
        self._check()
        number = self._num_meetings[rank, group]
        self._num_meetings[rank, group] += 1
        meeting = self._meetings.setdefault((group, number), _Meeting(call, rank))
        if meeting.call != call:
            raise RuntimeError(
                f"collective {number} of group {group}: rank {meeting.first} calls {meeting.call} "
                f"but rank {rank} calls {call}; all members must make the same calls in one order"
            )
        return meeting, number

    def _wait(self, rank: int, why: str, ready: Callable[[], bool]) -> None:
        self._waiting[rank] = why
        self._detect_deadlock(f"rank {rank} waits {why}")
        came = self._woken[rank].wait_for(lambda: ready() or self.failure, self.timeout)
        self._check()
        if not came:
            self._waiting.pop(rank)
            raise TimeoutError(
                f"rank {rank} waited {self.timeout:g} s {why}"
                + "".join(f"; rank {r} waits {w}" for r, w in sorted(self._waiting.items()))
            )

    def _wake(self, rank: int) -> None:
        self._waiting.pop(rank, None)
        self._woken[rank].notify()

    def _detect_deadlock(self, last: str) -> None:
        if self._waiting and len(self._waiting) == self._running:
            lines = [f"rank {rank} waits {why}" for rank, why in sorted(self._waiting.items())]
            error = RuntimeError("deadlock: " + "; ".join(lines) + f" (the last event: {last})")
            self._fail(None, error)

    def _fail(self, rank: int | None, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            if rank is not None:
                error.add_note(f"raised on rank {rank} of {self.size}")
        for condition in (*self._woken, self._ended):
            condition.notify()

    def _check(self) -> None:
        if self.failure is not None:
            raise Aborted


def _for_message(source: int, tag: int) -> str:
    return f"for a message from rank {source}" + (f" with tag {tag}" if tag else "")
