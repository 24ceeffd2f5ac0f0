"""Resharding: how a tensor gets from one placement to another, one mesh axis at a time.

A step changes what one axis does to the tensor. Which steps there are is the table `TRANSITIONS`;
a conversion is the cheapest path of steps, found by Dijkstra's algorithm over the placements of
the tensor. The simulator prices that path and the executor runs it. Backward is the same algebra:
the gradient goes from how the consumer makes it to how the producer needs it, so every forward
step has its adjoint on the way back (an all-gather a reduce-scatter, and so on).

Shards are nested in axis order, so a step may touch a factor only on the innermost axis that
shards it: the pieces are contiguous there. The paths take care of that by themselves (gather the
inner axis first, say), and find hierarchical all-reduces for the same reason.

What is `Flat` lies in ranges of a box, so all that changes boxes comes before or behind: a
parameter's home is left by gathering what is flat, and reached by scattering what is left.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.graph.placement import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Flat,
    Partial,
    Pin,
    Placement,
    Placements,
    Replicate,
    Shard,
    flat_axes,
    local_elements,
    smallest_shard,
    splits_of,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import (
    collective_latency,
    collective_time,
    finished_share,
)
from stratagem.simulator.hardware.device_mesh import AxisLink
from stratagem.simulator.hardware.resources import link_mask
from stratagem.simulator.sharding._shortest_paths import shortest_paths

STEP_OVERHEAD = 2e-6
"""Seconds added to each step when paths are compared: packing and launching are not quite free."""


TRANSITIONS: dict[tuple[type[Placement], type[Placement]], Collective] = {
    (Partial, Replicate): Collective.ALL_REDUCE,
    (Partial, Shard): Collective.REDUCE_SCATTER,
    (Partial, Pin): Collective.REDUCE,
    (Shard, Replicate): Collective.ALL_GATHER,
    (Shard, Shard): Collective.ALL_TO_ALL,
    (Shard, Pin): Collective.GATHER,
    (Replicate, Shard): Collective.SLICE,
    (Replicate, Pin): Collective.SLICE,
    (Pin, Replicate): Collective.BROADCAST,
    (Pin, Shard): Collective.SCATTER,
    (Pin, Pin): Collective.SEND,
    (Partial, Flat): Collective.REDUCE_SCATTER,
    (Flat, Replicate): Collective.ALL_GATHER,
    (Replicate, Flat): Collective.SLICE,
}


@dataclass(frozen=True)
class ReshardingStep:
    """One collective along `axis`; `elements` of a member, the more of before and after."""

    collective: Collective
    axis: int
    source: Placement
    target: Placement
    elements: int

    def __str__(self) -> str:
        return f"{self.collective.value} axis {self.axis} ({self.source} → {self.target})"

    def renamed(self, names: Mapping[Placement, Placement]) -> ReshardingStep:
        """The same step between other parts of the axis."""
        ends = names.get(self.source, self.source), names.get(self.target, self.target)
        return ReshardingStep(self.collective, self.axis, *ends, self.elements)


class FinishedSum(NamedTuple):
    """The last sum on the way of a tensor: its seconds, and how many elements of it a device is
    the first to have whole.
    """

    seconds: float
    elements: float


_SUMS = {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE}


class Resharder:
    """Cheapest conversions of tensors on one mesh; paths are remembered.

    Example:
        >>> link = AxisLink(1e-6, 1e-9, False, False)
        >>> from stratagem.simulator.graph.placement import PARTIAL
        >>> steps = Resharder((4,), (link,)).path((8, 16), 4, (PARTIAL,), (Shard(1),))
        >>> [str(step) for step in steps]
        ['reduce-scatter axis 0 (P → S(1))']
    """

    def __init__(self, shape: Sequence[int], links: Sequence[AxisLink]) -> None:
        self.shape = tuple(shape)
        self.links = tuple(links)
        self._graphs: dict[tuple[object, ...], _StateGraph] = {}
        self._paths: dict[tuple[object, ...], tuple[ReshardingStep, ...]] = {}
        self._seconds: dict[tuple[Collective, int, int, bool], float] = {}

    def path(
        self, sizes: tuple[int, ...], itemsize: int, source: Placements, target: Placements
    ) -> tuple[ReshardingStep, ...]:
        """The steps from `source` to `target` for a tensor with factors of `sizes`.

        Raises:
            ValueError: when no step leads there: nothing makes a tensor Partial again, and a shard
                may not be empty.
        """
        if source == target:
            return ()
        key = (sizes, itemsize, source, target)
        if key not in self._paths:
            self._paths[key] = self._find_path(*key)
        return self._paths[key]

    def _find_path(
        self, sizes: tuple[int, ...], itemsize: int, source: Placements, target: Placements
    ) -> tuple[ReshardingStep, ...]:
        if FLAT in source or FLAT in target:
            return self._flat_path(sizes, itemsize, source, target)
        pins = tuple(sorted({p for p in (*source, *target) if isinstance(p, Pin)}))
        first = self._first_like(pins)
        if first != pins:
            there: dict[Placement, Placement] = dict(zip(pins, first, strict=True))
            back: dict[Placement, Placement] = dict(zip(first, pins, strict=True))
            ends = (tuple(there.get(p, p) for p in end) for end in (source, target))
            return tuple(step.renamed(back) for step in self.path(sizes, itemsize, *ends))
        steps = self._graph(sizes, itemsize, pins).path(source, target)
        if steps is None:
            raise ValueError(
                f"no resharding leads from {placements_text(source)} to {placements_text(target)} "
                f"for a tensor with factors {sizes} on a mesh of shape {self.shape}"
            )
        return steps

    def _first_like(self, pins: Sequence[Pin]) -> tuple[Pin, ...]:
        """The first pins that may be on the same axes as these, in the same order.

        Devices along an axis are alike, so paths between other parts are these with other names.
        """
        taken: dict[int, int] = {}
        found: list[Pin] = []
        for pin in pins:
            least = max([0, *(ways for ways in self.shape if ways <= pin.index)])
            taken[least] = taken.get(least, least - 1) + 1
            found.append(Pin(taken[least]))
        return tuple(found)

    def _flat_path(
        self, sizes: tuple[int, ...], itemsize: int, source: Placements, target: Placements
    ) -> tuple[ReshardingStep, ...]:
        """Out of ranges of boxes and into them: axis after axis, with boxes between."""
        if _only_sums(source, target):
            moved = [axis for axis, placement in enumerate(source) if placement != target[axis]]
            return self._along(sizes, source, moved, REPLICATE)
        leaving, reaching = flat_axes(source)[::-1], flat_axes(target)
        whole = _with(source, leaving, REPLICATE)
        pending = [axis for axis in reaching if whole[axis] == PARTIAL]
        landing = _with(_with(target, reaching, REPLICATE), pending, PARTIAL)
        return (
            *self._along(sizes, source, leaving, REPLICATE),
            *self.path(sizes, itemsize, whole, landing),
            *self._along(sizes, landing, reaching, FLAT),
        )

    def _along(
        self, sizes: tuple[int, ...], state: Placements, axes: Sequence[int], target: Placement
    ) -> tuple[ReshardingStep, ...]:
        """The steps that change some axes to `target`, one after the other."""
        steps: list[ReshardingStep] = []
        for axis in axes:
            after = _with(state, (axis,), target)
            elements = max(local_elements(sizes, each, self.shape) for each in (state, after))
            kind = TRANSITIONS[type(state[axis]), type(target)]
            steps.append(ReshardingStep(kind, axis, state[axis], target, elements))
            state = after
        return tuple(steps)

    def matrix(
        self,
        sizes: tuple[int, ...],
        itemsize: int,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
    ) -> tuple[Floats, Ints]:
        """Seconds and link masks of every conversion, `sources` × `targets`, without pins.

        Raises:
            ValueError: when one of the conversions does not exist.
        """
        graph = self._graph(sizes, itemsize, ())
        try:
            rows = np.array([graph.number[s] for s in sources], dtype=np.int64)
            columns = np.array([graph.number[t] for t in targets], dtype=np.int64)
        except KeyError as error:
            raise ValueError(
                f"a tensor with factors {sizes} cannot lie as {placements_text(error.args[0])} "
                f"on a mesh of shape {self.shape}"
            ) from error
        cells = np.ix_(rows, columns)
        if bool((graph.origins[cells] < 0).any()):
            raise ValueError(f"a tensor with factors {sizes} has a conversion that leads nowhere")
        return graph.seconds[cells], graph.used[cells]

    def mask(self, steps: Sequence[ReshardingStep]) -> int:
        """The link classes that a path occupies: `INTRA_NODE` and `INTER_NODE` bits."""
        mask = 0
        for step in steps:
            mask |= self.step_mask(step.collective, step.axis)
        return mask

    def step_mask(self, collective: Collective, axis: int) -> int:
        """That of a single step: a slice occupies no link, nor does an axis of one device."""
        if collective is Collective.SLICE or self.shape[axis] == 1:
            return 0
        return link_mask(self.links[axis])

    def seconds(
        self, steps: Sequence[ReshardingStep], itemsize: int, *, later: bool = False
    ) -> float:
        """Time of a path: its collectives one after the other.

        The last one goes on beside computing if nobody waits for it until `later`.
        """
        last = len(steps) - 1 if later else len(steps)
        return sum(
            self.step_seconds(s.collective, s.elements * itemsize, s.axis, later=number == last)
            for number, s in enumerate(steps)
        )

    def latency(self, steps: Sequence[ReshardingStep], itemsize: int) -> float:
        """What of these seconds is the hops' own, whatever the bytes."""
        return sum(
            collective_latency(
                s.collective, s.elements * itemsize, self.shape[s.axis], self.links[s.axis]
            )
            for s in steps
        )

    def last_sum(self, steps: Sequence[ReshardingStep], itemsize: int) -> FinishedSum | None:
        """The last sum of a path; None where nothing is summed.

        Example:
            >>> from stratagem.simulator.graph.placement import PARTIAL
            >>> resharder = Resharder((4,), (AxisLink(1e-6, 1e-9, False, False),))
            >>> steps = resharder.path((8, 16), 4, (PARTIAL,), (REPLICATE,))
            >>> resharder.last_sum(steps, 4).elements
            32.0
        """
        for step in reversed(steps):
            size, nbytes = self.shape[step.axis], step.elements * itemsize
            if step.collective in _SUMS and size > 1:
                share = finished_share(step.collective, nbytes, size, self.links[step.axis])
                return FinishedSum(self.seconds((step,), itemsize), share * step.elements)
        return None

    def step_seconds(
        self, collective: Collective, nbytes: int, axis: int, *, later: bool = False
    ) -> float:
        """That of a single step, by the bytes of a member."""
        key = collective, nbytes, axis, later
        if key not in self._seconds:
            link = self.links[axis].later if later else self.links[axis]
            self._seconds[key] = collective_time(collective, nbytes, self.shape[axis], link)
        return self._seconds[key]

    def members(self, steps: Sequence[ReshardingStep]) -> int:
        """Members of all collectives of a path, each counted as often as it takes part."""
        return sum(self.shape[s.axis] for s in steps if s.collective is not Collective.SLICE)

    def _graph(self, sizes: tuple[int, ...], itemsize: int, pins: tuple[Pin, ...]) -> _StateGraph:
        key = (sizes, itemsize, pins)
        if key not in self._graphs:
            self._graphs[key] = _StateGraph(self, sizes, itemsize, pins)
        return self._graphs[key]


