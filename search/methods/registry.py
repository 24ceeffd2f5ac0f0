"""Every method that a search can be compared with, by name: what each proposes for a situation.

Those of `literature` shard by rules. The ones added here solve or search a priced space with the
project's own solvers, under the objective and the restrictions of their papers, and are then
judged by the same simulator as any other plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.improvement.choice_program import MOST_PARTS, IntraProgram
from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.methods.literature import LITERATURE, one_stage_plan
from stratagem.searcher.methods.simple_strategies import pipeline_plans, simulate_family
from stratagem.searcher.placement.operator_placement import OperatorPlacement
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.processes.search_clock import SearchClock
from stratagem.searcher.space.graph_rewrites import rewritings
from stratagem.searcher.space.situation import Method, Situation, rank
from stratagem.searcher.space.skeletons import Options, Skeleton, stage_meshes
from stratagem.searcher.space.strategies import data_parallel, known_strategies
from stratagem.searcher.stage_dp.candidates import candidates
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.mirrored_stages import kept_statistics
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.weight_stashing import check_stashing
from stratagem.simulator.pricing.stage_boundaries import crossing_ties
from stratagem.simulator.simulation.simulation import Simulation

FLEXFLOW_EVALUATIONS = 20_000
"""Proposals of each of FlexFlow's chains."""
FLEXFLOW_PLACED, FLEXFLOW_PLACED_OPERATORS = 1_600, 400_000
"""Placements on parts of meshes that FlexFlow tries: so many, or fewer of a larger model."""

EXHAUSTIVE_PLANS = 200_000
"""Spaces up to so many plans are enumerated."""

UNITY_GRAPHS = 8
"""Graphs that Unity's outer loop scores."""

MAX_AXES = 2
"""Axes of the meshes on which methods of one stage are tried; more make far more choices."""


def _optcnn(situation: Situation) -> Iterator[Plan]:
    """OptCNN (Jia et al. 2018): the least sum of computing, conversions and syncs, exactly.

    It knows neither memory nor overlap, nor several microbatches or stages.
    """
    for problem in _one_stage(situation, (0,)):
        choice = _least_sum(problem, situation.clock)
        if choice is not None:
            yield _plan("OptCNN", situation, problem, choice)


def _least_sum(problem: Problem, clock: SearchClock) -> Ints | None:
    """The choices whose computing, conversions and syncs are the least together.

    Raises:
        OutOfTimeError: that could not be proved in time.
    """
    program = IntraProgram(problem)
    solution = program.solve(program.sum_weights(), tolerance=1e-6, seconds=clock.seconds_left)
    clock.check()
    return solution.choice


def _alpa(situation: Situation) -> Iterator[Plan]:
    """Alpa (Zheng et al. 2022): stages and sub-meshes by a dynamic program, choices in each by an
    integer program over sums, within the memory; nothing is simulated on the way. What then does
    not fit is no plan of it."""
    for candidate in candidates(situation, limit=4).plans:
        problem = make_problem(
            situation.graph,
            candidate.skeleton,
            situation.cluster,
            situation.training,
            situation.costs,
            (0, 2, 3),
            situation.memory,
        )
        program = IntraProgram(problem)
        solution = program.solve(
            program.sum_weights(),
            memory=True,
            tolerance=1e-3,
            max_parts=MOST_PARTS,
            seconds=situation.clock.seconds_left,
        )
        situation.clock.check()
        if solution.choice is not None:
            plan = _plan("Alpa", situation, problem, solution.choice)
            if situation.simulate(plan).fits:
                yield plan


