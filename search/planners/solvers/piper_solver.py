"""Stages with replicas, tensor parallelism and recompute under Piper's objective, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from stratagem.searcher.planners.inputs.down_sets import (
    DownSets,
    TooManyDownSetsError,
    down_sets,
    linear_down_sets,
    linearisations,
)
from stratagem.searcher.planners.inputs.piper import (
    PiperInput,
    read_piper_input,
    stage_seconds,
    with_seconds,
)
from stratagem.searcher.planners.inputs.result import PlannedStage, PlannerResult
from stratagem.searcher.planners.solvers._piper_kernels import (
    CrossedSets,
    PipedNodes,
    PipedPlans,
    StageForms,
    StagesAbove,
    relax_replicas,
    stage_table,
)
from stratagem.simulator.base.arrays import Flags, Floats, Indices, Ints

EFFORT = 200_000
"""Branches that the choice of ways of one stage may take."""
GREEDY = 0
ENTRIES_AT_ONCE = 4_000_000
"""Entries of the table of stages that are held in memory at a time."""
MAX_STATES = 60_000_000
"""Entries of the table of plans; with more, only linear orders are searched."""


def solve_piper(
    source: PiperInput | str | Path, *, greedy: bool = False, limit: int = 200_000
) -> PlannerResult:
    """The best stages, replicas, tensor parallelism and ways to run, under Piper's objective.

    Plans are built from the last stage to the first over sets closed under successors, as the
    peer does; what a stage holds depends on the replicas from it on. Which nodes recompute is a
    knapsack, solved exactly where the peer is greedy. A plan along a linear order bounds the rest.

    Example:
        >>> print(solve_piper("bert32a100.json"))  # doctest: +SKIP

    Args:
        source: the input or its file.
        greedy: choose ways by the peer's greedy rule: its own plans.
        limit: sets at most; beyond it only linear orders are searched.

    Raises:
        ValueError: the file is broken, or no plan fits into the memory.
    """
    graph = source if isinstance(source, PiperInput) else read_piper_input(source)
    model = _PiperModel(graph)
    if not model.degrees or not np.isfinite(model.least_work).all():
        raise ValueError(_does_not_fit(graph))
    plan = _Plan(math.inf, (), proved=True)
    for order in linearisations(model.successors):
        sets = linear_down_sets(model.successors, order)
        plan = min(plan, _Along(model, sets, plan.value, GREEDY).solve(), key=lambda p: p.value)
    complete, effort = True, GREEDY if greedy else EFFORT
    try:
        sets = down_sets(model.successors, limit=min(limit, MAX_STATES // model.num_states))
    except TooManyDownSetsError as error:
        complete, notes = False, [f"Cut along linear orders only: {error}."]
        orders = linearisations(model.successors)
        families = [linear_down_sets(model.successors, order) for order in orders]
    else:
        notes, families = [f"{len(sets):,} down-sets of {len(graph.nodes)} nodes."], [sets]
    proved = True
    for family in families:
        found = _Along(model, family, plan.value, effort).solve()
        proved &= found.proved
        plan = min(plan, found, key=lambda p: p.value)
    if not plan.stages:
        raise ValueError(_does_not_fit(graph))
    if not proved:
        notes.append(f"Some choices of ways were cut off after {EFFORT:,} branches.")
    stages = with_seconds(graph, plan.stages)
    value = max(stage_seconds(graph, stages))
    exact = complete and proved and not greedy
    return PlannerResult(
        input=graph.name,
        objective=(
            f"Piper's slowest stage, {graph.num_devices} devices of "
            f"{graph.memory_bytes / 2**30:.4g} GiB, {graph.num_microbatches} microbatches"
            f"{', greedy knapsack' if greedy else ''}"
        ),
        value=value,
        unit="s",
        bound=value if exact else float(model.least_work.sum() / graph.num_devices),
        exact=exact,
        stages=stages,
        notes=tuple(notes),
        recurrence=plan.value,
    )


def _does_not_fit(graph: PiperInput) -> str:
    for node in graph.nodes:
        degrees = sorted(t for t, ways in node.options.items() if ways)
        if not degrees or degrees[0] > graph.num_devices:
            return (
                f"{graph.name}: no plan fits on {graph.num_devices} devices of any size: node "
                f"{node.id} runs on {degrees or 'no'} devices only; give more devices or options"
            )
    least = max(
        min(
            (o.memory_usage_a + o.memory_usage_b for ways in n.options.values() for o in ways),
            default=math.inf,
        )
        for n in graph.nodes
    )
    return (
        f"{graph.name}: no plan fits on {graph.num_devices} devices of "
        f"{graph.memory_bytes / 1e9:.4g} GB; the largest node alone takes {least / 1e9:.4g} GB "
        f"in its smallest way; give more devices or memory"
    )


@dataclass(frozen=True)
class _Plan:
    """A plan and whether its search cut no choice of ways off."""

    value: float
    stages: tuple[PlannedStage, ...]
    proved: bool


@dataclass(frozen=True)
class _PiperModel:
    """An input as arrays: by degree, node and way."""

    graph: PiperInput

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Direct successors of each node: what must be planned before it."""
        after: list[list[int]] = [[] for _ in self.graph.nodes]
        for node, before in enumerate(self.graph.predecessors):
            for other in before:
                after[other].append(node)
        return tuple(map(tuple, after))

    @property
    def num_states(self) -> int:
        """Entries of the table of plans for a set."""
        return (self.graph.num_devices + 1) * (self.graph.most_replicas + 1)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that some node offers and that fit on the devices."""
        offered = {t for node in self.graph.nodes for t, ways in node.options.items() if ways}
        return tuple(sorted(t for t in offered if 1 <= t <= self.graph.num_devices))

    @cached_property
    def options(self) -> tuple[tuple[int, int], ...]:
        """Number of a degree, and replicas: every way to put a stage on devices."""
        return tuple(
            (number, d)
            for number, t in enumerate(self.degrees)
            for d in range(1, min(self.graph.num_devices // t, self.graph.most_replicas) + 1)
            if self.graph.num_microbatches % d == 0
        )

    def column(self, field: str, missing: float) -> Floats:
        """One attribute of all ways; `missing` where there is no such way."""
        nodes = self.graph.nodes
        ways = max((len(w) for n in nodes for w in n.options.values()), default=1)
        array = np.full((len(self.degrees), len(nodes), ways), missing)
        for number, t in enumerate(self.degrees):
            for v, node in enumerate(nodes):
                for o, option in enumerate(node.options.get(t, ())):
                    array[number, v, o] = getattr(option, field)
        return array

    @cached_property
    def time(self) -> Floats:
        """Seconds by degree, node and way."""
        return self.column("time_per_sample", math.inf)

    @cached_property
    def held_each(self) -> Floats:
        """Bytes a microbatch in flight."""
        return self.column("memory_usage_a", 0.0)

    @cached_property
    def held_once(self) -> Floats:
        """Bytes besides."""
        return self.column("memory_usage_b", 0.0)

    @cached_property
    def weights(self) -> Floats:
        """Bytes of weights."""
        return self.column("parameter_size", 0.0)

    @cached_property
    def edges(self) -> tuple[Indices, Floats, Floats, Floats]:
        """Ends, bytes, and what consumers and producers add by edge, degree and way."""
        graph, index = self.graph, self.graph.index
        ends = np.array(
            [(index[e.source_id], index[e.dest_id]) for e in graph.edges], dtype=np.int32
        ).reshape(-1, 2)
        num_bytes = np.array([e.communication_cost for e in graph.edges], dtype=np.float64)
        shape = (len(graph.edges), len(self.degrees), self.time.shape[2])
        fetch, send = np.zeros(shape), np.zeros(shape)
        for e, edge in enumerate(graph.edges):
            tail, head = graph.nodes[ends[e, 0]], graph.nodes[ends[e, 1]]
            for number, t in enumerate(self.degrees):
                for o, option in enumerate(head.options.get(t, ())):
                    fetch[e, number, o] = option.sync_time_fw[edge.source_id]
                for o, option in enumerate(tail.options.get(t, ())):
                    send[e, number, o] = option.sync_time_bw[edge.dest_id]
        return ends, num_bytes, fetch, send

    @cached_property
    def least_work(self) -> Floats:
        """Device-seconds that each node takes at least, whatever the plan."""
        per_device = self.time * np.array(self.degrees, dtype=np.float64)[:, None, None]
        least: Floats = per_device.min(axis=(0, 2))
        return least

    @cached_property
    def option_arrays(self) -> tuple[Indices, Indices, Indices]:
        """Number of the degree, degree and replicas of each option."""
        numbers = [number for number, _ in self.options]
        return (
            np.array(numbers, dtype=np.int32),
            np.array([self.degrees[number] for number in numbers], dtype=np.int32),
            np.array([d for _, d in self.options], dtype=np.int32),
        )


@dataclass(frozen=True)
class _Stages:
    """Stages of one inner set, and the plans of that set that they would come before.

    Attributes:
        inner: the inner set.
        outer: the outer sets.
        from_devices: which numbers of devices the plans take.
        fewest: least replicas of a plan.
        most: most replicas of a plan.
    """

    inner: int
    outer: Indices
    from_devices: Flags
    fewest: int
    most: int


@dataclass(frozen=True)
class _Along:
    """The search for plans below `bound` along some down-sets."""

    model: _PiperModel
    sets: DownSets
    bound: float
    effort: int

    @cached_property
    def work(self) -> Floats:
        """Device-seconds that each set takes at least."""
        return self.sets.sums(self.model.least_work)

    @cached_property
    def fastest(self) -> Floats:
        """Seconds of each set by degree, every node in its fastest way; 0 where it has none."""
        least = self.model.time.min(axis=2)
        least[np.isinf(least)] = 0.0
        return np.stack([self.sets.sums(row) for row in least], axis=1)

    @cached_property
    def crossing(self) -> tuple[Indices, Indices]:
        """Edges that lead into each set from outside: offsets and edges."""
        tails, heads = self.model.edges[0].T
        inside = self.sets.membership
        rows, edges = np.nonzero(inside[:, heads] & ~inside[:, tails])
        starts = np.searchsorted(rows, np.arange(len(self.sets) + 1))
        return starts.astype(np.int32), edges.astype(np.int32)

    @cached_property
    def alive(self) -> Flags:
        """By set and devices taken, whether the devices suffice for the work on each side."""
        taken = np.arange(self.model.graph.num_devices + 1)
        if not math.isfinite(self.bound):
            return np.ones((len(self.sets), len(taken)), dtype=np.bool_)
        slack, work = self.bound * (1 + 1e-12), self.work[:, None]
        enough: Flags = (work <= slack * taken) & (self.work[-1] - work <= slack * taken[::-1])
        return enough

    def solve(self) -> _Plan:
        """The best plan; none if there is none below the bound."""
        graph = self.model.graph
        shape = (len(self.sets), graph.num_devices + 1, graph.most_replicas + 1)
        best = np.full(shape, math.inf)
        origin = np.full(shape, -1, dtype=np.int64)
        choice = np.full(shape, -1, dtype=np.int32)
        best[0, 0, 0] = 0.0
        reached = np.zeros(len(self.sets), dtype=np.bool_)
        reached[0] = True
        proved, entries = True, len(self.model.options) * (shape[2] + 1)
        for pairs in self.sets.pairs(
            self.work,
            self.bound * graph.num_devices,
            sources=reached,
            targets=np.asarray(self.alive.any(axis=1)),
            at_once=max(1, ENTRIES_AT_ONCE // entries),
        ):
            for number in range(len(pairs.offsets) - 1):
                inner = pairs.first + number
                outer = pairs.outer[pairs.offsets[number] : pairs.offsets[number + 1]]
                now = min(self.bound, float(best[-1].min()))
                plans = best[inner] < now
                if not len(outer) or not plans.any():
                    continue
                replicas = np.flatnonzero(plans.any(axis=0))
                stages = _Stages(
                    inner, outer, plans.any(axis=1), int(replicas[0]), int(replicas[-1])
                )
                table, sure, _ = self.stage_seconds(stages, now)
                proved &= sure
                forms = StageForms(*self.model.option_arrays)
                found = PipedPlans(best, origin, choice, reached)
                relax_replicas(inner, outer, table, forms, now, self.alive, found)
        value = float(best[-1].min())
        if not math.isfinite(value):
            return _Plan(math.inf, (), proved)
        return _Plan(value, self._plan(best, origin, choice), proved)

    def stage_seconds(
        self, stages: _Stages, bound: float, only: int | None = None
    ) -> tuple[Floats, bool, Indices]:
        """Seconds of stages by outer set, option and microbatches in flight, and the last ways."""
        model = self.model
        chosen = slice(None) if only is None else slice(only, only + 1)
        forms = StageForms(*(array[chosen] for array in model.option_arrays))
        ends, edge_bytes, fetch_sync, send_sync = model.edges
        starts, crossing = self.crossing
        table = np.empty((len(stages.outer), len(forms.degrees), model.graph.most_replicas + 2))
        pick = np.zeros(len(model.graph.nodes), dtype=np.int32)
        nodes = PipedNodes(
            time=model.time,
            weights=model.weights,
            held_each=model.held_each,
            held_once=model.held_once,
            edge_ends=ends,
            edge_bytes=edge_bytes,
            fetch_sync=fetch_sync,
            send_sync=send_sync,
            memory=model.graph.memory_bytes,
            bandwidth=model.graph.bandwidth,
            num_microbatches=model.graph.num_microbatches,
        )
        above = StagesAbove(
            inner=stages.inner,
            outer=stages.outer,
            from_devices=stages.from_devices,
            from_replicas=np.array([stages.fewest, stages.most], dtype=np.int32),
        )
        sets = CrossedSets(self.sets.words, self.fastest, starts, crossing, self.alive)
        proved = stage_table(nodes, forms, sets, above, bound, self.effort, pick, table)
        return table, proved, pick

    def _plan(self, best: Floats, origin: Ints, choice: Indices) -> tuple[PlannedStage, ...]:
        """Stages first to last: the table was filled from the last one on."""
        _, num_devices, num_replicas = best.shape
        place = len(self.sets) - 1
        devices, total = divmod(int(best[place].argmin()), num_replicas)
        stages: list[PlannedStage] = []
        while place:
            option = int(choice[place, devices, total])
            number, d = self.model.options[option]
            before, so_far = divmod(int(origin[place, devices, total]), num_replicas)
            inner, devices_before = divmod(before, num_devices)
            from_devices = np.arange(num_devices) == devices_before
            outer = np.array([place], dtype=np.int32)
            own = _Stages(inner, outer, from_devices, so_far, so_far)
            _, _, pick = self.stage_seconds(own, math.inf, option)
            nodes = [self.model.graph.nodes[v] for v in self.sets.between(inner, place)]
            t = self.model.degrees[number]
            ways = tuple(node.options[t][pick[i]].id for i, node in enumerate(nodes))
            ids = tuple(node.id for node in nodes)
            stages.append(PlannedStage(ids, replicas=d, shards=t, options=ways))
            place, devices, total = inner, devices_before, so_far
        return tuple(stages)
