"""The best of many training setups: few are simulated, all others bounded or estimated.

Setups that differ in degrees share their layers, so a model of three layers (see
`shortened_models`) prices all of them: per operator the time of its passes and of the conversions
before it, and the bytes that wait between its forward and backward pass. Sums over a stage then
give, for each setup,

    a bound     computing alone: the busiest rank is never idle, M microbatches of it
    an estimate computing and conversions, the pipeline filled, gradients reduced
    a need      state and activations in flight, which no plan of this setup goes below
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from stratagem.searcher.methods.literature.shortened_models import Shortened, shortened
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.schedule_traits import Run, run_of
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.strategies import with_recompute
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh, MeshAxis
from stratagem.simulator.pipeline.pipeline import PlannedPipeline
from stratagem.simulator.pipeline.priced_pipeline import (
    PricedPipeline,
    Prices,
    listed_choices,
    price_pipeline,
)
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.named_schedules import one_f_one_b
from stratagem.simulator.simulation.device_memory import StageTensors
from stratagem.simulator.simulation.simulation import Simulation

TOLD = 4
"""Microbatches a rank after which no schedule that does not run ahead holds more."""
OFF = 1.05
"""Estimates of a family are this far from one another's, at least: a setup that takes the least
share of its estimate that any took, and so much less, and is no better than the best, is not
simulated."""
MOST_WITHOUT_ROOM = 3
"""Where no setup can fit, so many say what the family would need."""
_EACH_SYNC = (0.0, 0.0, 0.5, 1.5)
"""By ZeRO stage, how many all-reduces of gradients a microbatch's gathers and syncs are worth."""


@dataclass(frozen=True)
class Outlook:
    """What is known of a setup before it is simulated: seconds, and bytes per device.

    `bound` is at most the simulated step, `need` at most the simulated peak.
    """

    setup: TrainingSetup
    bound: float
    estimate: float
    need: float


@dataclass(frozen=True)
class Dropped:
    """A setup that was not simulated, and why."""

    setup: TrainingSetup
    reason: str


