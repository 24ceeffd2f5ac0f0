"""Operators on parts of a mesh: the O of SOAP (Jia et al. 2019, FlexFlow, MLSys).

Integer programs and chains choose what every device of a stage does of every operator, so they
have one folded task graph whatever they choose (see `simulator.cells.device_cells`). Where an
operator is on a part of its mesh, `Pin` on one axis, operators on other parts run at the same
time, and the graph depends on where they are. So places are tried here, from the best plans that
were found. All places of a plan are priced together, and played on cells (see `PlacedPlan`); what
is better than all before is simulated as a plan:

    branches     those that lie beside one another on different parts, balanced by their times
    parameters   operators that share them on one part, one set of them behind the other (layers
                 of an unrolled LSTM)
    walk         Metropolis steps that move a branch, a set, or a single operator to another part,
                 or back to the whole mesh
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.placement.placed_plan import PlacedPlan
from stratagem.searcher.space.choices import with_choices
from stratagem.searcher.space.situation import LEAST_GAIN, rank
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.parallel_branches import parallel_branches
from stratagem.simulator.graph.placement import REPLICATE, Pin, Shard
from stratagem.simulator.pipeline.priced_pipeline import Prices
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation

STARTS, SMALL, FAR = 6, 100, 4.0
"""Plans that operators are placed from, of different meshes: so many at most, of models of so many
operators half, as all places are priced for each, and none that takes so many times the best or
more. What placing spares may be most of a step: gradients that are summed over slow links."""
SIMULATED = 25
"""A plan that is simulated counts as so many that are played, as it takes about as long."""
MOST_PLACES = 32
"""Parts of meshes up to which all are priced at once; on more, plans are simulated one by one."""
HOT, COLD = 0.05, 0.001
"""The temperature of the walk as a share of the step, first and last."""

MOST_IDLE = 4
"""The walk ends after so many steps for each operator and place that led to nothing better."""

Place = tuple[int, int] | None
"""Axis of the mesh and index along it; None for all of it."""
Unit = tuple[int, ...]
"""Operators that move together."""


@dataclass
class OperatorPlacement:
    """Places operators of plans on parts of their meshes until so many places were tried.

    Attributes:
        trials: what simulates plans, and how many more may be tried.
        seed: of the walk.
        tried: the plans that were simulated and may be, in order.
        played: how often operators were placed.
    """

    trials: Trials
    seed: int = 0
    tried: list[Simulation] = field(default_factory=list)
    played: int = 0

    def try_all(self, known: Iterable[Simulation]) -> None:
        """Place operators of the best plans on each set of meshes, and walk on from the best.

        Args:
            known: plans of the search, simulated.
        """
        graph = self.trials.situation.graph
        branches = _families(graph)
        best: tuple[_Tried, PlacesPlayed] | None = None
        for simulation in _starts(known, STARTS if len(graph.operators) < SMALL else STARTS // 2):
            if self.trials.left <= 0:
                break
            player = PlacesPlayed(self.trials, simulation)
            found = self._balance(player, branches)
            if best is None or found.rank < best[0].rank:
                best = found, player
        if best is not None:
            self._walk(*best, branches)

    def _balance(self, player: PlacesPlayed, branches: Sequence[Sequence[Unit]]) -> _Tried:
        """The best of: all branches on parts along an axis, one family of them after another."""
        now = player.start
        placed, whole = now.placed, _working(self.trials.situation.graph)
        for axis in placed.axes:
            every = placed
            for family in branches:
                every = every.spread(family, axis)
            now = self._better(player, now, every)
            now = self._better(player, now, replace(every, whole_axis=axis))
            now = self._better(player, now, placed.moved(whole, (axis, 0)) or placed)
        for family in branches:
            for axis in now.placed.axes:
                now = self._better(player, now, now.placed.spread(family, axis))
        return now

    def _walk(
        self, best: _Tried, player: PlacesPlayed, branches: Sequence[Sequence[Unit]]
    ) -> None:
        """Metropolis over places of units (Metropolis et al. 1953), from what is best so far.

        What is better than all before is simulated. Where it is no plan, or the constraints do not
        allow it, the walk goes back to the best that is.
        """
        working = _working(self.trials.situation.graph)
        single: list[Unit] = [(i,) for i in working]
        kinds = [[unit for family in branches for unit in family], single, [working]]
        kinds = [kind for kind in kinds if kind]
        places = best.placed.places
        if not places:
            return
        rng = random.Random(self.seed)
        now, idle, begin = best, 0, self.trials.left
        while self.trials.left > 0 and idle < MOST_IDLE * len(single) * len(places):
            unit, place = rng.choice(rng.choice(kinds)), rng.choice([None, *places])
            limit = -math.log(1.0 - rng.random())
            moved = now.placed.moved(unit, place)
            idle += 1
            found = None if moved is None else self._played(player, moved)
            if found is None:
                continue
            heat = COLD * (HOT / COLD) ** (self.trials.left / begin)
            over = found.seconds / now.seconds - 1
            if over > heat * limit or found.fits < now.fits:
                continue
            if found.is_better(best):
                if not self._is_plan(found):
                    now = best
                    continue
                best = found
            idle = 0 if over < 0 else idle
            now = found

    def _better(self, player: PlacesPlayed, now: _Tried, placed: _PartlyPlaced) -> _Tried:
        found = None if placed.is_like(now.placed) else self._played(player, placed)
        return found if found and found.is_better(now) and self._is_plan(found) else now

    def _played(self, player: PlacesPlayed, placed: _PartlyPlaced) -> _Tried | None:
        if self.trials.left <= 0:
            return None
        self.played += 1
        return player.play(placed)

    def _is_plan(self, tried: _Tried) -> bool:
        """Whether what was played is a plan that may be, as simulating it tells."""
        found = tried.simulation or self.trials.simulated(tried.placed.plan)
        if found is not None:
            self.tried.append(found)
        return found is not None


@dataclass(eq=False)
class _Tried:
    """What a plan with operators on parts takes.

    Attributes:
        placed: the plan.
        seconds: of a step.
        find_over: finds `over`.
        simulation: if it was simulated.
    """

    placed: _PartlyPlaced
    seconds: float
    find_over: Callable[[], float]
    simulation: Simulation | None = None

    @cached_property
    def over(self) -> float:
        """The largest share of its memory that a rank takes; over 1 where it does not fit."""
        return self.find_over()

    @property
    def fits(self) -> bool:
        """Whether all ranks have the memory."""
        return self.over <= 1

    @property
    def rank(self) -> tuple[float, float]:
        """As `situation.rank`."""
        return 0.0 if self.fits else self.over, self.seconds

    def is_better(self, other: _Tried) -> bool:
        """As `situation.is_better`; memory is looked at where time does not decide."""
        if self.seconds >= other.seconds * (1 - LEAST_GAIN) and other.fits:
            return False
        return self.fits if other.fits else self.rank < other.rank


class PlacesPlayed:
    """Plays a plan with its operators on parts of their meshes, priced once for all of them.

    Where that cannot be (large meshes, inputs that are gathered again) plans are simulated.
    """

    def __init__(self, trials: Trials, simulation: Simulation) -> None:
        self._trials = trials
        graph = trials.situation.graph
        placed = _PartlyPlaced(simulation.plan, graph, _seconds(simulation))
        self._capacities = [rank.capacity for rank in trials.room(simulation).memory]
        self.start = self._as_tried(placed, simulation)
        listed = {name: self._choices(placed, i) for i, name in enumerate(graph.names)}
        self._number = {
            (name, choice): k for name, every in listed.items() for k, choice in enumerate(every)
        }
        self._priced: PlacedPlan | None = None
        if len(placed.places) <= MOST_PLACES:
            prices = Prices(trials.situation.costs, trials.situation.memory)
            with suppress(ValueError):
                self._priced = PlacedPlan(simulation.plan, graph, listed, prices)

    def play(self, placed: _PartlyPlaced) -> _Tried | None:
        """What a step takes, and memory once that is asked for; None if it is known to be none."""
        self._trials.situation.clock.check()
        priced = self._priced
        if priced is None:
            found = self._trials.simulated(placed.plan)
            self._trials.left -= SIMULATED - 1
            return None if found is None else self._as_tried(placed, found)
        self._trials.left -= 1
        names = enumerate(self._trials.situation.graph.names)
        choice = np.array([self._number[name, placed.choice(i)] for i, name in names])

        def over() -> float:
            peaks = zip(priced.peaks(choice), self._capacities, strict=True)
            return max(peak / capacity for peak, capacity in peaks)

        return _Tried(placed, priced.step_ns(choice) * 1e-9, over)

    def _as_tried(self, placed: _PartlyPlaced, simulation: Simulation) -> _Tried:
        memory = self._trials.room(simulation).memory
        over = max(rank.peak / rank.capacity for rank in memory)
        return _Tried(placed, simulation.step_time, lambda: over, simulation)

    def _choices(self, placed: _PartlyPlaced, i: int) -> list[Choice]:
        """Those that an operator may have: its own first, and whole or on a part of each axis."""
        if self._trials.situation.graph.operators[i].is_source:
            return [placed.choice(i)]
        wholes = [placed, *(replace(placed, whole_axis=axis) for axis in placed.axes)]
        every = [each.choice(i) for each in wholes]
        for each in wholes:
            moved = (each.moved((i,), place) for place in placed.places)
            every += [one.choice(i) for one in moved if one is not None]
        return list(dict.fromkeys(every))


@dataclass(frozen=True, eq=False)
class _PartlyPlaced:
    """A plan, and where some of its operators are.

    Attributes:
        base: the plan with all of them on their whole meshes.
        seconds: by operator, of both passes on all devices together, about.
        where: by operator that is on a part, which.
        whole_axis: along which all others are whole, if any: what joins parts reads all of them,
            and what suits a plan without parts may not suit them.
    """

    base: Plan
    graph: OperatorGraph
    seconds: Mapping[str, float]
    where: Mapping[int, Place] = field(default_factory=dict)
    whole_axis: int | None = None

    def is_like(self, other: _PartlyPlaced) -> bool:
        """Whether all operators of the same plan are in the same places."""
        return (self.where, self.whole_axis) == (other.where, other.whole_axis)

    @property
    def axes(self) -> range:
        """Of the meshes, the longest of them."""
        return range(max(len(stage.mesh.shape) for stage in self.base.stages))

    def most_ways(self, axis: int) -> int:
        """The most parts of a mesh along an axis."""
        shapes = [stage.mesh.shape for stage in self.base.stages]
        return max((shape[axis] for shape in shapes if axis < len(shape)), default=1)

    def ways(self, i: int, axis: int) -> int:
        """The parts of an operator's mesh along an axis."""
        stage = self.base.stages[self.base.stage_of[self.graph.names[i]]]
        return stage.mesh.shape[axis] if axis < len(stage.mesh.shape) else 1

    def spread(self, family: Sequence[Unit], axis: int) -> _PartlyPlaced:
        """Each unit on a part along an axis, the longest first, where the least is so far.

        Units that do not lie within one stage stay where they are.
        """
        loads: dict[int, list[float]] = {}
        where = dict(self.where)
        for unit in sorted(family, key=lambda u: (-self._load(u), u)):
            stage = self._stage(unit)
            ways = self.ways(unit[0], axis)
            if stage is None or ways < 2:
                continue
            load = loads.setdefault(stage, [0.0] * ways)
            k = load.index(min(load))
            load[k] += self._load(unit)
            where.update(dict.fromkeys(unit, (axis, k)))
        return replace(self, where=where)

    def moved(self, unit: Unit, place: Place) -> _PartlyPlaced | None:
        """A unit on another part; None if it is there already, or there is no such part."""
        if place is not None and any(place[1] >= self.ways(i, place[0]) for i in unit):
            return None
        if place is not None and any(self.ways(i, place[0]) < 2 for i in unit):
            return None
        where = {i: at for i, at in self.where.items() if i not in unit}
        if place is not None:
            where.update(dict.fromkeys(unit, place))
        return None if where == self.where else replace(self, where=where)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Those along all axes that have several."""
        ways = ((axis, self.most_ways(axis)) for axis in self.axes)
        return [(axis, k) for axis, many in ways if many > 1 for k in range(many)]

    def choice(self, i: int) -> Choice:
        """What an operator does where it is."""
        own = self.base.choice(self.graph.names[i])
        if self.whole_axis is not None and not self.graph.operators[i].is_source:
            own = whole_along(own, self.whole_axis)
        place = self.where.get(i)
        return own if place is None else pinned(own, *place)

    @property
    def plan(self) -> Plan:
        """The plan with its operators where they are."""
        choices = {name: self.choice(i) for i, name in enumerate(self.graph.names)}
        return replace(with_choices(self.base, choices), prediction=None, name="placed")

    def _stage(self, unit: Unit) -> int | None:
        stages = {self.base.stage_of[self.graph.names[i]] for i in unit}
        return stages.pop() if len(stages) == 1 else None

    def _load(self, unit: Unit) -> float:
        return sum(self.seconds.get(self.graph.names[i], 0.0) for i in unit)


def pinned(choice: Choice, axis: int, index: int) -> Choice:
    """A choice whose operator is on one part of its mesh along an axis, whole in its samples.

    Example:
        >>> str(pinned(Choice((Shard("sample"), REPLICATE), zero=1), 0, 1).config[0])
        'Pin(1)'

    States are whole there, and nothing runs in pieces.
    """
    config = tuple(Pin(index) if a == axis else p for a, p in enumerate(choice.config))
    return Choice(config, recompute=choice.recompute)


def whole_along(choice: Choice, axis: int) -> Choice:
    """A choice whose operator is whole along an axis of its mesh; itself, if it is.

    Example:
        >>> str(whole_along(Choice((Shard("sample"), Shard("out")), zero=1), 0).config[0])
        'R'
    """
    if axis >= len(choice.config) or choice.config[axis] == REPLICATE:
        return choice
    config = tuple(REPLICATE if a == axis else p for a, p in enumerate(choice.config))
    return Choice(config, recompute=choice.recompute)


def parts_of(graph: OperatorGraph) -> list[Unit]:
    """All that a walk moves at once but the whole: branches, sets and single operators."""
    branches = (unit for family in _families(graph) for unit in family)
    return [*branches, *((i,) for i in _working(graph))]


def _families(graph: OperatorGraph) -> list[Sequence[Unit]]:
    """Branches that lie beside one another, and the operators that share parameters."""
    return [*parallel_branches(graph), *[each for each in [_sets(graph)] if len(each) > 1]]


def _working(graph: OperatorGraph) -> Unit:
    """All operators but sources, which every device computes for itself."""
    return tuple(i for i, operator in enumerate(graph.operators) if not operator.is_source)


def _starts(known: Iterable[Simulation], most: int) -> Iterator[Simulation]:
    """The best plan on each set of meshes whose operators may be placed, so many at most."""
    meshes: set[object] = set()
    least = math.inf
    for simulation in sorted(known, key=rank):
        plan = simulation.plan
        least = min(least, simulation.step_time)
        where = tuple((stage.mesh.shape, stage.mesh.devices) for stage in plan.stages)
        may = not (plan.is_mirrored or plan.token_slices != 1 or plan.substitutions)
        may = may and not plan.has_pins and simulation.step_time < FAR * least
        if may and where not in meshes and len(meshes) < most:
            meshes.add(where)
            yield simulation


def _seconds(simulation: Simulation) -> dict[str, float]:
    """By operator, how long its passes take, on all devices that share them together."""
    found: dict[str, float] = defaultdict(float)
    plan, timeline = simulation.plan, simulation.timeline
    for name, start, end in zip(timeline.names, timeline.start, timeline.end, strict=True):
        operator, _, what = name.partition(" ")
        if what in ("forward", "backward", "weight gradient"):
            found[operator] += float(end - start)
    for stage in plan.stages:
        for name in stage.operators:
            shards = zip(stage.choices[name].config, stage.mesh.shape, strict=True)
            found[name] *= math.prod(n for placed, n in shards if isinstance(placed, Shard))
    return dict(found)


def _sets(graph: OperatorGraph) -> tuple[Unit, ...]:
    """Operators that share parameters, with those without any that follow; where some are shared.

    The steps of an unrolled layer are a set.
    """
    root: dict[int, int] = {}
    first: dict[str, int] = {}
    shared = False
    for i, operator in enumerate(graph.operators):
        if operator.is_source:
            continue
        names = [weight.parameter for weight in operator.weights]
        known = [first[name] for name in names if name in first]
        shared = shared or bool(known)
        before = [root[e.producer] for e in graph.reads[i] if e.producer in root]
        root[i] = min(known) if known else (i if names or not before else max(before))
        for name in names:
            first.setdefault(name, root[i])
    members: dict[int, list[int]] = defaultdict(list)
    for i, at in root.items():
        members[at].append(i)
    return tuple(tuple(each) for each in members.values()) if shared else ()
