"""Stages with replicas under PipeDream's objective: flat or hierarchical machines, exactly."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from stratagem.searcher.planners.inputs.down_sets import (
    DownSetCut,
    DownSets,
    DownSetTable,
    Pairs,
    StageProblem,
    TooManyDownSetsError,
    cut_from_every_set,
    cut_into_stages,
    down_sets,
    linear_down_sets,
    linearisations,
)
from stratagem.searcher.planners.inputs.pipedream import PipeDreamGraph, read_pipedream_graph
from stratagem.searcher.planners.inputs.result import PlannedStage, PlannerResult
from stratagem.searcher.planners.solvers._kernels import MeasuredSets, replica_seconds
from stratagem.simulator.base.arrays import Flags, Floats

MAX_NESTED_SETS = 800
"""With more down-sets than this a hierarchy is cut along linear orders: its table is quadratic."""


@dataclass(frozen=True)
class HierarchyLevel:
    """Devices, or machines, that hang together: how many, and bytes a second between them."""

    count: int
    bandwidth: float


@dataclass(frozen=True)
class Replicated:
    """A stage of one level: its layers, its replicas, and its own stages on the level inside."""

    nodes: tuple[str, ...]
    replicas: int
    inner: tuple[Replicated, ...] = ()


def pipeline_seconds(
    graph: PipeDreamGraph,
    plan: Sequence[Replicated],
    levels: Sequence[HierarchyLevel],
    *,
    compression: float | None = 1.0,
) -> float:
    """Seconds a minibatch of a plan under the peer's objective.

    The peer charges the first stage of a level for no transfer, and divides the synchronisation of
    that stage by the devices of the level inside, but not that of later stages.

    Args:
        graph: the profile.
        plan: stages of the outermost level, first to last.
        levels: the innermost level first.
        compression: how many times smaller activations travel; None where they cost nothing.

    Raises:
        ValueError: the stages are not the graph's layers, each once and after those that it
            depends on, or they take other devices.
    """
    planned = graph.without_inputs()
    index = {layer.id: i for i, layer in enumerate(planned.layers)}
    rank = {v: place for place, v in enumerate(linearisations(planned.predecessors)[0])}
    plan = _only(plan, index)
    order = [
        v
        for stage in _flat(plan)
        for v in sorted((index[str(n)] for n in stage.nodes), key=rank.__getitem__)
    ]
    if sorted(order) != list(range(len(index))):
        raise ValueError(
            f"{graph.name}: the plan places {len(order)} layers of {len(index)}; place each once"
        )
    for level, stages in _by_level(plan, len(levels)):
        used = sum(stage.replicas for stage in stages)
        if used != levels[level].count:
            raise ValueError(
                f"{graph.name}: a plan of level {level} takes {used} of {levels[level].count}"
            )
    sets = linear_down_sets(planned.predecessors, order)
    model = _PipeDreamModel(planned, sets, levels, compression)
    return _seconds(model, plan, 0, len(levels) - 1)


def _only(plan: Sequence[Replicated], known: Container[str]) -> tuple[Replicated, ...]:
    """A plan without the layers that are not planned: inputs, parts of tuples unread."""
    return tuple(
        Replicated(
            tuple(node for node in stage.nodes if node in known),
            stage.replicas,
            _only(stage.inner, known),
        )
        for stage in plan
    )


def _by_level(plan: Sequence[Replicated], depth: int) -> list[tuple[int, Sequence[Replicated]]]:
    """Every group of stages that shares the devices of one level."""
    groups: list[tuple[int, Sequence[Replicated]]] = [(depth - 1, plan)]
    for stage in plan:
        if depth > 1:
            groups += _by_level(stage.inner, depth - 1)
    return groups


def _seconds(model: _PipeDreamModel, plan: Sequence[Replicated], start: int, level: int) -> float:
    """The same by definition, without any table: along an order that the plan gives."""
    slowest, place = 0.0, start
    for number, stage in enumerate(plan):
        end = place + len(stage.nodes)
        inside = (
            _seconds(model, stage.inner, place, level - 1)
            if level
            else float(model.seconds[end] - model.seconds[place])
        )
        first = number == 0
        slowest = max(
            slowest, model.stage_seconds(place, end, inside, stage.replicas, level, first)
        )
        place = end
    return slowest


def solve_pipedream(
    source: PipeDreamGraph | str | Path,
    levels: Sequence[HierarchyLevel],
    *,
    compression: float | None = 1.0,
    sets: DownSets | None = None,
    limit: int = 200_000,
) -> PlannerResult:
    """The best stages and replicas on all devices, under PipeDream's objective.

    The peer's states are the down-sets that its search reaches (`antichain_sets`); here they are
    all down-sets, so the plan is never worse. On one level, states that cannot lead to a better
    plan than the best one along a linear order are dropped.

    Example:
        >>> print(solve_pipedream("vgg16.txt", [HierarchyLevel(4, 1e9)]))  # doctest: +SKIP

    Args:
        source: the profile or its file.
        levels: the innermost level first: devices of a machine, then machines.
        compression: as of `pipeline_seconds`.
        sets: down-sets to cut along; None for all.
        limit: down-sets at most; beyond it only linear orders are searched.

    Raises:
        ValueError: the file or a level is broken, or there are fewer layers than must be.
    """
    graph = source if isinstance(source, PipeDreamGraph) else read_pipedream_graph(source)
    for number, level in enumerate(levels):
        if level.count < 1 or not level.bandwidth > 0:
            raise ValueError(
                f"level {number} has {level.count} members at {level.bandwidth} bytes/s; "
                f"give at least 1 and more than 0"
            )
    planned = graph.without_inputs()
    if sets is None:
        best, notes, exact = _best_model(planned, levels, compression, limit)
    else:
        best = _solved(_PipeDreamModel(planned, sets, levels, compression), math.inf)
        notes, exact = (f"Cut along {len(sets):,} given down-sets.",), False
    plan = best.plan()
    value = pipeline_seconds(graph, plan, levels, compression=compression)
    work = planned.column("seconds").sum() / math.prod(level.count for level in levels)
    return PlannerResult(
        input=graph.name,
        objective=_objective(levels, compression),
        value=value,
        unit="s",
        bound=value if exact else float(work),
        exact=exact,
        stages=tuple(_flat(plan)),
        notes=(*notes, *_nested_notes(plan)),
        recurrence=best.value,
    )


def antichain_sets(graph: PipeDreamGraph, *, limit: int = 200_000) -> DownSets:
    """The down-sets that the peer's own search reaches, in its order.

    It begins with the first source, and steps to the next one by a layer beside what it has,
    together with all that this layer depends on.

    Raises:
        ValueError: some layers are never reached, or there are more sets than `limit`.
    """
    planned = graph.without_inputs()
    count = len(planned.layers)
    closed = [sum(1 << int(v) for v in np.flatnonzero(row)) for row in planned.ancestors_of]
    closed = [before | 1 << v for v, before in enumerate(closed)]
    after = [sum(1 << int(w) for w in np.flatnonzero(row)) for row in planned.successors_of]
    source = next(v for v in range(count) if not planned.predecessors[v])
    links: dict[int, list[int]] = {0: [closed[source]], closed[source]: []}
    queue = [closed[source]]
    while queue:
        current = queue.pop()
        beside = 0
        for v in range(count):
            if current >> v & 1:
                beside |= after[v]
        for v in range(count):
            if beside >> v & 1 and not current >> v & 1:
                larger = current | closed[v]
                links[current].append(larger)
                if larger not in links:
                    if len(links) == limit:
                        raise TooManyDownSetsError(
                            f"{graph.name}: the peer has more than {limit:,} states"
                        )
                    links[larger] = []
                    queue.append(larger)
    ordered = sorted(links, key=lambda members: (members.bit_count(), members))
    if ordered[-1] != (1 << count) - 1:
        raise ValueError(
            f"{graph.name}: the peer reaches {ordered[-1].bit_count()} of {count} layers from "
            f"{planned.layers[source].id}; search all down-sets instead"
        )
    return _as_down_sets(count, ordered, links)


def _as_down_sets(num_nodes: int, ordered: Sequence[int], links: dict[int, list[int]]) -> DownSets:
    place = {members: i for i, members in enumerate(ordered)}
    num_words = max(1, -(-num_nodes // 64))
    words = np.array(
        [[members >> 64 * w & (1 << 64) - 1 for w in range(num_words)] for members in ordered],
        dtype=np.uint64,
    )
    targets = [[place[larger] for larger in links[members]] for members in ordered]
    starts = np.cumsum([0, *map(len, targets)])
    flat = [target for row in targets for target in row]
    return DownSets(
        num_nodes, words, starts.astype(np.int32), np.array(flat, dtype=np.int32), complete=False
    )


@dataclass(frozen=True)
class _PipeDreamModel:
    """A graph, the down-sets to cut along, and the devices."""

    graph: PipeDreamGraph
    sets: DownSets
    levels: Sequence[HierarchyLevel]
    compression: float | None

    @cached_property
    def seconds(self) -> Floats:
        """Work of each set."""
        return self.sets.sums(self.graph.column("seconds"))

    @cached_property
    def parameters(self) -> Floats:
        """Bytes of parameters of each set."""
        return self.sets.sums(self.graph.column("parameter_bytes"))

    @cached_property
    def transfers(self) -> Floats:
        """Bytes that cross behind each set, there and back; none behind the last one."""
        if self.compression is None:
            return np.zeros(len(self.sets))
        crossing = 2 * self.graph.crossing_bytes(self.sets) / self.compression
        crossing[0] = crossing[-1] = 0.0
        return crossing

    def stage_seconds(
        self, inner: int, outer: int, inside: float, replicas: int, level: int, first: bool
    ) -> float:
        """The slowest of computing, fetching and sending."""
        bandwidth = self.levels[level].bandwidth
        parameters = float(self.parameters[outer] - self.parameters[inner])
        sync = 4 * (replicas - 1) * parameters / (bandwidth * replicas)
        if first:
            sharers = self.levels[level - 1].count if level else 1
            return (inside + sync / sharers) / replicas
        crossing = float(max(self.transfers[inner], self.transfers[outer]))
        return max((inside + sync) / replicas, crossing / (bandwidth * replicas))


def _best_model(
    graph: PipeDreamGraph, levels: Sequence[HierarchyLevel], compression: float | None, limit: int
) -> tuple[_Solved, tuple[str, ...], bool]:
    """The best plan, notes, and whether all down-sets were searched."""
    best: _Solved | None = None
    for order in linearisations(graph.predecessors):
        sets = linear_down_sets(graph.predecessors, order)
        solved = _solved(_PipeDreamModel(graph, sets, levels, compression), math.inf)
        if best is None or solved.value < best.value:
            best = solved
    assert best is not None
    allowed = limit if len(levels) == 1 else min(limit, MAX_NESTED_SETS)
    try:
        sets = down_sets(graph.predecessors, limit=allowed)
    except TooManyDownSetsError as error:
        return best, (f"Cut along linear orders only: {error}.",), False
    solved = _solved(_PipeDreamModel(graph, sets, levels, compression), best.value)
    if solved.value < best.value:
        best = solved
    return best, (f"{len(sets):,} down-sets of {len(graph.layers)} layers.",), True


@dataclass(frozen=True)
class _Solved:
    """Tables of a model, the innermost level first; of an inner level one for each start."""

    model: _PipeDreamModel
    tables: tuple[Sequence[DownSetTable], ...]

    @property
    def value(self) -> float:
        """Seconds a minibatch of the best plan."""
        return self.tables[-1][0].value

    def plan(self) -> tuple[Replicated, ...]:
        """The best plan.

        Raises:
            ValueError: there is none, because there are too few layers.
        """
        return self._stages(len(self.tables) - 1, 0, len(self.model.sets) - 1)

    def _stages(self, level: int, start: int, target: int) -> tuple[Replicated, ...]:
        cuts = self.tables[level][start].cuts(target)
        return tuple(self._stage(level, cut) for cut in cuts)

    def _stage(self, level: int, cut: DownSetCut) -> Replicated:
        nodes = self.model.sets.between(cut.inner, cut.outer)
        inner = self._stages(level - 1, cut.inner, cut.outer) if level else ()
        ids = tuple(self.model.graph.layers[v].id for v in nodes)
        if inner:
            ids = tuple(node for stage in inner for node in stage.nodes)
        return Replicated(ids, cut.option + 1, inner)


def _solved(model: _PipeDreamModel, bound: float) -> _Solved:
    """Solve level by level: what a machine makes of any stage is the work of the level outside."""
    tables: list[Sequence[DownSetTable]] = []
    inside: Floats | None = None
    for level in range(len(model.levels) - 1):
        problem = _problem(model, level, inside, math.inf)
        tables.append(cut_from_every_set(problem, partial(_costs, model, level, inside, True)))
        inside = np.full((len(model.sets),) * 2, math.inf)
        for start, table in enumerate(tables[-1]):
            inside[start] = table.best[:, -1]
    last = len(model.levels) - 1
    tables.append([cut_into_stages(_problem(model, last, inside, bound), bound=bound)])
    return _Solved(model, tuple(tables))


def _costs(
    model: _PipeDreamModel, level: int, inside: Floats | None, first: bool, pairs: Pairs
) -> Floats:
    """Seconds of each stage with 1, 2, … replicas, as the first stage or as a later one."""
    sharers = float(model.levels[level - 1].count if level else 1) if first else 0.0
    cost = np.empty((len(pairs.outer), model.levels[level].count))
    work = np.empty((0, 0)) if inside is None else inside
    replica_seconds(
        pairs.first,
        pairs.offsets,
        pairs.outer,
        MeasuredSets(model.seconds, work, model.parameters, model.transfers),
        model.levels[level].bandwidth,
        sharers,
        cost,
    )
    return cost


def _problem(
    model: _PipeDreamModel, level: int, inside: Floats | None, bound: float
) -> StageProblem:
    """Cutting the graph on one level, from the empty set on."""
    count = model.levels[level].count

    def costs(pairs: Pairs) -> Floats:
        starts_here = level == len(model.levels) - 1 and not pairs.first
        return _costs(model, level, inside, starts_here, pairs)

    return StageProblem(
        model.sets,
        costs,
        needs=[[replicas] for replicas in range(1, count + 1)],
        counts=[count],
        weight=model.seconds,
        limit=bound * math.prod(m.count for m in model.levels[: level + 1]),
        exactly=True,
        alive=_alive(model, bound) if len(model.levels) == 1 else None,
    )


def _alive(model: _PipeDreamModel, bound: float) -> Flags | None:
    """By set and devices taken, whether a plan faster than `bound` can pass there.

    Each side needs devices for its work, and the stage behind the set some to fetch its inputs.
    """
    if not math.isfinite(bound):
        return None
    count, bandwidth = model.levels[0].count, model.levels[0].bandwidth
    taken = np.arange(count + 1)
    slack = bound * (1 + 1e-12)
    before, total = model.seconds[:, None], model.seconds[-1]
    behind = np.maximum(total - before, model.transfers[:, None] / bandwidth)
    alive: Flags = (before <= slack * taken) & (behind <= slack * (count - taken))
    return alive


def _flat(plan: Sequence[Replicated]) -> list[PlannedStage]:
    """Stages of the innermost level, with replicas on all levels together."""
    flat: list[PlannedStage] = []
    for stage in plan:
        parts = _flat(stage.inner) or [PlannedStage(stage.nodes)]
        flat.extend(replace(part, replicas=stage.replicas * part.replicas) for part in parts)
    return flat


def _nested_notes(plan: Sequence[Replicated]) -> tuple[str, ...]:
    if not any(stage.inner for stage in plan):
        return ()
    parts = (
        f"{stage.replicas} × ({'-'.join(str(s.replicas) for s in stage.inner)})" for stage in plan
    )
    return (f"Machines and devices in them: {', '.join(parts)}.",)


def _objective(levels: Sequence[HierarchyLevel], compression: float | None) -> str:
    shape = " × ".join(str(level.count) for level in reversed(levels))
    rates = ", ".join(f"{level.bandwidth / 1e9:g}" for level in reversed(levels))
    charged = "not charged" if compression is None else f"charged at 1/{compression:g}"
    return f"slowest stage, {shape} devices at {rates} GB/s, activations {charged}"