@dataclass(frozen=True)
class Screening:
    """What became of a family of setups.

    Attributes:
        simulated: the plans that were simulated, best first.
        dropped: all other setups, each with the reason.
    """

    simulated: tuple[Simulation, ...]
    dropped: tuple[Dropped, ...]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that were simulated, best first."""
        return tuple(simulation.plan for simulation in self.simulated)


def screen(
    situation: Situation, setups: Iterable[TrainingSetup], *, max_simulated: int = 12
) -> Screening:
    """Simulate the most promising setups of a family.

    A setup is left out if it cannot be built, if its need is more than a device has, or if its
    bound is no better than the best plan found; these are certain. The others are simulated by
    their estimates, shortest first, until `max_simulated` of them fit, three times as many were
    tried, or by estimates that are as far off as those before, and `OFF` or the range of these
    more, none is better. What recomputes more is not even priced before it may be its turn. Where
    no setup can fit, `MOST_WITHOUT_ROOM` with the least need are simulated at most.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import gpt
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> found = screen(situation, [TrainingSetup(tensor=t) for t in (1, 2, 3)])
        >>> found.dropped[0].reason
        "3 tensor × 1 pipeline ways are 3 devices, which do not divide the 8 of cluster 'dgx-a100'"

    Raises:
        ValueError: `max_simulated` is below 1.
    """
    if max_simulated < 1:
        raise ValueError(f"screen: max_simulated is {max_simulated}; it must be at least 1")
    return _Screen(situation, max_simulated).of(setups)


@dataclass(eq=False)
class _Screen:
    """One run over a family of setups."""

    situation: Situation
    max_simulated: int
    simulated: list[Simulation] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def of(self, setups: Iterable[TrainingSetup]) -> Screening:
        """See `screen`."""
        short = self._by_estimate(_ladders(setups))
        if not self.simulated:
            most = min(self.max_simulated, MOST_WITHOUT_ROOM)
            for outlook in sorted(short, key=lambda o: o.need):
                if why := self._why_not(outlook, most):
                    self._drop(outlook.setup, why)
                else:
                    self._simulate(outlook)
        else:
            there = f"{self._capacity / 2**30:.1f} GiB"
            for outlook in short:
                gib = outlook.need / 2**30
                self._drop(outlook.setup, f"needs at least {gib:.1f} GiB of a device's {there}")
        return Screening(tuple(sorted(self.simulated, key=rank)), tuple(self.dropped))

    def _by_estimate(self, ladders: Iterable[list[TrainingSetup]]) -> list[Outlook]:
        """Simulate what may have room, the shortest estimate first; what surely has none.

        A setup that recomputes more takes longer by its estimate, and at least, so it is priced
        once the others are behind it.
        """
        queue: list[tuple[float, int, Outlook, list[TrainingSetup]]] = []
        number, short = itertools.count(), []

        def push(ladder: list[TrainingSetup]) -> None:
            for place, setup in enumerate(ladder):
                if (outlook := self._outlook(setup)) is not None:
                    entry = outlook.estimate, next(number), outlook, ladder[place + 1 :]
                    heapq.heappush(queue, entry)
                    return

        for ladder in ladders:
            push(ladder)
        while queue:
            _, _, outlook, others = heapq.heappop(queue)
            if outlook.need > self._capacity:
                short.append(outlook)
            elif why := self._why_not(outlook, 3 * self.max_simulated):
                for setup in (outlook.setup, *others):
                    self._drop(setup, why)
                continue
            else:
                self._simulate(outlook)
            push(others)
        return short

    def _outlook(self, setup: TrainingSetup) -> Outlook | None:
        try:
            return self.situation.derive(Rates).outlook(setup)
        except ValueError as error:
            self._drop(setup, str(error))
            return None

    def _why_not(self, outlook: Outlook, most: int) -> str:
        """Why a setup is not simulated, nor those that recompute more; empty if it is."""
        found = [s.step_time for s in self.simulated if s.fits]
        best = min(found, default=float("inf"))
        if outlook.bound >= best:
            return f"takes at least {outlook.bound:.4g} s; another plan takes {best:.4g} s"
        if (likely := _likely_least(outlook.estimate, self.shares)) >= best:
            return f"takes {likely:.4g} s by its estimate; another plan takes {best:.4g} s"
        if len(found) >= self.max_simulated or len(self.simulated) >= most:
            tried = len(self.simulated)
            return f"estimated at {outlook.estimate:.4g} s, after {tried} before it"
        return ""

    def _simulate(self, outlook: Outlook) -> None:
        plan = outlook.setup.plan(self.situation.graph, self.situation.cluster)
        self.simulated.append(self.situation.simulate(plan))
        self.shares.append(self.simulated[-1].step_time / outlook.estimate)

    def _drop(self, setup: TrainingSetup, why: str) -> None:
        self.dropped.append(Dropped(setup, why))

    @cached_property
    def _capacity(self) -> int:
        """Bytes of the largest device: what needs more fits nowhere."""
        cluster = self.situation.cluster
        alone = {
            cluster.device_type(k).name: DeviceMesh((MeshAxis("device", 1),), (k,))
            for k in range(cluster.num_devices)
        }
        return max(mesh.memory_bytes(cluster) for mesh in alone.values())


def _ladders(setups: Iterable[TrainingSetup]) -> Iterable[list[TrainingSetup]]:
    """Setups that differ in what they recompute only, less first."""
    found: dict[TrainingSetup, list[TrainingSetup]] = {}
    for setup in setups:
        found.setdefault(replace(setup, recompute="none"), []).append(setup)
    for ladder in found.values():
        ladder.sort(key=lambda setup: RECOMPUTE_POLICIES.index(setup.recompute))
    return found.values()


def _likely_least(estimate: float, shares: Sequence[float]) -> float:
    """What a setup takes whose estimate is off like those before; 0 where one alone tells of it.

    Args:
        estimate: seconds of the setup.
        shares: seconds that others took, by their estimates.
    """
    if len(shares) < 2:
        return 0.0
    least, most = min(shares), max(shares)
    return estimate * least / max(OFF, most / least)


@dataclass(frozen=True, eq=False)
class _Layers:
    """Per operator of the whole model what a microbatch of it costs on one device: s and bytes."""

    compute: Floats
    between: Floats
    held: Floats
    parameters: Floats
    gradients: Floats
    optimizer: Floats


@dataclass(eq=False)
class Rates:
    """Bounds and estimates of training setups of one situation; families share their layers."""

    situation: Situation
    _layers: dict[tuple[object, ...], _Layers] = field(default_factory=dict)
    _cuts: dict[tuple[int, str], tuple[Ints, Flags]] = field(default_factory=dict)
    _links: dict[tuple[int, int], AxisLink] = field(default_factory=dict)
    _strategies: dict[tuple[object, ...], Choices] = field(default_factory=dict)

    def outlook(self, setup: TrainingSetup) -> Outlook:
        """What is known of a setup.

        Raises:
            ValueError: it cannot be built for this model and cluster.
        """
        graph, cluster = self.situation.graph, self.situation.cluster
        parts, data = setup.num_microbatches(graph, cluster), setup.data(cluster)
        setup.check(graph, cluster)
        run = _run(setup, parts)
        stage_of, leaves = self._stages(setup)
        layers = self._layer_rates(setup, data)
        count = setup.pipeline * setup.virtual_stages
        compute = _sums(layers.compute, stage_of, count)
        spent = compute + _sums(layers.between, stage_of, count)
        sync = self._sync(setup, data, _sums(layers.gradients, stage_of, count))
        spent = np.maximum(spent, _EACH_SYNC[setup.zero] * sync)
        estimate = _estimate(spent, run, parts) + max(0.0, float((sync - 2 / 3 * spent).max()))
        held = np.where(leaves, 0.0, layers.held)
        need = _need(setup, run, data, layers, _sums(held, stage_of, count), stage_of, parts)
        return Outlook(setup, _bound(compute, run, parts), estimate, need)

    def _stages(self, setup: TrainingSetup) -> tuple[Ints, Flags]:
        """The stage of each operator, and whether another stage reads it."""
        graph = self.situation.graph
        key = setup.pipeline * setup.virtual_stages, setup.partition
        if key not in self._cuts:
            stages = setup.stages(graph, self.situation.cluster)
            number = {name: s for s, names in enumerate(stages) for name in names}
            stage_of = np.array([number[name] for name in graph.names])
            leaves = np.zeros(stage_of.size, dtype=np.bool_)
            for edge in graph.edges:
                leaves[edge.producer] |= stage_of[edge.producer] != stage_of[edge.consumer]
            self._cuts[key] = stage_of, leaves
        return self._cuts[key]

    @cached_property
    def _short(self) -> Shortened:
        return shortened(self.situation.graph)

    def _layer_rates(self, setup: TrainingSetup, data: int) -> _Layers:
        """Layers as one data-parallel rank sees them; experts are shared out over several.

        What one rank has of a batch is priced as a microbatch, where the batch can be cut so far.
        """
        graph = self.situation.graph
        alone = graph.batch // setup.microbatch in graph.microbatch_counts
        ways = data if setup.expert > 1 or not alone else 1
        setup = _within_stages(setup)
        if ways == setup.tensor == 1:  # One device shards nothing; tensor-parallel ones do.
            setup = replace(setup, zero=0)
        key = ways, setup
        if key not in self._layers:
            self._layers[key] = self._price(setup, ways)
        return self._layers[key]

    def _price(self, setup: TrainingSetup, data: int) -> _Layers:
        s = self.situation
        graph = self._short.graph.microbatch(s.graph.batch // (setup.microbatch * data))
        axes = setup.axes(data)
        mesh = DeviceMesh(axes, tuple(range(math.prod(axis.size for axis in axes))))
        choices = with_recompute(graph, self._strategy(setup, graph, mesh.shape), setup.recompute)
        # Only what a microbatch takes and leaves is asked, which no schedule changes.
        stage = PlannedPipeline((graph.names,), (mesh,), one_f_one_b(1, 1), s.cluster, s.training)
        listed = listed_choices(graph, choices)
        priced = price_pipeline(stage, graph, listed, Prices(s.costs, s.memory))
        (table,) = priced.tables
        compute = np.array(
            [row.passes_ns[0] + row.recompute.ns[0] for row in map(table.row, table.operators)]
        )
        between = np.zeros(len(graph.operators))
        for edge, number in zip(table.edges, table.edge_row_of, strict=True):
            row = table.edge_rows[number]
            between[edge.consumer] += row.both_ns[0, 0] + row.recompute.ns[0, 0]
            if setup.inputs_first:  # What converts the gradient runs beside those of weights.
                beside = table.row(edge.consumer).weight_gradient.ns[0]
                between[edge.consumer] -= min(row.backward.ns[0, 0], beside)
        full = self._short.stands_for
        return _Layers(
            compute[full] * 1e-9,
            between[full] * 1e-9,
            _held_bytes(priced)[full],
            *(
                np.array([float(getattr(table.row(i), which)[0]) for i in table.operators])[full]
                for which in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
            ),
        )

    def _strategy(
        self, setup: TrainingSetup, graph: OperatorGraph, shape: tuple[int, ...]
    ) -> Choices:
        """The choices of a setup without recompute; microbatches of any size have the same."""
        key = (
            shape,
            replace(setup, microbatch=1, recompute="none", inputs_first=False),
        )
        if key not in self._strategies:
            self._strategies[key] = replace(setup, recompute="none").strategy(graph, shape)
        return self._strategies[key]

    def _sync(self, setup: TrainingSetup, data: int, nbytes: Floats) -> Floats:
        """Seconds of an all-reduce of each stage's gradients over the data-parallel ranks."""
        if data == 1:
            return np.zeros_like(nbytes)
        key = data, setup.tensor
        if key not in self._links:
            axes = (MeshAxis("data", data), MeshAxis("tensor", setup.tensor))
            mesh = DeviceMesh(axes, tuple(range(data * setup.tensor)))
            self._links[key] = mesh.link(0, self.situation.cluster)
        link = self._links[key]
        return np.array(
            [collective_time(Collective.ALL_REDUCE, round(n), data, link) for n in nbytes]
        )


