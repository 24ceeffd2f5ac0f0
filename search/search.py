"""Searching a plan: baselines first, then annealing on the most promising skeletons."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stratagem.search.anneal import Chain
from stratagem.search.baselines import Situation, baseline_plans, rank
from stratagem.search.problem import Problem, make_problem
from stratagem.search.result import Budget, SearchResult, StopReason, TracePoint
from stratagem.search.space import ZERO_STAGES, Options, Skeleton, skeletons
from stratagem.search.strategies import (
    Choices,
    data_parallel,
    tensor_dims,
    tensor_parallel,
    with_recompute,
)
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.costs import CostModel
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.kernel_costs import default_costs
from stratagem.simulator.plan import Plan, Prediction, Stage
from stratagem.simulator.simulation import Simulation
from stratagem.simulator.training import Training

BATCH = 500
"""Proposals between two looks at the clock and at the keyboard."""


@dataclass(frozen=True)
class Progress:
    """Where a search is: what it does, how much of it is done (0 to 1), best step so far (s)."""

    phase: str
    fraction: float
    best: float


Report = Callable[[Progress], None]


def search(
    graph: OperatorGraph,
    cluster: Cluster,
    *,
    costs: CostModel | None = None,
    training: Training | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    schedule: str = "1f1b",
    zero_stages: Sequence[int] = ZERO_STAGES,
    num_skeletons: int = 4,
    options: Options | None = None,
    progress: Report | None = None,
) -> SearchResult:
    """Find a plan to train `graph` on `cluster`.

    First every baseline is simulated. Then skeletons (stages × meshes × microbatches) are ranked
    by the best known strategy on each, and on the best `num_skeletons` Metropolis–Hastings chains
    change the config of one operator or one class of repeated operators at a time, scored by the
    event simulator (FlexFlow, Jia et al. 2019). The result is never worse than the best baseline.
    Equal arguments give equal plans, unless the budget's time runs out.

    Example:
        >>> from stratagem.simulator.models import mlp
        >>> graph = mlp([256, 256, 256], batch=64)
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> search(graph, cluster, budget=Budget(evaluations=200)).simulation.fits
        True

    Args:
        graph: the model at its whole batch.
        cluster: where it is to run; all its devices are used.
        costs: prices of operators; the device model of the cluster when left out.
        training: precision and optimizer; float32 and Adam when left out.
        budget: evaluations to spend, and perhaps seconds.
        seed: of every random number.
        schedule: of the pipelines tried, ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zb-h1"``
            (the last two are simulated only).
        zero_stages: the ZeRO stages that a choice may have.
        num_skeletons: how many skeletons are annealed.
        options: recomputing, pieces, fusion and buckets; see `Options`.
        progress: called often with a `Progress`.

    Returns:
        The best plan that fits, with its baselines; where nothing fits, the plan closest to
        fitting (`SearchResult.simulation.fits` is then False and its memory says by how much).
    """
    started = time.monotonic()
    spend = budget or Budget()
    report = progress or (lambda _: None)
    situation = Situation(graph, cluster, training or Training(), costs or default_costs())
    report(Progress("simulating baselines", 0.0, float("inf")))
    baselines = baseline_plans(situation, schedule)
    best = min(baselines.values(), key=rank)
    allowed = options or Options()
    run = _Run(situation, spend, seed, tuple(zero_stages), allowed, report, started, best)
    try:
        ranked = run.rank_skeletons(skeletons(graph, cluster, schedule=schedule))
        open_ones = [r for r in ranked if any(mesh.num_devices > 1 for mesh in r.skeleton.meshes)]
        reason = run.anneal(open_ones[:num_skeletons])
    except KeyboardInterrupt:
        reason = StopReason.INTERRUPTED
    best = run.finish()
    plan = replace(
        best.plan,
        name=f"{graph.name} on {cluster.name}",
        seed=seed,
        prediction=Prediction(
            best.step_time, tuple(stage.peak for stage in best.memory), best.fits
        ),
    )
    return SearchResult(
        graph=graph,
        plan=plan,
        simulation=replace(best, plan=plan),
        baselines=baselines,
        trace=tuple(run.trace),
        stop_reason=reason,
        evaluations=run.evaluations,
        seconds=time.monotonic() - started,
    )


@dataclass(eq=False)
class _Ranked:
    """A skeleton, the strategies that start its chains (best first), and the best's simulation."""

    skeleton: Skeleton
    starts: list[Choices]
    simulation: Simulation


