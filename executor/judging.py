"""What ranks conclude from what the others tell: who is silent, and whether anyone goes on.

Nothing here talks to other processes; a judge is called once a period with what was told last.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.executor.where import Where

PERIOD = 1.0
"""Seconds between two messages of a rank."""

BUSY_WEIGHT = 0.1
"""What a second counts towards a stuck step while a rank computes."""


@dataclass(frozen=True)
class Limits:
    """How long ranks wait for one another.

    Attributes:
        silent: seconds after which a rank that says nothing counts as lost.
        stalled: seconds after which a step in which no rank goes on counts as stuck; those in
            which a rank computes all the time count a tenth, because one instruction may be long.
    """

    silent: float = 10.0
    stalled: float = 20.0

    @property
    def backend(self) -> float:
        """Seconds for an operation of the backend, which is to give up after the watch does."""
        return max(120.0, 4 * (self.silent + self.stalled))


@dataclass(frozen=True)
class Beat:
    """What a rank tells: where it is, how often it has told, and the process that it is.

    `busy` says that its main thread has been computing since it told before.
    """

    count: int
    where: Where
    host: str
    pid: int
    done: bool = False
    busy: bool = False


@dataclass(frozen=True)
class Finding:
    """What is wrong with a run, and the rank that is silent if that is it."""

    text: str
    silent: int = -1


class Judge:
    """Rank 0's eye on all ranks: who is silent, and whether anyone goes on."""

    def __init__(self, world_size: int, limits: Limits) -> None:
        self._limits = limits
        self._counts = [0] * world_size
        self._quiet = [0] * world_size
        self._places: dict[int, Where] = {}
        self._still = 0.0

    def __call__(self, beats: dict[int, Beat], limit: int) -> Finding | None:
        """What is wrong, if anything; is called once a period."""
        for rank, beat in beats.items():
            same = self._counts[rank] == beat.count and not beat.done
            self._quiet[rank] = self._quiet[rank] + 1 if same else 0
            self._counts[rank] = beat.count
            if self._quiet[rank] >= limit:
                return Finding(
                    f"rank {rank} has been silent for {self._limits.silent:g} s (killed, frozen "
                    f"or cut off); it was last at {beat.where}",
                    silent=rank,
                )
        places = {rank: beat.where for rank, beat in beats.items() if not beat.done}
        stuck = places == self._places and not all(w.slow for w in places.values())
        self._places = places
        weight = BUSY_WEIGHT if any(beat.busy for beat in beats.values()) else 1.0
        self._still = self._still + weight if stuck else 0.0
        if self._still * PERIOD >= self._limits.stalled:
            return Finding(_stalled(places, self._limits.stalled))
        return None


class Follower:
    """The other ranks' eye on rank 0."""

    def __init__(self) -> None:
        self._count, self._quiet = 0, 0

    def __call__(self, beats: dict[int, Beat], limit: int) -> Finding | None:
        """What is wrong with rank 0, if anything; is called once a period."""
        leader = beats.get(0)
        if leader is None or leader.done:
            return None
        self._quiet = self._quiet + 1 if leader.count == self._count else 0
        self._count = leader.count
        if self._quiet < limit + 2:
            return None
        return Finding(
            f"rank 0 has been silent for {self._quiet * PERIOD:g} s (killed, frozen or cut off); "
            f"it was last at {leader.where}",
            silent=0,
        )


def _stalled(places: dict[int, Where], seconds: float) -> str:
    """Who keeps the others waiting: ranks that wait for nobody, or else all of them."""
    busy = {rank: where for rank, where in places.items() if not where.waits}
    told = "; ".join(f"rank {rank} is at {where}" for rank, where in (busy or places).items())
    rest = "while the others wait for it" if busy else "and each waits for another"
    return (
        f"no rank has gone on for {seconds:g} s: {told}, {rest} (a step that takes so long for "
        f"one instruction needs a longer timeout)"
    )
