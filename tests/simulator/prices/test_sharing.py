"""What several readers of a tensor share: predicted as run, and bounds stay bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from stratagem.executor import lower
from stratagem.executor.program.instructions import Convert
from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.bounds.cutting_planes import lower_bound
from stratagem.searcher.problem._score_kernels import OVER_MEMORY
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, skeletons
from stratagem.searcher.space.strategies import tensor_parallel, with_recompute
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import llama
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    Pin,
    input_gradient_placements,
    input_placements,
    output_gradient_placements,
    output_placements,
)
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.priced_plan import plan_model
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.executor.equality.test_models_executed import case_of
from tests.executor.equality.test_options_executed import changed
from tests.search.bounds.test_bound import best_by_enumeration, start_of, tiny_cluster
from tests.simulator.plans.test_memory import plan_of
from tests.support.plans import (
    assert_equal_to_torch,
    crossed,
    drawing,
    few,
    make_plan,
    megatron,
    optional,
    sharding,
)

COSTS = RooflineCosts()
ARROWS = (" → ", " ← ")


def small_llama(*, fused: bool = False, num_layers: int = 2) -> OperatorGraph:
    return llama(
        num_layers=num_layers, hidden=64, num_heads=4, ffn=96, vocabulary=96, sequence=32, batch=8,
        fused=fused,
    )  # fmt: skip


def conversions(names: tuple[str, ...], part: str = "") -> Counter[str]:
    return Counter(n for n in names if part in n and any(arrow in n for arrow in ARROWS))


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_separate_projections_communicate_as_one_that_is_fused(
    sequence: bool, policy: str
) -> None:
    """Megatron's four collectives a layer: q, k and v, gate and up had 7, or 10 in sequence."""
    spent = []
    for fused in (False, True):
        graph = small_llama(fused=fused)
        choices = tensor_parallel(graph, (4,), 0, sequence_parallel=sequence, regather=sequence)
        plan = plan_of(graph, with_recompute(graph, choices, policy), 1, 1, "1f1b", 4)
        simulation = simulate_plan(plan, graph, COSTS)
        timeline = simulation.timeline
        ns = timeline.end - timeline.start
        mine = [k for k, n in enumerate(timeline.names) if conversions((n,), "layers.1.")]
        spent.append((len(mine), int(ns[mine].sum())))
        if policy == "none":
            made = conversions(timeline.names, "layers.1.")
            assert sum(" again" not in name for name in made) == (8 if sequence else 4)
            assert sum(" again" in name for name in made) == (2 if sequence else 0)
    assert spent[0] == spent[1]


def test_a_gathered_copy_is_held_once() -> None:
    """Under sequence parallelism q, k and v read one copy of 2·s·b·h bytes, gate and up another.

    There were five. What they are gathered from is counted as long as a reader might need it.
    """
    held = []
    for num_layers in (2, 3):
        graph = small_llama(num_layers=num_layers)
        found = [
            simulate_plan(
                replace(
                    plan_of(
                        graph,
                        tensor_parallel(
                            graph, (4,), 0, sequence_parallel=True, regather=regather
                        ),
                        1, 1, "1f1b", 4,
                    ),
                    training=Training("bfloat16"),
                ),
                graph,
                COSTS,
            ).memory[0].activations
            for regather in (False, True)
        ]  # fmt: skip
        held.append(found)
    kept, again = (after - before for before, after in zip(*held, strict=True))
    copy = 2 * 32 * 8 * 64
    assert 2 * (copy - copy // 4) <= kept - again <= 2 * copy


def by_definition(plan: Plan, graph: OperatorGraph) -> Counter[str]:
    """Each distinct (result, target) once, for its first reader; gradients likewise.

    What pinned readers read is their own: they run at the same time.
    """
    choice = {name: c for stage in plan.stages for name, c in stage.choices.items()}
    found: Counter[str] = Counter()
    seen: set[object] = set()
    for edge in graph.edges:
        made, reader = graph.operators[edge.producer], graph.operators[edge.consumer]
        if made.is_source:
            continue
        out, read = made.outputs[edge.output], reader.inputs[edge.slot]
        ours, theirs = choice[made.name].config, choice[reader.name].config
        ways = [(" → ", output_placements(out, ours), input_placements(read, theirs))]
        if graph.edge_needs_gradient(edge):
            gradient = input_gradient_placements(read, theirs)
            ways.append((" ← ", gradient, output_gradient_placements(out, ours)))
        for arrow, source, target in ways:
            own = edge if any(isinstance(p, Pin) for p in theirs) else None
            key = edge.producer, edge.output, arrow, source, target, own
            if source != target and key not in seen:
                seen.add(key)
                found[f"{made.name}{arrow}{reader.name}"] += 1
    return found


def busy(plan: Plan, graph: OperatorGraph) -> Counter[str]:
    """The conversions that take time in the blocks of a plan of one stage."""
    (stage,) = plan_model(plan, graph, COSTS).stages
    none = np.zeros(len(graph.operators), dtype=np.int64)
    found: Counter[str] = Counter()
    for block in (stage.blocks.forward, stage.blocks.backward):
        tasks = stage.blocks.task_graph(block, none, last=True)
        simulate(tasks)
        names = np.array(block.names)[tasks.durations > 0]
        found += conversions(tuple(names.tolist()))
    return found


@pytest.mark.parametrize(
    ("seed", "model"), crossed(range(8), ["llama", "gpt", "inception"], every=2)
)
def test_a_conversion_is_made_once_for_all_its_readers(model: str, seed: int) -> None:
    case = case_of(model)
    plan = make_plan(case, drawing(seed), (2, 2))
    graph = case.graph
    takes_time, expected = busy(plan, graph), by_definition(plan, graph)
    assert takes_time
    assert takes_time == Counter({n: k for n, k in expected.items() if n in takes_time})
    # The others are slices, which take no time.
    assert not (set(expected) - set(takes_time)) & set(run_conversions(plan, graph))


def run_conversions(plan: Plan, graph: OperatorGraph) -> Counter[str]:
    """What ranks convert together with others, as often as the rank that does so most."""
    found: Counter[str] = Counter()
    for rank in lower(plan, graph).ranks:
        found |= Counter(
            each.task
            for each in rank.instructions
            if isinstance(each, Convert)
            and each.kind is TaskKind.COMMUNICATION
            and any(step.collective is not Collective.SLICE for step in each.steps)
        )
    return found


@pytest.mark.parametrize("seed", few(range(6), 2))
@pytest.mark.parametrize("model", ["llama", "gpt", "inception", "resnet"])
def test_runs_convert_what_is_predicted_and_train_like_torch(model: str, seed: int) -> None:
    """Recompute, and inputs that are converted again: every name as often as it is priced."""
    case = case_of(model)
    shape = (2,) if seed % 2 else (2, 2)
    plan = changed(make_plan(case, optional(drawing(seed), seed), shape), chunks=1)
    assert run_conversions(plan, case.graph) == busy(plan, case.graph)
    assert_equal_to_torch(case, plan)


@pytest.mark.parametrize("choose", [megatron, sharding("sample")])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_sums_of_gradients_are_those_of_one_device(choose: object, schedule: str) -> None:
    case = case_of("llama")
    plan = make_plan(case, choose, (2,), (2,), num_microbatches=2, schedule=schedule)  # type: ignore[arg-type]
    assert_equal_to_torch(case, plan)


STALLED = replace(
    Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2),
    calibration=Calibration(launch_us=2.0, stall_us=5.0),
)
RICH = Options(chunks=(1, 2), fuse=True, regather=True, stream=True)