@functools.lru_cache(maxsize=64)
def shared_resharder(shape: tuple[int, ...], links: tuple[AxisLink, ...]) -> Resharder:
    """One `Resharder` for all meshes of the same shape and links, so that paths are found once."""
    return Resharder(shape, links)


class _StateGraph:
    """Every placement of one tensor on one mesh, and the cheapest path between any two of them."""

    def __init__(
        self, mesh: Resharder, sizes: tuple[int, ...], itemsize: int, pins: tuple[Pin, ...]
    ) -> None:
        devices = math.prod(mesh.shape)
        # Whatever a mesh divides evenly, all its axes may shard.
        told = tuple(devices if size and size % devices == 0 else size for size in sizes)
        self._moves = moves = _moves_between(mesh.shape, told, pins)
        self.number = moves.number
        self._elements = moves.elements(sizes)
        moved = np.maximum(self._elements[moves.before], self._elements[moves.after])
        count, cells = len(moves.states), (moves.before, moves.after)
        seconds, weights = np.zeros((count, count)), np.full((count, count), np.inf)
        seconds[cells] = [
            mesh.step_seconds(kind, elements * itemsize, axis)
            for kind, axis, elements in zip(moves.kinds, moves.axes, moved.tolist(), strict=True)
        ]
        weights[cells] = seconds[cells] + STEP_OVERHEAD
        links = np.zeros((count, count), dtype=np.int64)
        links[cells] = [
            mesh.step_mask(kind, axis) for kind, axis in zip(moves.kinds, moves.axes, strict=True)
        ]
        self.origins, self.seconds, self.used = shortest_paths(weights, seconds, links)

    def path(self, source: Placements, target: Placements) -> tuple[ReshardingStep, ...] | None:
        """The cheapest steps from `source` to `target`; None when there are none."""
        start, state = self.number.get(source), self.number.get(target)
        if start is None or state is None or self.origins[start, state] < 0:
            return None
        steps: list[ReshardingStep] = []
        while state != start:
            before = int(self.origins[start, state])
            steps.append(self._step(before, state))
            state = before
        return tuple(reversed(steps))

    def _step(self, before: int, after: int) -> ReshardingStep:
        ends = self._moves.states[before], self._moves.states[after]
        (axis,) = (k for k, (one, other) in enumerate(zip(*ends, strict=True)) if one != other)
        source, target = (end[axis] for end in ends)
        kind = TRANSITIONS[type(source), type(target)]
        elements = int(max(self._elements[before], self._elements[after]))
        return ReshardingStep(kind, axis, source, target, elements)


