"""The inter-operator program: priced as the simulator does, and exact for its model."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.bounds.all_pipelines import PipelineWork
from stratagem.searcher.problem.priced_skeleton import make_problem
from stratagem.searcher.space.microbatch_graphs import MicrobatchModels
from stratagem.searcher.space.schedule_traits import traits_of
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.searcher.space.strategies import data_parallel, with_recompute
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.searcher.stage_dp.candidates import candidates
from stratagem.searcher.stage_dp.closed_form_times import (
    ClosedFormTimes,
    microbatches_held,
    step_ns,
)
from stratagem.searcher.stage_dp.pipeline_dp import Devices, Objective, solve
from stratagem.searcher.stage_dp.tables import compact_graph as compact_module
from stratagem.searcher.stage_dp.tables._dp_kernels import OPTION
from stratagem.searcher.stage_dp.tables._range_kernels import STAGE
from stratagem.searcher.stage_dp.tables.compact_graph import compact_graph
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.searcher.stage_dp.tables.operator_chain import chain_of
from stratagem.searcher.stage_dp.tables.operator_profiles import MeshPricer, stage_mesh
from stratagem.searcher.stage_dp.tables.stage_tables import StageTable, Ways
from stratagem.searcher.stage_dp.tables.variants import LAYOUTS, Variant, VariantLayout, variants
from stratagem.simulator.base.arrays import records
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.models import gpt, mlp, moe, wide_resnet
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.headroom import Headroom
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.schedules.actions import peak_in_flight
from stratagem.simulator.schedules.macro_graph import macro_graph
from stratagem.simulator.schedules.named_schedules import schedule_by_name
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    LAST_BACKWARD,
    LINKS,
    LINKS_BACKWARD,
    NUM_KINDS,
    SEND,
    SEND_BACK,
)
from tests.support.examples import examples

BF16 = Training(precision="bfloat16")
FOUR = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)


def situation(graph, cluster=None):
    cluster = cluster or Cluster.preset("dgx-a100", num_nodes=1)
    return Situation(graph, cluster, BF16, default_costs())


def small_gpt(num_layers=8, batch=64, hidden=512):
    return gpt(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=8,
        sequence=256,
        vocabulary=2048,
        batch=batch,
    )


# -- pricing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=lambda layout: layout.name)
def test_a_compact_graph_prices_every_range_like_the_whole_one(monkeypatch, layout):
    graph = small_gpt()

    def costs():
        chain = chain_of(graph)
        pricer = MeshPricer(chain, situation(graph), stage_mesh(range(8), 2), 4)
        found = list(variants(pricer.builder.graph, (4, 2), layout, PipelineLimits()))
        return chain, [profile.range_costs(chain) for profile in pricer.profiles(found)]

    compact, compact_costs = costs()
    monkeypatch.setattr(compact_module, "ENDS", 1000)
    whole, whole_costs = costs()
    assert len(compact.compact.graph.operators) < len(whole.compact.graph.operators)
    assert (compact.cuts == whole.cuts).all()
    for ours, theirs in zip(compact_costs, whole_costs, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_that_is_read_deep_inside_stays_whole():
    graph = small_gpt(num_layers=12)
    read = graph.operators[graph.index["h.5.add_1"]]
    last = graph.operators[graph.index["ln_f"]]
    assert last.inputs[0].source == "h.11.add_1"
    skipping = replace(last, inputs=(replace(last.inputs[0], source=read.name),))
    operators = tuple(skipping if op.name == "ln_f" else op for op in graph.operators)
    odd = replace(graph, operators=operators)
    assert len(compact_graph(odd).graph.operators) == len(odd.operators)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_cost_what_their_blocks_take_in_the_simulator(tensor, zero):
    graph = small_gpt()
    where = situation(graph)
    setup = TrainingSetup(
        microbatch=2, tensor=tensor, pipeline=2, zero=zero, recompute="selective", training=BF16
    )
    plan = setup.plan(graph, where.cluster)
    simulation = where.simulate(plan)
    chain = chain_of(graph)
    mesh = stage_mesh(plan.stages[0].mesh.devices, tensor)
    pricer = MeshPricer(chain, where, mesh, plan.num_microbatches)
    limits = PipelineLimits(zero_stages=(zero,), recompute=("selective",))
    found = list(variants(pricer.builder.graph, mesh.shape, LAYOUTS[0], limits))
    costs = pricer.profiles(found)[0].range_costs(chain)
    places = {graph.names[i]: k for k, i in enumerate(chain.operators)}
    cut = 1 + max(places[n] for n in plan.stages[0].operators if n in places)
    middle = list(chain.cuts).index(cut)
    ranges = [(0, middle), (middle, len(chain.cuts) - 1)]
    held = microbatches_held("1f1b", 2, plan.num_microbatches)[::-1]
    for stage, (first, last) in enumerate(ranges):
        ours = costs[first, last]
        times = simulation._step.model.block_times[stage]
        assert ours.forward == pytest.approx(times[FORWARD].makespan, rel=0.04)
        both = times[FORWARD].makespan + times[BACKWARD].makespan
        if LINKS in times:  # No microbatch takes less than its links.
            both = max(both, times[LINKS].makespan + times[LINKS_BACKWARD].makespan)
        assert ours.forward + ours.backward == pytest.approx(both, rel=0.07)
        # There the conversion in front of the positions' pass waits for sums; a table's does not.
        near = 0.11 if (tensor, zero) == (1, 0) else 0.09
        last_backward = ours.backward + ours.last
        assert last_backward == pytest.approx(times[LAST_BACKWARD].makespan, rel=near)
        memory = simulation.memory[stage]
        assert ours.state == memory.state
        peak = ours.state + ours.peak + (held[stage] - 1) * ours.held
        # How long gradients wait depends on the other stages, which a table knows nothing of.
        assert peak == pytest.approx(memory.peak, rel=0.05 if zero < 2 else 0.15)


# -- the program --------------------------------------------------------------------------------


def make_table(rng, num_cuts, num_devices, rows):
    """Random options of a stage for every range; some ranges have none."""
    options = records((num_cuts, num_cuts, rows), OPTION)
    counts = np.zeros((num_cuts, num_cuts), dtype=np.int64)
    for a, b in itertools.combinations(range(num_cuts), 2):
        counts[a, b] = rng.integers(0, rows + 1) if rng.random() < 0.9 else 0
        for r in range(counts[a, b]):
            period = int(rng.integers(1, 20) * (b - a))
            options[a, b, r] = (period + rng.integers(0, 9), period, rng.integers(0, 5), r)
    ways = tuple(Ways(1, Variant("any", 0, "none", {})) for _ in range(rows))
    costs = records((num_cuts, num_cuts, rows), STAGE)
    return StageTable(num_devices, ways, options, costs, counts, np.zeros_like(counts))


def brute_force(devices, need, objective, num_cuts):
    """The best value for every number of stages, by trying everything."""
    units = devices.table_of.shape[1]
    best = {}

    def extend(cut, unit, done):
        if cut == num_cuts - 1 or unit == units:
            if cut == num_cuts - 1 and unit == units and len(done) <= len(need):
                held = need[: len(done)][::-1]
                if all(row.flight >= n for row, n in zip(done, held, strict=True)):
                    total = sum(row.total for row in done)
                    slowest = max(row.period for row in done)
                    value = objective[0] * total + objective[1] * slowest
                    best[len(done)] = min(value, best.get(len(done), np.inf))
            return
        for z, size in enumerate(devices.sizes):
            number = devices.table_of[z, unit]
            if number < 0 or unit + size > units:
                continue
            table = devices.tables[number]
            for b in range(cut + 1, num_cuts):
                for r in range(table.counts[cut, b]):
                    extend(b, unit + int(size), [*done, table.options[cut, b, r]])

    extend(0, 0, [])
    return best


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 4), st.integers(1, 9))
def test_the_program_finds_what_trying_everything_finds(seed, num_cuts, units, microbatches):
    rng = np.random.default_rng(seed)
    sizes = np.arange(1, units + 1, dtype=np.int64)
    tables, table_of = [], np.full((units, units), -1, dtype=np.int64)
    for size in sizes:
        kinds = [make_table(rng, num_cuts, int(size), 2) for _ in range(2)]
        for begin in range(units - size + 1):
            if rng.random() < 0.9:  # two kinds of devices, and places where none may begin
                table_of[size - 1, begin] = len(tables) + int(begin >= units // 2)
        tables += kinds
    devices = Devices(tuple(tables), table_of, sizes, 1)
    need = [min(microbatches, s + 1) for s in range(min(units, num_cuts - 1))]
    objective = Objective(1.0, float(microbatches - 1))
    truth = brute_force(devices, need, objective, num_cuts)
    found = solve(devices, need, objective)
    assert bool(found) == bool(truth)
    if truth:
        assert found[0].value == pytest.approx(min(truth.values()))
        for solution in found:
            assert solution.value == pytest.approx(truth[len(solution.stages)])
        near = {s for s, value in truth.items() if value <= 1.1 * min(truth.values())}
        assert near <= {len(solution.stages) for solution in found}
        stages = found[0].stages
        assert [s.first for s in stages[1:]] == [s.last for s in stages[:-1]]
        assert sum(len(s.devices) for s in stages) == units


# -- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8), (8, 8)])
def test_stages_hold_as_many_microbatches_as_in_the_schedule(schedule, stages, microbatches):
    made = schedule_by_name(schedule, stages, microbatches)
    held = microbatches_held(schedule, stages, microbatches)[::-1]
    peaks = peak_in_flight(made)
    assert all(ours >= theirs for ours, theirs in zip(held, peaks, strict=True))
    assert max(held) == max(peaks)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_interleaved_ranks_hold_as_many_as_in_the_schedule(ranks, microbatches):
    made = schedule_by_name("interleaved", 2 * ranks, microbatches, num_ranks=ranks)
    held = microbatches_held("interleaved", 2 * ranks, microbatches)[::-1]
    for rank, found in enumerate(made.situations):
        most = max(1 + sum(h.waiting + h.late for h in situation.held) for situation in found)
        assert held[rank] == held[rank + ranks] == most


def played(schedule, stages, microbatches):
    made = schedule_by_name(schedule, len(stages), microbatches)
    graph = macro_graph(made, tuple((s, s + 1) for s in range(len(stages) - 1)))
    durations = np.zeros((NUM_KINDS, graph.num_items), dtype=np.int64)
    for s, stage in enumerate(stages):
        durations[FORWARD, s], durations[BACKWARD, s] = stage.forward, stage.backward
        durations[LAST_BACKWARD, s] = stage.backward + stage.last
        if s + 1 < len(stages):
            durations[SEND, s], durations[SEND_BACK, s] = stage.ahead, stage.back
    return simulate(graph.with_durations(durations)).makespan


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@settings(max_examples=examples(40))
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40), st.integers(0, 600))
def test_equal_stages_take_what_the_formula_says(schedule, stages, more, send, last):
    stage = ClosedFormTimes(100, 200, 80, last, send, send)
    chain = [stage] * (stages - 1) + [stage._replace(ahead=0, back=0)]
    microbatches = stages * more
    assert step_ns(schedule, chain, microbatches) == pytest.approx(
        played(schedule, chain, microbatches), rel=0.04
    )


# -- candidates ---------------------------------------------------------------------------------


GRAPHS = {
    "gpt": lambda: small_gpt(),
    "experts": lambda: moe(
        num_layers=4, hidden=256, num_heads=4, experts=8, sequence=128, batch=64, vocabulary=1024
    ),
    "wide resnet": lambda: wide_resnet(50, base_channels=128, batch=256),
    "mlp": lambda: mlp([4096] * 9, batch=65536),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_estimates_agree_with_the_simulator(name):
    where = situation(GRAPHS[name]())
    limits = PipelineLimits(
        microbatches=(4,), recompute=("none", "full"), equal_meshes=name != "gpt"
    )
    found = candidates(where, schedules=("1f1b", "gpipe"), limit=6, limits=limits)
    assert found.plans
    for candidate in found.plans:
        simulation = where.simulate(candidate.plan(where))
        assert simulation.fits
        assert candidate.seconds == pytest.approx(simulation.step_time, rel=0.15)
        assert candidate.peak_bytes == pytest.approx(simulation.peak_memory, rel=0.12)


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_wait_for_slow_links_count(zero):
    """A stage under ZeRO-2 was taken to fit whose gradients wait whole for their sums."""
    graph = mlp([2048] * 9, batch=64)
    where = situation(graph, Cluster.preset("p3.16xlarge"))
    limits = PipelineLimits(
        microbatches=(4,), num_stages=(2,), tensor_ways=(1,), zero_stages=(zero,),
        recompute=("none",), equal_meshes=True,
    )  # fmt: skip
    (candidate, *_) = candidates(where, limits=limits).plans
    memory = where.simulate(candidate.plan(where)).memory
    for estimate, rank in zip(candidate.peaks, memory, strict=True):
        assert rank.waiting > 0.1 * rank.peak
        assert 0.8 * rank.peak < estimate < 1.15 * rank.peak


@pytest.mark.slow
def test_the_best_candidate_is_no_slower_than_known_setups():
    graph = small_gpt(batch=128, hidden=2048)
    where = situation(graph)
    best = min(where.simulate(c.plan(where)).step_time for c in candidates(where, limit=6).plans)
    for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (4, 2)):
        zero = 1 if tensor * pipeline < where.cluster.num_devices else 0
        setup = TrainingSetup(microbatch=4, tensor=tensor, pipeline=pipeline, zero=zero)
        known = where.simulate(setup.plan(graph, where.cluster))
        assert best <= 1.02 * known.step_time


NO_USE = "no faster than what is known"


def test_what_computing_alone_excludes_is_left_out_and_nothing_that_is_better():
    where = situation(small_gpt(num_layers=2, batch=32), FOUR)
    work = PipelineWork(MicrobatchModels(where), Options(), ("none", "full"))
    every = [
        (c.skeleton, where.simulate(c.plan(where)).step_time) for c in candidates(where).plans
    ]
    best, excluded = min(seconds for _, seconds in every), []

    def hopeless(parts, ranks, schedule):
        fills = schedule is not None and traits_of(schedule).fills
        found = work.seconds(parts, ranks, fills=fills) >= best
        excluded.extend([(parts, ranks)] if found else [])
        return NO_USE if found else ""

    found = candidates(where, hopeless=hopeless)
    assert excluded
    assert found.pruned[NO_USE] == len(excluded)
    assert min(where.simulate(c.plan(where)).step_time for c in found.plans) == best
    for (skeleton, seconds), (parts, ranks) in itertools.product(every, excluded):
        if skeleton.num_microbatches == parts and skeleton.num_ranks >= ranks:
            assert seconds >= best


def test_where_all_is_excluded_nothing_is_found_and_no_fault():
    where = situation(small_gpt(num_layers=2), FOUR)
    found = candidates(where, hopeless=lambda parts, ranks, schedule: NO_USE)
    assert found.plans == ()
    assert found.shortage is None
    counts = len(where.graph.microbatch_counts)
    assert found.pruned[NO_USE] == counts


@pytest.mark.slow
def test_equal_arguments_give_equal_candidates():
    graph, limits = small_gpt(num_layers=2), PipelineLimits(max_stages=2)
    first, second = (
        [
            (c.reason, c.seconds, c.peaks)
            for c in candidates(situation(graph, FOUR), limits=limits).plans
        ]
        for _ in range(2)
    )
    assert first == second
    assert [c[1] for c in first] == sorted(c[1] for c in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        (PipelineLimits(max_stages=2), lambda c: len(c.skeleton.stages) <= 2),
        (PipelineLimits(num_stages=(4,)), lambda c: len(c.skeleton.stages) == 4),
        (
            PipelineLimits(tensor_ways=(2,)),
            lambda c: {m.shape[1] for m in c.skeleton.meshes} == {2},
        ),
        (
            PipelineLimits(zero_stages=(3,)),
            lambda c: {x.zero for x in c.choices.values()} == {0, 3},
        ),
        (PipelineLimits(microbatches=(8,)), lambda c: c.skeleton.num_microbatches == 8),
        (PipelineLimits(recompute=("full",)), lambda c: set(c.skeleton.policies) == {"full"}),
        (
            PipelineLimits(equal_meshes=True),
            lambda c: len({m.num_devices for m in c.skeleton.meshes}) < 2,
        ),
    ],
)
def test_limits_are_honoured(limits, holds):
    found = candidates(situation(small_gpt(num_layers=4), FOUR), limits=limits, limit=10)
    assert found.plans
    assert all(holds(candidate) for candidate in found.plans)


@pytest.mark.slow
def test_headroom_leaves_memory_free():
    where = situation(small_gpt(num_layers=2), FOUR)
    full = max(c.peak_bytes for c in candidates(where, limit=30).plans)
    capacity = where.cluster.device_types[0].memory_bytes
    headroom = 1 - 0.5 * full / capacity
    found = candidates(where, limit=30, limits=PipelineLimits(headroom=Headroom(headroom)))
    assert found.plans
    assert all(c.peak_bytes <= 0.5 * full for c in found.plans)


def mixed_cluster():
    fast, slow = Cluster.preset("dgx-a100", num_nodes=1), Cluster.preset("p3.16xlarge")
    return replace(
        fast,
        name="mixed",
        node_devices=(*fast.node_devices, slow.node_devices[0]),
        device_types=(*fast.device_types, *slow.device_types),
    )


@pytest.mark.slow
def test_slower_devices_get_fewer_operators():
    graph = small_gpt(num_layers=12, hidden=1024)
    where = situation(graph, mixed_cluster())
    found = candidates(where, limit=20, limits=PipelineLimits(num_stages=(2,), equal_meshes=True))
    stages = found.plans[0].skeleton.stages
    assert len(stages[0]) > 1.5 * len(stages[1])


@pytest.mark.slow
def test_a_stage_may_have_a_number_of_devices_that_is_no_power_of_two():
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=6)
    where = situation(small_gpt(batch=96), cluster)
    found = candidates(where, limit=40, limits=PipelineLimits(num_stages=(2, 3)))
    plans = [(c.reason, c.skeleton) for c in found.plans]
    assert len(set(plans)) == len(plans)
    sizes = {tuple(m.num_devices for m in c.skeleton.meshes) for c in found.plans}
    assert any(len(set(of)) > 1 for of in sizes), sizes
    assert all(sum(of) == 6 for of in sizes)


def test_what_does_not_fit_says_which_stage_and_what_would_help():
    graph = gpt(num_layers=24, hidden=12288, num_heads=96, sequence=2048, batch=8)
    where = situation(graph)
    limits = PipelineLimits(zero_stages=(0,), recompute=("none",))
    found = candidates(where, limits=limits)
    assert found.plans == ()
    assert found.shortage is not None
    assert found.shortage.over > 0
    text = str(found.shortage)
    assert "stage" in text
    assert "allow full recompute" in text
    assert "allow ZeRO-3" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: candidates(w, schedules=("chimera",)), "no 'chimera': choose from"),
        (lambda w: candidates(w, limit=0), "limit is 0; it must be at least 1"),
        (lambda w: candidates(w, limits=PipelineLimits(microbatches=(7,))), "widen microbatches"),
        (lambda w: PipelineLimits(headroom=Headroom(1.0)), "headroom is 1.0"),
        (lambda w: PipelineLimits(zero_stages=(4,)), r"zero_stages are \(4,\)"),
        (lambda w: PipelineLimits(recompute=()), "give at least one"),
        (lambda w: PipelineLimits(tensor_ways=(0,)), "tensor_ways lists 0"),
        (lambda w: PipelineLimits(max_stages=0), "max_stages is 0"),
    ],
)
def test_bad_arguments_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call(situation(mlp([64, 64], batch=32)))


def test_a_caller_may_bring_choices_of_its_own():
    where = situation(small_gpt(), FOUR)
    own = VariantLayout("mine", lambda graph, shape: data_parallel(graph, shape))
    found = candidates(where, layouts=(own,), limit=3)
    assert all("mine" in c.reason for c in found.plans)


def test_a_skeleton_may_have_a_recompute_policy_for_each_stage():
    graph = small_gpt(num_layers=4)
    where = situation(graph)
    half = len(graph.names) // 2
    stages = (graph.names[:half], graph.names[half:])
    meshes = (stage_mesh(range(4), 1), stage_mesh(range(4, 8), 1))
    skeleton = Skeleton(stages, meshes, 4, "1f1b", ("full", "none"))
    problem = make_problem(graph, skeleton, where.cluster, BF16, where.costs, (0,))
    again = {name: problem.choices[i][0].recompute for i, name in enumerate(problem.graph.names)}
    small = graph.microbatch(4)
    full = with_recompute(small, data_parallel(small, (4, 1)), "full")
    assert any(again[name] for name in stages[0])
    assert all(again[name] == full[name].recompute for name in stages[0])
    assert not any(again[name] for name in stages[1])
    with pytest.raises(ValueError, match="3 recompute policies for 2 stages"):
        Skeleton(stages, meshes, 4, "1f1b", ("none",) * 3)