def _flexflow(situation: Situation) -> Iterator[Plan]:
    """FlexFlow (Jia et al. 2019): Metropolis–Hastings from known strategies and from random.

    One stage, no ZeRO and no microbatches, as its SOAP space has it. Among the strategies is
    OptCNN's, than which FlexFlow is never worse in their paper. From the best plan on each mesh
    operators are placed on parts of it, the O of SOAP, where a model is small enough.
    """
    found: list[Simulation] = []
    for number, problem in enumerate(_one_stage(situation, (0,))):
        shape = problem.skeleton.meshes[0].shape
        rng = np.random.default_rng(number)
        solved = _least_sum(problem, situation.clock)
        starts = [
            problem.encode(data_parallel(problem.graph, shape)),
            rng.integers(0, [len(c) for c in problem.choices]),
            *([] if solved is None else [solved]),
        ]
        for start in starts:
            chain = AnnealingChain(problem, start, FLEXFLOW_EVALUATIONS, number)
            chain.finish(situation.clock.check)
            plan = _plan("FlexFlow", situation, problem, chain.best)
            found.append(situation.simulate(plan))
            yield plan
    most = min(FLEXFLOW_PLACED, FLEXFLOW_PLACED_OPERATORS // len(situation.graph.operators))
    placing = OperatorPlacement(
        Trials(situation, lambda _: True, lambda simulation: simulation, most)
    )
    placing.try_all(found)
    if placing.tried:
        yield replace(min(placing.tried, key=rank).plan, name="FlexFlow")


def _pipedream(situation: Situation) -> Iterator[Plan]:
    """PipeDream's partition (Narayanan et al. 2019): consecutive, replicated, unequal stages.

    It is run synchronously here, with 1F1B and one update a step, so that it trains as the other
    plans do; PipeDream itself updates after every microbatch with older weights.
    """
    limits = PipelineLimits(tensor_ways=(1,), zero_stages=(0,), recompute=("none",))
    for candidate in candidates(situation, limit=4, limits=limits).plans:
        yield candidate.plan(situation, name="PipeDream")


def _pipedream_stashing(situation: Situation) -> Iterator[Plan]:
    """The same pipelines under PipeDream's own schedule, as far as it can run them.

    They make an update a microbatch, so they are shown beside the others, and no search takes one
    for its result. They never drain, so a microbatch is enough to keep them full, and gradients
    are summed less often: all numbers of microbatches are tried up to that of 1F1B.
    """
    graph = situation.graph
    for plan in () if graph.is_forward else _pipedream(situation):
        if len(plan.stages) == 1:
            continue
        for parts in sorted(n for n in graph.microbatch_counts if n <= plan.num_microbatches):
            own = replace(
                plan,
                name="PipeDream asynchronous",
                schedule="pipedream",
                num_microbatches=parts,
            )
            if _can_stash(own, graph):
                yield own


def _can_stash(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether a plan can update amid its step."""
    try:
        check_stashing(plan, graph, crossing_ties(plan.stage_of, graph))
    except ValueError:
        return False
    return True


def _dapple(situation: Situation) -> Iterator[Plan]:
    """DAPPLE (Fan et al. 2021): the same stages under synchronous early-backward schedules, with
    recomputing where memory needs it."""
    limits = PipelineLimits(tensor_ways=(1,), zero_stages=(0,), recompute=("none", "full"))
    found = candidates(situation, schedules=("1f1b", "gpipe"), limit=6, limits=limits)
    for candidate in found.plans:
        yield candidate.plan(situation, name="DAPPLE")


def _chimera(situation: Situation) -> Iterator[Plan]:
    """Chimera (Li and Hoefler 2021): two opposite pipelines of stages as equal as they can be,
    replicated as they are; all is recomputed where nothing fits without."""
    if situation.graph.is_forward or kept_statistics(situation.graph):
        return  # Its two directions share one backward pass, and could not share statistics.
    plans = pipeline_plans(situation, "chimera", "Chimera")
    yield from (found.plan for found in simulate_family(situation, plans))


def _exhaustive(situation: Situation) -> Iterator[Plan]:
    """Every plan of one stage on a flat mesh, where there are few enough."""
    for problem in _one_stage(situation, (0, 2, 3), max_axes=1):
        if problem.num_plans <= EXHAUSTIVE_PLANS:
            best = exhaustive(problem, limit=EXHAUSTIVE_PLANS)
            yield _plan("exhaustive", situation, problem, best.choice)


def _unity(situation: Situation) -> Iterator[Plan]:
    """Unity (Unger et al. 2022): the graph and its sharding searched together.

    Graphs that compute the same are tried best first, by their best known strategy; on the best
    one that differs from the model's own a chain goes on from that strategy.
    """
    meshes = _flat_meshes(situation, MAX_AXES)

    def score(graph: OperatorGraph) -> float:
        here = replace(situation, graph=graph)
        return min(here.simulate(plan).step_time for plan in _strategies(here, meshes))

    if situation.training.goes_by_parameters:  # Such a plan could not be executed.
        return
    found = rewritings(situation.graph, score, limit=UNITY_GRAPHS)
    for rewriting in found[:2]:
        steps = rewriting.rewritten.steps
        if not steps:
            continue
        here = replace(situation, graph=rewriting.graph)
        best = min(_strategies(here, meshes), key=lambda plan: here.simulate(plan).step_time)
        stage = best.stages[0]
        skeleton = Skeleton((stage.operators,), (stage.mesh,), 1, "1f1b")
        problem = _problem(here, skeleton, (0, 2, 3))
        chain = AnnealingChain(problem, problem.encode(stage.choices), FLEXFLOW_EVALUATIONS, 0)
        chain.finish(situation.clock.check)
        yield replace(_plan("Unity", here, problem, chain.best), substitutions=steps)


def _strategies(situation: Situation, meshes: list[Skeleton]) -> Iterator[Plan]:
    """Known strategies on one stage."""
    for flat in meshes:
        mesh = flat.meshes[0]
        for choices in known_strategies(
            situation.graph, mesh.shape, zero_stages=(0, 3), model_zero_stages=(0,)
        ):
            yield one_stage_plan("strategy", situation, mesh, choices)


def _flat_meshes(situation: Situation, max_axes: int) -> list[Skeleton]:
    names = tuple(op.name for op in situation.graph.operators)
    devices = range(situation.cluster.num_devices)
    meshes = stage_meshes(devices, situation.cluster, max_axes=max(2, max_axes))
    return [
        Skeleton((names,), (mesh,), 1, "1f1b") for mesh in meshes if len(mesh.axes) <= max_axes
    ]


def _one_stage(
    situation: Situation, zero_stages: tuple[int, ...], *, max_axes: int = MAX_AXES
) -> Iterator[Problem]:
    for skeleton in _flat_meshes(situation, max_axes):
        yield _problem(situation, skeleton, zero_stages)


def _problem(situation: Situation, skeleton: Skeleton, zero_stages: tuple[int, ...]) -> Problem:
    return make_problem(
        situation.graph,
        skeleton,
        situation.cluster,
        situation.training,
        situation.costs,
        zero_stages,
        situation.memory,
        Options(),
    )


def _plan(name: str, situation: Situation, problem: Problem, choice: Ints) -> Plan:
    return problem.plan(choice, name=name, seed=0, fingerprint=situation.graph.fingerprint)


METHODS: dict[str, Method] = {
    **LITERATURE,
    "OptCNN": _optcnn,
    "FlexFlow": _flexflow,
    "PipeDream": _pipedream,
    "PipeDream asynchronous": _pipedream_stashing,
    "DAPPLE": _dapple,
    "Chimera": _chimera,
    "Alpa": _alpa,
    "Unity": _unity,
    "exhaustive": _exhaustive,
}