def _within_stages(setup: TrainingSetup) -> TrainingSetup:
    """A setup without what changes nothing about a layer: of equal ones one is priced."""
    return replace(
        setup,
        pipeline=1,
        virtual_stages=1,
        schedule="1f1b",
        overlap_gradients=True,
        bucket_bytes=0,
        partition="layers",
    )


def _held_bytes(priced: PricedPipeline) -> Floats:
    """Bytes that wait between forward and backward pass, by the operator that they belong to."""
    (lifetimes,), none = priced.lifetimes, priced.first
    tensors = StageTensors(0, lifetimes, lifetimes.bytes_under(none), priced.graph.names)
    held = np.zeros(none.size)
    waits = tensors.crosses(1)
    np.add.at(held, lifetimes.owner[waits], tensors.nbytes[waits])
    return held


def _sums(values: Floats, stage_of: Ints, count: int) -> Floats:
    summed: Floats = np.bincount(stage_of, weights=values, minlength=count).astype(np.float64)
    return summed


def _run(setup: TrainingSetup, parts: int) -> Run:
    """What the setup's schedule does, of whose microbatches so many tell that are alike."""
    ranks, stages = setup.pipeline, setup.pipeline * setup.virtual_stages
    few = parts if parts <= TOLD * ranks else TOLD * ranks + parts % ranks
    run = run_of(setup.placed_schedule, stages, few, ranks)
    if run is None:
        raise ValueError(
            f"schedule {setup.placed_schedule!r} cannot run {parts} microbatches through {stages} "
            f"stages on {ranks} pipeline ranks: choose another microbatch or number of ranks"
        )
    return run