@dataclass(frozen=True, eq=False)
class _Moves:
    """The placements that tensors may have on a mesh, and the steps between them.

    Attributes:
        states: the placements.
        number: of each.
        before: the number of the placement before each step.
        after: of that after it.
        kinds: the collective of each step.
        axes: along which it is.
        ways: by axis, placement and factor, into how many parts the axis cuts the factor.
    """

    states: tuple[Placements, ...]
    number: dict[Placements, int]
    before: Ints
    after: Ints
    kinds: tuple[Collective, ...]
    axes: tuple[int, ...]
    ways: Ints

    def elements(self, sizes: tuple[int, ...]) -> Ints:
        """Of the largest part of a tensor in each placement (see `local_elements`)."""
        left = np.broadcast_to(np.array(sizes, dtype=np.int64), self.ways.shape[1:])
        for ways in self.ways:
            left = -(-left // ways)
        found: Ints = left.prod(axis=1)
        return found


@functools.lru_cache(maxsize=4096)
def _moves_between(
    shape: tuple[int, ...], sizes: tuple[int, ...], pins: tuple[Pin, ...]
) -> _Moves:
    """All placements of tensors whose factors have such sizes, and all steps."""
    states = _all_states(shape, sizes, pins)
    number = {state: i for i, state in enumerate(states)}
    steps = [
        (i, number[after], TRANSITIONS[type(state[axis]), type(target)], axis)
        for i, state in enumerate(states)
        for axis, target in _steps_from(state, shape, len(sizes), pins)
        if (after := (*state[:axis], target, *state[axis + 1 :])) in number
    ]
    ways = np.ones((len(shape), len(states), len(sizes)), dtype=np.int64)
    for i, state in enumerate(states):
        for axis, placement in enumerate(state):
            if isinstance(placement, Shard):
                ways[axis, i, int(placement.dim)] = shape[axis]
    return _Moves(
        tuple(states),
        number,
        np.array([step[0] for step in steps], dtype=np.int64),
        np.array([step[1] for step in steps], dtype=np.int64),
        tuple(step[2] for step in steps),
        tuple(step[3] for step in steps),
        ways,
    )


def _all_states(
    shape: tuple[int, ...], sizes: tuple[int, ...], pins: tuple[Pin, ...]
) -> list[Placements]:
    """The placements of a tensor that leave no part of it empty."""
    choices: list[list[Placement]] = [
        [
            REPLICATE,
            PARTIAL,
            *(Shard(factor) for factor, size in enumerate(sizes) if size > 1 or ways == 1),
            *(p for p in pins if p.index < ways),
        ]
        for ways in shape
    ]
    return [
        state
        for state in itertools.product(*choices)
        if all(smallest_shard(n, splits_of(state, k, shape)) > 0 for k, n in enumerate(sizes))
    ]


def _steps_from(
    state: Placements, shape: tuple[int, ...], num_factors: int, pins: tuple[Pin, ...]
) -> Iterator[tuple[int, Placement]]:
    """The steps from a state. Nothing is nested in, or around, an axis of one device."""
    for axis, placement in enumerate(state):
        behind = zip(state[axis + 1 :], shape[axis + 1 :], strict=True)
        later = [p for p, ways in behind if ways > 1 and shape[axis] > 1]
        if isinstance(placement, Shard) and placement in later:
            continue
        shards = [Shard(factor) for factor in range(num_factors)]
        targets: list[Placement] = [REPLICATE, *(s for s in shards if s not in later), *pins]
        for target in targets:
            if target != placement:
                yield axis, target


def _with(state: Placements, axes: Sequence[int], placement: Placement) -> Placements:
    """The same placements but for those of some axes."""
    return tuple(placement if axis in axes else each for axis, each in enumerate(state))


def _only_sums(source: Placements, target: Placements) -> bool:
    """Whether sums are all that changes, which ranges of boxes can be added up in."""
    pairs = zip(source, target, strict=True)
    return all(a == b or (a, b) == (PARTIAL, REPLICATE) for a, b in pairs)


def placements_text(placements: Placements) -> str:
    """Placements as people read them: ``(S(0), R)``."""
    return "(" + ", ".join(str(p) for p in placements) + ")"
