"""Operators on parts of a mesh: the O of SOAP (Jia et al. 2019, FlexFlow, MLSys).

Integer programs and chains choose what every device of a stage does of every operator, so they
have one folded task graph whatever they choose (see `simulator.stage.device_cells`). Where an
operator is on a part of its mesh, `Pin` on one axis, operators on other parts run at the same
time, and the graph depends on where they are. So plans are simulated one by one here, from the
best that were found:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.space.choices import choices_of, with_choices
from stratagem.searcher.space.situation import is_better, rank
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.parallel_branches import parallel_branches
from stratagem.simulator.graph.placement import REPLICATE, Pin, Shard
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation

STARTS, FAR = 6, 4.0
"""Plans that operators are placed from, of different meshes: so many at most, and none that takes
so many times the best or more. What placing spares may be most of a step: gradients that are
summed over slow links."""
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
    """Places operators of plans on parts of their meshes until so many plans were simulated.

    Attributes:
        trials: what simulates them.
        seed: of the walk.
        tried: the plans that were simulated and may be, in order.
    """

    trials: Trials
    seed: int = 0
    tried: list[Simulation] = field(default_factory=list)

    def try_all(self, known: Iterable[Simulation]) -> None:
        """Place operators of the best plans on each set of meshes, and walk on from the best.

        Args:
            known: plans of the search, simulated.
        """
        graph = self.trials.situation.graph
        branches = [*parallel_branches(graph), *[each for each in [_sets(graph)] if len(each) > 1]]
        best: tuple[Simulation, _PartlyPlaced] | None = None
        for simulation in _starts(known):
            placed = _PartlyPlaced(simulation.plan, graph, _seconds(simulation))
            found = self._balance(simulation, placed, branches)
            if best is None or self.trials.rank(found[0]) < self.trials.rank(best[0]):
                best = found
        if best is not None:
            self._walk(*best, branches)

    def _balance(
        self, simulation: Simulation, placed: _PartlyPlaced, branches: Sequence[Sequence[Unit]]
    ) -> tuple[Simulation, _PartlyPlaced]:
        """The best of: all branches on parts along an axis, one family of them after another."""
        now = simulation, placed
        whole = _working(self.trials.situation.graph)
        for axis in placed.axes:
            every = placed
            for family in branches:
                every = every.spread(family, axis)
            now = self._better(now, every)
            now = self._better(now, replace(every, whole_axis=axis))
            now = self._better(now, placed.moved(whole, (axis, 0)) or placed)
        for family in branches:
            for axis in now[1].axes:
                now = self._better(now, now[1].spread(family, axis))
        return now

    def _walk(
        self, simulation: Simulation, placed: _PartlyPlaced, branches: Sequence[Sequence[Unit]]
    ) -> None:
        """Metropolis over places of units (Metropolis et al. 1953), from what is best so far."""
        working = _working(self.trials.situation.graph)
        single: list[Unit] = [(i,) for i in working]
        kinds = [[unit for family in branches for unit in family], single, [working]]
        kinds = [kind for kind in kinds if kind]
        places: list[Place] = [
            (axis, k) for axis in placed.axes for k in range(placed.most_ways(axis))
        ]
        if not places:
            return
        rng = random.Random(self.seed)
        now = simulation, placed
        idle, begin = 0, self.trials.left
        while self.trials.left > 0 and idle < MOST_IDLE * len(single) * len(places):
            unit, place = rng.choice(rng.choice(kinds)), rng.choice([None, *places])
            moved = now[1].moved(unit, place)
            found = None if moved is None else self._simulated(moved.plan)
            idle += 1
            if moved is None or found is None:
                continue
            worse, here = self.trials.room(found), self.trials.room(now[0])
            if worse.fits < here.fits:
                continue
            over = worse.step_time / here.step_time - 1
            heat = COLD * (HOT / COLD) ** (self.trials.left / begin)
            if over <= 0 or rng.random() < math.exp(-over / heat):
                idle = 0 if over < 0 else idle
                now = found, moved

    def _better(
        self, now: tuple[Simulation, _PartlyPlaced], placed: _PartlyPlaced
    ) -> tuple[Simulation, _PartlyPlaced]:
        found = None if placed.is_like(now[1]) else self._simulated(placed.plan)
        if found is None or not is_better(self.trials.room(found), self.trials.room(now[0])):
            return now
        return found, placed

    def _simulated(self, plan: Plan) -> Simulation | None:
        found = self.trials.simulated(plan)
        if found is not None:
            self.tried.append(found)
        return found


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

    @property
    def plan(self) -> Plan:
        """The plan with its operators where they are."""
        own = choices_of(self.base)
        if self.whole_axis is not None:
            working = (self.graph.names[i] for i in _working(self.graph))
            own |= {name: whole_along(own[name], self.whole_axis) for name in working}
        placed = {
            name: pinned(own[name], *place)
            for name, place in ((self.graph.names[i], at) for i, at in self.where.items())
            if place is not None
        }
        return replace(with_choices(self.base, own | placed), prediction=None, name="placed")

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


def _working(graph: OperatorGraph) -> Unit:
    """All operators but sources, which every device computes for itself."""
    return tuple(i for i, operator in enumerate(graph.operators) if not operator.is_source)


def _starts(known: Iterable[Simulation]) -> Iterator[Simulation]:
    """The best plan on each set of meshes whose operators may be placed."""
    meshes: set[object] = set()
    least = math.inf
    for simulation in sorted(known, key=rank):
        plan = simulation.plan
        least = min(least, simulation.step_time)
        where = tuple((stage.mesh.shape, stage.mesh.devices) for stage in plan.stages)
        may = not (plan.is_mirrored or plan.token_slices != 1 or plan.substitutions)
        may = may and not plan.has_pins and simulation.step_time < FAR * least
        if may and where not in meshes and len(meshes) < STARTS:
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