class _Run:
    """The state of one search."""

    def __init__(
        self,
        situation: Situation,
        budget: Budget,
        seed: int,
        zero_stages: tuple[int, ...],
        options: Options,
        report: Report,
        started: float,
        best: Simulation,
    ) -> None:
        self.situation, self.budget, self.seed = situation, budget, seed
        self.zero_stages, self.report, self.started = zero_stages, report, started
        self.best, self.options = best, options
        self.trace: list[TracePoint] = []
        self.evaluations = 0
        self._running: tuple[Problem, Chain] | None = None

    def rank_skeletons(self, candidates: Iterator[Skeleton]) -> list[_Ranked]:
        """Simulate the known strategies on every skeleton; best skeleton first."""
        listed = list(candidates)
        ranked: list[_Ranked] = []
        for number, skeleton in enumerate(listed):
            phase = f"ranking {len(listed)} skeletons"
            self.report(Progress(phase, 0.2 * number / len(listed), self.best.step_time))
            for policy in self.options.recompute:
                ranked.append(self._rank(replace(skeleton, recompute=policy)))
                self._offer(ranked[-1].simulation)
                if ranked[-1].simulation.fits:
                    break
        ranked.sort(key=lambda r: rank(r.simulation))
        return ranked

    def _rank(self, skeleton: Skeleton) -> _Ranked:
        tried = [
            (self.situation.simulate(self._plan(skeleton, choices)), choices)
            for choices in self._strategies(skeleton)
        ]
        tried.sort(key=lambda pair: rank(pair[0]))
        return _Ranked(skeleton, [choices for _, choices in tried], tried[0][0])

    def anneal(self, ranked: Sequence[_Ranked]) -> StopReason:
        """Share the budget among the skeletons, and each share among the best two strategies."""
        starts = [(r.skeleton, choices) for r in ranked for choices in r.starts[:2]]
        share, rest = divmod(self.budget.evaluations, max(1, len(starts)))
        problem: Problem | None = None
        for number, (skeleton, choices) in enumerate(starts):
            if problem is None or problem.skeleton is not skeleton:
                problem = self._problem(skeleton)
            total = share + (number < rest)
            chain = Chain(problem, problem.encode(choices), total, self.seed * 7919 + number)
            if self._run_chain(problem, chain):
                return StopReason.SECONDS
        return StopReason.EVALUATIONS if self.evaluations else StopReason.ONE_PLAN

    def finish(self) -> Simulation:
        """The best plan of all, with that of a chain that was cut short."""
        self._collect()
        return self.best

    def _run_chain(self, problem: Problem, chain: Chain) -> bool:
        """Run a chain to its end; True when the time is up."""
        self._running = (problem, chain)
        while chain.done < chain.total:
            before = chain.done
            chain.advance(BATCH)
            self.evaluations += chain.done - before
            best = min(float(chain.scores[1]), self.best.step_time)
            self.trace.append(TracePoint(self.evaluations, str(problem.skeleton), best))
            fraction = 0.2 + 0.8 * self.evaluations / self.budget.evaluations
            self.report(Progress(f"annealing {problem.skeleton}", fraction, best))
            if self._time_is_up():
                break
        self._collect()
        return self._time_is_up()

    def _collect(self) -> None:
        if self._running is not None:
            problem, chain = self._running
            self._running = None
            plan = problem.plan(
                chain.best,
                name="annealed",
                seed=self.seed,
                fingerprint=self.situation.graph.fingerprint,
            )
            self._offer(self.situation.simulate(plan))

    def _offer(self, simulation: Simulation) -> None:
        if rank(simulation) < rank(self.best):
            self.best = simulation

    def _time_is_up(self) -> bool:
        limit = self.budget.seconds
        return limit is not None and time.monotonic() - self.started > limit

    def _problem(self, skeleton: Skeleton) -> Problem:
        s = self.situation
        return make_problem(
            s.graph,
            skeleton,
            s.cluster,
            s.training,
            s.costs,
            self.zero_stages,
            s.memory,
            self.options,
        )

    def _strategies(self, skeleton: Skeleton) -> list[Choices]:
        """Data parallel with each ZeRO stage, and tensor parallel along the last axis."""
        small = self.situation.graph.microbatch(skeleton.num_microbatches)
        shape = skeleton.meshes[0].shape
        made = [data_parallel(small, shape, zero=zero) for zero in self.zero_stages]
        axis = len(shape) - 1
        if shape[axis] > 1 and tensor_dims(small, shape[axis]):
            made += [
                tensor_parallel(small, shape, axis, sequence_parallel=sequence)
                for sequence in (False, True)
            ]
        return [with_recompute(small, choices, skeleton.policies[0]) for choices in made]

    def _plan(self, skeleton: Skeleton, choices: Choices) -> Plan:
        s = self.situation
        return Plan(
            name="strategy",
            model=s.graph.name,
            fingerprint=s.graph.fingerprint,
            cluster=s.cluster,
            training=s.training,
            stages=tuple(
                Stage(names, mesh, {n: choices[n] for n in names})
                for names, mesh in zip(skeleton.stages, skeleton.meshes, strict=True)
            ),
            num_microbatches=skeleton.num_microbatches,
            schedule=skeleton.schedule,
            bucket_bytes=self.options.bucket_bytes,
            inputs_first=self.options.inputs_first,
        )