def problem_of(
    graph: OperatorGraph, cluster: Cluster, stages: int, policy: str, options: Options
) -> Problem:
    skeleton = next(s for s in skeletons(graph, cluster) if len(s.stages) == stages)
    skeleton = replace(skeleton, recompute=policy)
    return make_problem(
        graph, skeleton, cluster, Training(), default_costs(), (0, 2), options=options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "policy", "stalls"), crossed([1, 2], ["none", "full"], [False, True], every=2)
)
def test_chains_price_shared_conversions_as_the_simulator(
    stages: int, policy: str, stalls: bool
) -> None:
    graph = small_llama(num_layers=2)
    cluster = STALLED if stalls else Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
    p = problem_of(graph, cluster, stages, policy, RICH if stalls else Options(regather=True))
    situation = Situation(graph, cluster, Training(), default_costs())
    rng = np.random.default_rng(stages)
    chain = AnnealingChain(p, rng.integers(0, [len(c) for c in p.choices]), 600, 1)
    chain._course = np.array([[600, 0.5, 0.1, 0.01, OVER_MEMORY, OVER_MEMORY, 0.0]])
    for _ in range(4):
        chain.advance(150)
        plan = p.plan(chain.choice, name="x", seed=0, fingerprint=graph.fingerprint)
        simulated = situation.simulate(plan)
        assert chain.score() == chain.scores[0]
        assert chain.scores[0] == pytest.approx(simulated.step_time, rel=1e-12)
        assert chain.peaks() == [rank.without_waiting for rank in simulated.memory]


def forked(width: int) -> OperatorGraph:
    """Two products of one tensor, added up: the smallest graph that shares."""
    b = GraphBuilder("forked")
    x = b.linear(b.input("x", (64, 64)), b.parameter("a", (width, 64)), name="first")
    y = b.linear(x, b.parameter("b", (width, width)), name="left")
    z = b.linear(x, b.parameter("c", (width, width)), name="right")
    return b.build(b.reduce(b.pointwise("add", y, z)))


@pytest.mark.parametrize(
    ("gb_s", "width", "nodes"), crossed([0.05, 0.5, 5.0], [64, 256], [1, 2], every=2)
)
def test_the_bound_is_below_all_plans_that_share(width: int, gb_s: float, nodes: int) -> None:
    graph, cluster = forked(width), tiny_cluster(4, nodes=nodes, gb_s=gb_s)
    for skeleton in [s for s in skeletons(graph, cluster) if len(s.stages) == 1][:3]:
        problem = make_problem(graph, skeleton, cluster, Training(), default_costs(), (0,))
        if problem.num_plans > 60_000:
            continue
        best = best_by_enumeration(problem)
        bound = lower_bound(problem, start_of(problem), rounds=15)
        assert bound.seconds <= best * (1 + 1e-9)
        assert bound.seconds > 0.3 * best


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_below_what_chains_find(seed: int) -> None:
    graph, cluster = small_llama(), tiny_cluster(4, nodes=2, gb_s=0.5)
    p = problem_of(graph, cluster, 1, "none", Options(regather=True))
    rng = np.random.default_rng(seed)
    bound = lower_bound(p, rng.integers(0, [len(c) for c in p.choices]), rounds=6)
    chain = AnnealingChain(p, bound.choice, 1500, seed)
    chain.advance(1500)
    assert bound.seconds <= chain.scores[1] * (1 + 1e-9)
