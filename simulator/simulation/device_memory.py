"""Memory of a device: its peak, what is alive then, and how it changes over a step.

A rank (the devices of one stage, or of several that share them) runs its actions one at a time, so
its memory is that of the block it runs, at the place where it is, plus the activations of every
other microbatch that waits for its backward pass:

    parameters, gradients, optimizer │ held microbatches × activations │ the running block

Under ZeRO 2 and 3, gradients whose sums are not through come on top (see `WaitingGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.schedules.actions import ActionKind, Held, MemorySituation
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes, Purpose

PASSES = {
    ActionKind.FORWARD: (0,),
    ActionKind.BACKWARD: (1,),
    ActionKind.INPUT_GRADIENT: (1,),
    ActionKind.WEIGHT_GRADIENT: (2,),
}
"""Which passes over its places (see `tensor_lifetimes`) an action makes."""


def passes_of(kind: ActionKind, *, split: bool) -> tuple[int, ...]:
    """The passes of an action in a schedule that may split backward.

    Example:
        >>> passes_of(ActionKind.BACKWARD, split=True)
        (1, 2)
    """
    return (1, 2) if split and kind is ActionKind.BACKWARD else PASSES[kind]


class Alive(NamedTuple):
    """Something in memory at the peak: `copies` microbatches of `nbytes` each."""

    use: Purpose
    stage: int
    operator: str
    nbytes: int
    copies: int

    @property
    def total(self) -> int:
        """Bytes of all copies."""
        return self.nbytes * self.copies


@dataclass(frozen=True, eq=False)
class StageTensors:
    """The tensors of a stage under its choices: bytes, births and deaths (see `Lifetimes`)."""

    stage: int
    lifetimes: Lifetimes
    nbytes: Ints
    names: tuple[str, ...]

    @cached_property
    def is_state(self) -> Flags:
        """Which tensors live through the whole step."""
        return self.lifetimes.birth < 0

    @cached_property
    def is_unsummed(self) -> Flags:
        """Which tensors are gradients that a pass makes and a sum takes."""
        uses = [use is Purpose.UNSUMMED for use in self.lifetimes.uses]
        found: Flags = np.array(uses, np.bool_) & (self.lifetimes.birth == self.lifetimes.death)
        return found

    def on(self, here: Flags) -> StageTensors:
        """Those on devices that have some operators: `here` says which, of all of the graph.

        A result that one reader needs lies where it is made, or where it is read.
        """
        life = self.lifetimes
        lies = here[life.first] | here[life.second]
        return replace(self, nbytes=np.where(lies, self.nbytes, 0))

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return int(self.nbytes[self.is_state].sum())

    def crosses(self, which: int) -> Flags:
        """Which tensors wait between pass `which` − 1 and pass `which`."""
        edge = which * self.lifetimes.num_operators
        lives = (self.lifetimes.birth < edge) & (edge <= self.lifetimes.death)
        return lives & ~self.is_state

    @cached_property
    def held(self) -> tuple[int, int]:
        """Bytes that a microbatch holds between forward and backward, and behind backward."""
        first, second = (int(self.nbytes[self.crosses(which)].sum()) for which in (1, 2))
        return first, second

    @cached_property
    def at_place(self) -> Ints:
        """Bytes alive at each place of the three passes, without what lives all the time."""
        n = self.lifetimes.num_operators
        change = np.zeros(3 * n + 1, dtype=np.int64)
        moving = ~self.is_state
        np.add.at(change, self.lifetimes.birth[moving], self.nbytes[moving])
        np.add.at(change, self.lifetimes.death[moving] + 1, -self.nbytes[moving])
        alive: Ints = np.cumsum(change)[: 3 * n]
        return alive

    def during(self, which: int) -> Ints:
        """[places], bytes alive at each place of a pass, its own activations included."""
        n = self.lifetimes.num_operators
        return self.at_place[which * n : (which + 1) * n]

    def peak(self, which: int) -> int:
        """The most that a pass needs, its own activations included."""
        return int(self.during(which).max())


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """Bytes per device of one rank at its peak.

    `state` is parameters, gradients and optimizer state; `activations` are those of all
    microbatches in flight, as many as `in_flight`; `working` is what comes on top while an
    operator runs, and `waiting` by how much gradients that wait for links raise the peak (see
    `WaitingGradients`), which a search's limit on memory does not know.
    """

    state: int
    activations: int
    working: int
    in_flight: int
    capacity: int
    _find_alive: Callable[[], tuple[Alive, ...]]
    waiting: int = 0

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        peak, capacity = format_bytes(self.peak), format_bytes(self.capacity)
        return f"<DeviceMemory: {peak} of {capacity} at the peak, {verdict}>"

    @cached_property
    def alive(self) -> tuple[Alive, ...]:
        """Everything that is in memory at the peak, largest first."""
        return self._find_alive()

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.state + self.activations + self.working + self.waiting

    @property
    def without_waiting(self) -> int:
        """The peak if no gradient waited for links: what a search holds against its limit."""
        return self.peak - self.waiting

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.capacity

    @property
    def table(self) -> Table:
        """What is alive at the peak, as a table."""
        columns = {
            "operator": Unit.TEXT,
            "what": Unit.TEXT,
            "stage": Unit.COUNT,
            "microbatches": Unit.COUNT,
            "size": Unit.BYTES,
            "share": Unit.SHARE,
        }
        rows = tuple(
            (a.operator, a.use.value, a.stage, a.copies, a.total, a.total / max(self.peak, 1))
            for a in self.alive
        )
        peak, capacity = format_bytes(self.peak), format_bytes(self.capacity)
        return Table(f"in memory at the peak: {peak} of {capacity} per device", columns, rows)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def device_memory(
    tensors: Mapping[int, StageTensors],
    found: Sequence[MemorySituation],
    capacity: int,
    *,
    split: bool = False,
    num_entries: int | None = None,
    waiting: WaitingGradients | None = None,
) -> DeviceMemory:
    """The peak of a rank that runs the stages of `tensors` in the situations `found`.

    `split` says whether the schedule runs gradients of parameters apart. Held entries from
    `num_entries` on are no microbatches in flight. With gradients `waiting`, the situations are
    those of all that the rank does, in its order.
    """
    state = sum(stage.state for stage in tensors.values())
    moments = [(s, which) for s in found for which in passes_of(s.kind, split=split)]

    def during(k: int) -> Ints:
        situation, which = moments[k]
        own = tensors[situation.stage].during(which)
        return own if waiting is None else own + waiting.during(k)

    others = [sum(_held_bytes(tensors[h.stage], h) for h in s.held) for s, _ in moments]
    totals = [int(during(k).max()) + others[k] for k in range(len(moments))]
    worst = max(range(len(moments)), key=lambda k: totals[k])
    usual = max(tensors[s.stage].peak(which) + others[k] for k, (s, which) in enumerate(moments))
    situation, which = moments[worst]
    running = Held(situation.stage, int(which < 2), int(which == 2))
    held_then = [*situation.held, running]
    activations = min(usual, sum(_held_bytes(tensors[held.stage], held) for held in held_then))
    place = int(during(worst).argmax())
    late = () if waiting is None else waiting.alive(worst, place)
    return DeviceMemory(
        state=state,
        activations=activations,
        working=usual - activations,
        in_flight=sum(
            held.waiting + held.late
            for held in held_then
            if num_entries is None or held.stage < num_entries
        ),
        capacity=capacity,
        _find_alive=partial(_alive, tensors, situation, which, place, late),
        waiting=totals[worst] - usual,
    )


def _held_bytes(stage: StageTensors, held: Held) -> int:
    return held.waiting * stage.held[0] + held.late * stage.held[1]


def _alive(
    tensors: Mapping[int, StageTensors],
    situation: MemorySituation,
    which: int,
    place: int,
    late: Iterable[tuple[int, int]],
) -> tuple[Alive, ...]:
    """What is in memory at a place of a pass, by operator and use, largest first.

    `late` are gradients that wait, as stages and their tensors.
    """
    total: dict[tuple[Purpose, int, str, int], int] = {}

    def add(stage: StageTensors, chosen: Flags, copies: int) -> None:
        for k in np.flatnonzero(chosen & (stage.nbytes > 0)) if copies else ():
            name = stage.names[stage.lifetimes.owner[k]]
            key = (stage.lifetimes.uses[k], stage.stage, name, copies)
            total[key] = total.get(key, 0) + int(stage.nbytes[k])

    for stage in tensors.values():
        add(stage, stage.is_state, 1)
    for held in situation.held:
        add(tensors[held.stage], tensors[held.stage].crosses(1), held.waiting)
        add(tensors[held.stage], tensors[held.stage].crosses(2), held.late)
    runs = tensors[situation.stage]
    at = which * runs.lifetimes.num_operators + place
    alive = (runs.lifetimes.birth <= at) & (at <= runs.lifetimes.death)
    add(runs, alive & ~runs.is_state, 1)
    for s, k in late:
        add(tensors[s], np.arange(tensors[s].nbytes.size) == k, 1)
    found = [Alive(*key[:3], nbytes, key[3]) for key, nbytes in total.items()]
    return tuple(sorted(found, key=lambda a: (-a.total, a.stage, a.operator, a.use.value)))


class BlockRun(NamedTuple):
    """A block that a rank ran: which pass of which stage, when its places start and end (ns).

    `summed` is when the gradients that each place leaves to be summed are so.
    """

    stage: int
    which: int
    start: Ints
    end: Ints
    summed: Ints | None = None


class WaitingGradients:
    """Gradients that wait for their sums, place by place of all that a rank runs.

    One is there from the place behind that which makes it until the first that begins when its
    sum is through. While the place itself runs, it is among the tensors of the pass.

    Args:
        tensors: of the stages of the rank.
        runs: what it ran, in order.
    """

    def __init__(self, tensors: Mapping[int, StageTensors], runs: Sequence[BlockRun]) -> None:
        self._begins = np.cumsum([0, *(run.start.size for run in runs)])
        starts = np.maximum.accumulate(np.concatenate([run.start for run in runs]))
        made = [_made(tensors[run.stage], run) for run in runs]
        first = np.repeat(self._begins[:-1], [rows.size for rows, *_ in made])
        rows, places, nbytes, summed = (np.concatenate(each) for each in zip(*made, strict=True))
        self._stage = np.repeat([run.stage for run in runs], [rows.size for rows, *_ in made])
        self._row, self._from = rows, first + places + 1
        self._until = np.maximum(self._from, np.searchsorted(starts, summed, side="left"))
        change = np.zeros(starts.size + 1, dtype=np.int64)
        np.add.at(change, self._from, nbytes)
        np.add.at(change, self._until, -nbytes)
        self._nbytes: Ints = np.cumsum(change)[:-1]

    @property
    def is_empty(self) -> bool:
        """Whether nothing ever waits."""
        return not self._nbytes.any()

    def during(self, run: int) -> Ints:
        """[places], bytes that wait while each place of a run is at work."""
        return self._nbytes[self._begins[run] : self._begins[run + 1]]

    def alive(self, run: int, place: int) -> list[tuple[int, int]]:
        """What waits then: stages and numbers of their tensors, one for each gradient."""
        at = self._begins[run] + place
        there = np.flatnonzero((self._from <= at) & (at < self._until))
        return list(zip(self._stage[there].tolist(), self._row[there].tolist(), strict=True))


def _made(stage: StageTensors, run: BlockRun) -> tuple[Ints, Ints, Ints, Ints]:
    """Gradients that a run leaves to be summed: numbers, places, bytes, when they are so."""
    n, none = stage.lifetimes.num_operators, np.zeros(0, dtype=np.int64)
    if run.summed is None:
        return none, none, none, none
    rows = np.flatnonzero(stage.is_unsummed & (stage.lifetimes.birth // n == run.which))
    places = stage.lifetimes.birth[rows] - run.which * n
    summed = np.maximum(run.summed[places], run.end[places])
    return rows, places, stage.nbytes[rows], summed


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """Bytes per device of one rank over a step.

    Attributes:
        label: of the rank.
        times: [N], ns, never falling; the bytes hold from a time to the next.
        nbytes: [U, N], by use in the order of `Purpose`.
        capacity: bytes of the device.
    """

    label: str
    times: Ints
    nbytes: Ints
    capacity: int

    @property
    def total(self) -> Ints:
        """[N], bytes of all uses."""
        summed: Ints = self.nbytes.sum(axis=0)
        return summed

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return int(self.total.max())


def memory_over_time(
    label: str,
    tensors: Mapping[int, StageTensors],
    played: Sequence[BlockRun],
    end: int,
    capacity: int,
) -> MemoryTimeline:
    """The memory of a rank whose blocks ran one after the other, as `played`.

    A tensor is allocated when the operator at its birth starts and freed when the one at its death
    ends, a gradient to be summed when it is so, so the peak is the same as that of
    `device_memory`.
    """
    uses = {use: row for row, use in enumerate(Purpose)}
    times, rows, changes = [0], [0], [0]
    for stage in tensors.values():
        for k in np.flatnonzero(stage.is_state):
            times.append(0)
            rows.append(uses[stage.lifetimes.uses[k]])
            changes.append(int(stage.nbytes[k]))
    for block in played:
        stage = tensors[block.stage]
        n, life = stage.lifetimes.num_operators, stage.lifetimes
        low = block.which * n
        born = np.flatnonzero((life.birth >= low) & (life.birth < low + n))
        dead = np.flatnonzero((life.death >= low) & (life.death < low + n) & ~stage.is_state)
        # At one place births come before deaths, at one time the lower place first.
        order = np.concatenate([2 * life.birth[born], 2 * life.death[dead] + 1])
        over = block.end[life.death[dead] - low]
        if block.summed is not None:
            late = np.maximum(over, block.summed[life.death[dead] - low])
            over = np.where(stage.is_unsummed[dead], late, over)
        when = np.concatenate([block.start[life.birth[born] - low], over])
        which = np.concatenate([born, dead])
        change = np.concatenate([stage.nbytes[born], -stage.nbytes[dead]])
        for k in np.argsort(order, kind="stable"):
            times.append(int(when[k]))
            rows.append(uses[stage.lifetimes.uses[which[k]]])
            changes.append(int(change[k]))
    steps = np.zeros((len(uses), len(times) + 1), dtype=np.int64)
    steps[rows, np.arange(len(times))] = changes
    order = np.argsort(times, kind="stable")  # What waits for its sum goes amid later blocks.
    steps[:, :-1] = steps[:, order]
    when = np.array(times, dtype=np.int64)[order]
    return MemoryTimeline(label, np.append(when, end), np.cumsum(steps, axis=1), capacity)