def _bound(compute: Floats, run: Run, parts: int) -> float:
    """Computing of the busiest rank.

    Where a rank has one stage and makes gradients at once, nothing of a stage begins before the
    first microbatch has come through those before it, nor ends the step before the gradients of
    the last have gone back there.
    """
    if len(run.waiting) == compute.size and not run.splits_backward:
        return float(max(parts * compute + np.cumsum(compute) - compute))
    return float(parts * _by_rank(compute, run).max())


def _by_rank(values: Floats, run: Run) -> Floats:
    return _sums(values, np.array(run.ranks), len(run.waiting))


def _estimate(spent: Floats, run: Run, parts: int) -> float:
    """The busiest rank, and the filling of the pipeline, which virtual stages divide."""
    ranks = _by_rank(spent, run)
    filling = (ranks.sum() - ranks.max()) / (spent.size // ranks.size)
    return float(parts * ranks.max() + filling)


def _need(
    setup: TrainingSetup,
    run: Run,
    data: int,
    layers: _Layers,
    held: Floats,
    stage_of: Ints,
    parts: int,
) -> float:
    """Bytes that the fullest rank needs at least: state, and the microbatches in flight.

    Where a rank has several stages, it is left open whose microbatches those are.
    """
    over = [data if setup.zero >= stage else 1 for stage in (3, 2, 1)]
    state = layers.parameters / over[0] + layers.gradients / over[1] + layers.optimizer / over[2]
    states = _by_rank(_sums(state, stage_of, len(run.ranks)), run)
    least = np.full(len(run.waiting), np.inf)
    np.minimum.at(least, np.array(run.ranks), held)
    flying = np.zeros(len(run.waiting))
    flying[list(run.ranks)] = run.held
    if run.runs_ahead:
        flying[:] = parts * setup.virtual_stages
    return float((states + flying * least).max())
