"""What ranks conclude from what the others tell: who is silent, and whether anyone goes on.

Nothing here talks to other processes; a judge is called once a period with what was told last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratagem.executor.watching.rank_place import RunPoint

PERIOD = 1.0
"""Seconds between two messages of a rank."""

STOPPED_SECONDS = 4.0
"""How long a process of this machine may be stopped (SIGSTOP), which only a person undoes."""

BACKEND_SECONDS = 86_400.0
"""For an operation of a backend, whose own timeouts name nobody: the watch always acts before."""


@dataclass(frozen=True)
class Limits:
    """How long ranks wait for one another.

    Example:
        >>> Limits().allowed(expected=0.1), Limits().allowed(expected=6.0)
        (20.0, 60.0)

    Attributes:
        silent: seconds after which a rank that says nothing counts as lost, unless its process is
            seen to compute on this machine: then it may take as long as `preparing`.
        stalled: seconds after which a run in which no rank goes on counts as stuck, and a rank
            that never said anything as lost.
        patience: how many times as long as expected an instruction may take, where that is longer.
        preparing: seconds for what has no expected time, such as building the model or writing a
            checkpoint, while the process computes, reads or writes; one that does none of these
            is stuck after `stalled`, unless it may be idle: while ranks connect or take a batch.

    Raises:
        ValueError: when one is not above 0.
    """

    silent: float = 10.0
    stalled: float = 20.0
    patience: float = 10.0
    preparing: float = 600.0

    def __post_init__(self) -> None:
        for name in ("silent", "stalled", "patience", "preparing"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be above 0")

    def allowed(self, expected: float) -> float:
        """Seconds for an instruction that is expected to take so many."""
        return max(self.stalled, self.patience * expected)

    def quiet(self, state: str) -> int:
        """How many periods a rank may be silent, by the state of its process.

        A rank that computes may be silent for long: C code that holds the interpreter lock, such
        as json reading a big file, keeps its thread from telling anything.

        Args:
            state: as `process_activity.state_of` gives it.
        """
        seconds = self.silent
        if state == "T":
            seconds = min(self.silent, STOPPED_SECONDS)
        elif state in ("R", "D"):
            seconds = max(self.silent, self.preparing)
        return max(2, round(seconds / PERIOD))


@dataclass(frozen=True)
class Beat:
    """What a rank tells: where it is, how often it has told, and the process that it is.

    `working` says that the process has been computing, reading or writing since it told before.
    """

    count: int
    where: RunPoint
    host: str
    pid: int
    done: bool = False
    working: bool = False


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a run, and the rank that is silent if that is it."""

    text: str
    silent: int = -1


class Judge:
    """What rank 0 concludes about all ranks: who is silent, and whether anyone goes on."""

    def __init__(self, world_size: int, limits: Limits) -> None:
        self._limits = limits
        self._counts = [0] * world_size
        self._quiet = [0] * world_size
        self._places: dict[int, RunPoint] = {}
        self._periods = 0
        self._still = 0
        self._idle = 0

    def __call__(self, beats: dict[int, Beat], limits: Mapping[int, int]) -> Judgement | None:
        """What is wrong, if anything; is called once a period.

        Args:
            beats: what each rank told last.
            limits: periods that each of them may say nothing.
        """
        self._periods += 1
        return self._missing(beats) or self._silent(beats, limits) or self._stuck(beats)

    def _missing(self, beats: dict[int, Beat]) -> Judgement | None:
        missing = [rank for rank in range(len(self._counts)) if rank not in beats]
        if not missing or self._periods * PERIOD < self._limits.stalled:
            return None
        return Judgement(not_arrived(missing, f"{self._limits.stalled:g} s after rank 0"))

    def _silent(self, beats: dict[int, Beat], limits: Mapping[int, int]) -> Judgement | None:
        for rank, beat in beats.items():
            same = self._counts[rank] == beat.count and not beat.done
            self._quiet[rank] = self._quiet[rank] + 1 if same else 0
            self._counts[rank] = beat.count
            if self._quiet[rank] >= limits[rank]:
                return _silenced(rank, self._quiet[rank], beat)
        return None

    def _stuck(self, beats: dict[int, Beat]) -> Judgement | None:
        """Count the seconds in which no rank goes on, and those of them without any work."""
        active = [beat for beat in beats.values() if not beat.done]
        places = {rank: beat.where for rank, beat in beats.items() if not beat.done}
        moved = places != self._places or not places or len(beats) < len(self._counts)
        working = any(beat.where.slow and (beat.working or beat.where.idle) for beat in active)
        self._places = places
        self._still = 0 if moved else self._still + 1
        self._idle = 0 if moved or working else self._idle + 1
        busy = [where for where in places.values() if not where.waits] or list(places.values())
        allowed = self._limits.allowed(max((where.expected for where in busy), default=0.0))
        if self._idle * PERIOD >= allowed:
            return Judgement(_stalled(places, allowed))
        if self._still * PERIOD >= max(allowed, self._limits.preparing):
            return Judgement(_stalled(places, self._limits.preparing))
        return None


class Follower:
    """What the other ranks conclude about rank 0: whether it is silent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count, self._quiet = 0, 0

    def __call__(self, beats: dict[int, Beat], limits: Mapping[int, int]) -> Judgement | None:
        """What is wrong with rank 0, if anything; is called once a period, as `Judge` is."""
        leader = beats.get(0)
        if leader is None:
            self._quiet += 1
            late = self._quiet * PERIOD >= self._limits.stalled
            when = f"{self._limits.stalled:g} s after others"
            return Judgement(not_arrived([0], when)) if late else None
        if leader.done:
            return None
        self._quiet = self._quiet + 1 if leader.count == self._count else 0
        self._count = leader.count
        return None if self._quiet < limits[0] + 2 else _silenced(0, self._quiet, leader)


MOST_NAMED = 8
"""Ranks that one error names."""


def not_arrived(ranks: list[int], when: str) -> str:
    """That ranks never said anything, in words."""
    named = ", ".join(map(str, ranks[:MOST_NAMED])) + (" …" if len(ranks) > MOST_NAMED else "")
    are = f"ranks {named} have" if len(ranks) > 1 else f"rank {named} has"
    return f"{are} not joined the run {when} (killed, hung or still starting its program)"


def _silenced(rank: int, periods: int, beat: Beat) -> Judgement:
    text = (
        f"rank {rank} has been silent for {periods * PERIOD:g} s (killed, frozen or cut off); "
        f"it was last at {beat.where}"
    )
    return Judgement(text, silent=rank)


def _stalled(places: dict[int, RunPoint], seconds: float) -> str:
    """Who keeps the others waiting: ranks that wait for nobody, or else all of them."""
    busy = {rank: where for rank, where in places.items() if not where.waits}
    told = "; ".join(f"rank {rank} is at {where}" for rank, where in (busy or places).items())
    rest = "while the others wait for it" if busy else "and each waits for another"
    return (
        f"no rank has gone on for {seconds:g} s: {told}, {rest} (what takes so long without being "
        f"stuck needs a longer timeout)"
    )
