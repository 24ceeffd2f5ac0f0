"""What a search works out once for many is what it would be for each."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.annealing.move_lists import moves_of
from stratagem.searcher.methods.simple_strategies import pipeline_plans
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.processes.garbage_collection import OBJECTS, seldom_collected
from stratagem.searcher.space import situation as remembering
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, operator_choices, skeletons
from stratagem.searcher.space.stage_cuts import StageCutter, balanced_stages
from stratagem.simulator.graph.image_splits import split_images
from stratagem.simulator.graph.models import gpt, mlp, wide_resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Placement,
    Shard,
    largest_shard,
    local_elements,
    local_sizes,
    split_with,
    splits_of,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing import row_memory
from stratagem.simulator.pricing.cost_rows import timed, timed_rows
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.pricing.recent_values import RecentValues
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
TEXT = gpt(num_layers=3, hidden=32, num_heads=4, vocabulary=64, sequence=8, batch=16)
IMAGES = split_images(wide_resnet(50, base_channels=4, width_factor=1, batch=4, image=32))


def _placements(
    data: st.DataObject, dims: list[str] | list[int], axes: int
) -> tuple[Placement, ...]:
    options: list[Placement] = [REPLICATE, *(Shard(dim) for dim in dims)]
    return tuple(data.draw(st.sampled_from(options)) for _ in range(axes))


@settings(max_examples=examples(200))
@given(st.data())
def test_local_sizes_are_those_of_the_largest_shards(data: st.DataObject) -> None:
    operator = data.draw(st.sampled_from([*TEXT.operators, *IMAGES.operators]))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    names = [dim.name for dim in operator.dims]
    config = _placements(data, names, len(shape))
    assert local_sizes(operator, config, shape) == {
        dim.name: largest_shard(dim.size, splits_of(config, split_with(operator, dim.name), shape))
        for dim in operator.dims
    }


@settings(max_examples=examples(100))
@given(st.data())
def test_local_elements_are_those_of_the_largest_shards(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    placements = _placements(data, list(range(len(sizes))), len(shape))
    expected = 1
    for factor, size in enumerate(sizes):
        expected *= largest_shard(size, splits_of(placements, factor, shape))
    assert local_elements(sizes, placements, shape) == expected


def _problem(constraints: Space | None = None) -> Problem:
    skeleton = next(
        s for s in skeletons(TEXT, CLUSTER) if len(s.stages) == 2 and s.num_microbatches == 4
    )
    return make_problem(
        TEXT,
        skeleton,
        CLUSTER,
        Training(),
        default_costs(),
        (0, 2),
        options=Options(),
        constraints=constraints.bind(TEXT) if constraints else None,
    )


def test_best_answers_are_the_least_sums_of_each_edge() -> None:
    problem = _problem()
    builders = [
        TableBuilder(problem.graph, mesh, CLUSTER, Training(), default_costs(), stalls=True)
        for mesh in problem.skeleton.meshes
    ]
    asked = {
        (int(asks), int(answers)): row for asks, answers, *row in moves_of(problem).pairs.tolist()
    }
    checked = 0
    for edge in problem.graph.edges:
        ends = edge.producer, edge.consumer
        stage = int(problem.stage_of[ends[0]])
        if ends not in asked or stage != problem.stage_of[ends[1]]:
            continue
        table = builders[stage].build(ends, {i: problem.choices[i] for i in ends})
        both, theirs = table.edge_rows[0].both_ns, table.row(ends[1])
        sums = both + (theirs.passes_ns + theirs.recompute.ns)[None, :]
        mine = asked[ends][: len(sums)]
        if len([e for e in problem.graph.edges if (e.producer, e.consumer) == ends]) == 1:
            assert np.array_equal(mine, np.argmin(sums, axis=1))
            checked += 1
    assert checked > 20


def test_constraints_that_forbid_no_choice_leave_the_same_lists() -> None:
    free, tight = Space(pipeline=2), Space(pipeline=2, max_tensor=8)
    assert free.bind(TEXT).allows_all
    assert not tight.bind(TEXT).allows_all
    ours, theirs, whole = (_problem(c).choices for c in (free, tight, None))
    assert ours == theirs == whole
    assert [id(c) == id(d) for c in ours for d in ours] == [
        id(c) == id(d) for c in theirs for d in theirs
    ]


@pytest.mark.parametrize(
    "constraints",
    [
        Space(pin={"lm_head": (REPLICATE,)}),
        Space(forbid=(("head", "data"),)),
        Space(require=(("head", "data"),)),
        Space(zero_stages=(0,)),
        Space(tensor=2),
        Space(max_tensor=2),
    ],
)
def test_constraints_on_choices_are_looked_at(constraints: Space) -> None:
    assert not constraints.bind(TEXT).allows_all


@pytest.mark.parametrize("graph", [mlp([16] * 7, batch=8), TEXT])
def test_stages_do_not_depend_on_what_was_cut_before(graph: OperatorGraph) -> None:
    cutter = StageCutter(graph, CLUSTER)
    for count in (4, 1, 6, 2, 6):
        assert cutter.stages(count) == balanced_stages(graph, CLUSTER, count)


def test_prices_do_not_depend_on_what_was_priced_before() -> None:
    shared = RowMemory()
    for shape in ((4, 2), (2, 4), (8, 1), (2, 2)):
        count = shape[0] * shape[1]
        axes = (MeshAxis("outer", shape[0]), MeshAxis("inner", shape[1]))
        mesh = DeviceMesh(axes, tuple(range(count)))
        choices = {
            i: operator_choices(TEXT, operator, shape, (0, 1, 3), Options(regather=True))
            for i, operator in enumerate(TEXT.operators)
        }
        every = range(len(TEXT.operators))
        tables = [
            TableBuilder(TEXT, mesh, CLUSTER, Training(), default_costs(), memory).build(
                every, choices
            )
            for memory in (shared, None)
        ]
        for i in every:
            ours, theirs = (table.row(i) for table in tables)
            assert np.array_equal(ours.passes_ns, theirs.passes_ns)
            assert np.array_equal(ours.recompute.ns, theirs.recompute.ns)
            assert np.array_equal(ours.sync.ns, theirs.sync.ns)
            assert np.array_equal(ours.gather.ns, theirs.gather.ns)
            assert ours.sources == theirs.sources


@seldom_collected()
def _fails_seldom_collected() -> None:
    raise RuntimeError(f"collected after {gc.get_threshold()[0]}")


def test_plans_simulated_shortly_before_are_remembered_by_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever they are called, whoever made them: half of those of a search were met before."""
    situation = Situation(TEXT, CLUSTER, Training(), default_costs())
    plans = pipeline_plans(situation, "1f1b", "pipeline")
    first = situation.simulate(plans[0])
    assert situation.simulate(plans[0]) is first
    alike = replace(plans[0], name="the same by another name", seed=7)
    again = situation.simulate(alike)
    assert again.plan is alike
    assert (again.step_time, again.memory) == (first.step_time, first.memory)
    # What runs otherwise is simulated, also under a cluster or a training of another size.
    slower = replace(CLUSTER, intra_node=replace(CLUSTER.intra_node, bandwidth_gb_s=0.1))
    for other in (
        replace(plans[0], cluster=slower),
        replace(plans[0], training=Training("bfloat16")),
        replace(plans[0], schedule="gpipe"),
        replace(plans[0], bucket_bytes=10**9),
    ):
        told = simulate_plan(other, TEXT, default_costs())
        assert situation.simulate(other).step_time == told.step_time
    assert situation.simulate(replace(plans[0], cluster=slower)).step_time > first.step_time
    # The last ones only: what nobody asks for is forgotten.
    monkeypatch.setattr(remembering, "LEAST_REMEMBERED", 2)
    monkeypatch.setattr(remembering, "REMEMBERED_OPERATORS", 0)
    anew = Situation(TEXT, CLUSTER, Training(), default_costs())
    kept = [anew.simulate(plan) for plan in (*plans[:1], replace(plans[0], schedule="gpipe"))]
    assert anew.simulate(plans[0]) is kept[0]
    anew.simulate(replace(plans[0], bucket_bytes=10**9))
    assert anew.simulate(plans[0]) is kept[0]
    assert anew.simulate(kept[1].plan) is not kept[1]


@pytest.mark.slow
@pytest.mark.parametrize("most", [30_000, 40])
def test_stages_of_other_plans_change_no_simulation(most: int) -> None:
    """Plans share tables, blocks, lifetimes and boundaries; what is forgotten is made again."""
    situation = Situation(TEXT, CLUSTER, Training(), default_costs())
    situation.memory.stages = RecentValues(most)
    apart = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
    plans = [
        replace(plan, schedule=schedule, bucket_bytes=bucket)
        for schedule in ("1f1b", "gpipe")
        for plan in pipeline_plans(situation, "1f1b", "pipeline")[:3]
        for bucket in (0, 4096)
    ]
    plans += [replace(plan, cluster=apart) for plan in plans]
    for plan in (*plans, *plans[::-1]):
        alone = simulate_plan(plan, TEXT, default_costs())
        found = simulate_plan(plan, TEXT, default_costs(), memory=situation.memory)
        assert found.step_time == alone.step_time
        assert [(m.peak, m.alive) for m in found.memory] == [
            (m.peak, m.alive) for m in alone.memory
        ]
        assert found.relative_error == alone.relative_error


def test_values_that_nobody_asks_for_are_forgotten() -> None:
    values, made = RecentValues[str](10), list[str]()

    def get(key: str, weight: int) -> str:
        def make() -> str:
            made.append(key)
            return key.upper()

        return values.get(key, make, weight)

    assert [get("a", 4), get("b", 4), get("a", 4), get("c", 4)] == ["A", "B", "A", "C"]
    assert made == ["a", "b", "c"]
    assert "a" in values
    assert "b" not in values
    # One that outweighs all others is there alone; then there is room for two again.
    assert get("d", 99) == "D"
    assert len(values) == 1
    assert [get("d", 99), get("e", 4), get("f", 4), get("e", 4)] == ["D", "E", "F", "E"]
    assert made == ["a", "b", "c", "d", "e", "f"]


def test_numbers_of_values_outlive_those_found_by_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_memory, "SEEN", 3)
    memory = RowMemory()
    values = [(k, "a value") for k in range(8)]
    numbers = [memory.number(value) for value in values]
    assert [memory.number((k, "a value")) for k in range(8)] == numbers == list(range(8))


def test_rows_timed_at_once_are_those_of_each() -> None:
    pairs = [[(0.0, 3), (1e-12, 5), (2.5e-6, 1)], [(0.1, 2), (0.0, 0), (7.4e-9, 6)]]
    for row, alone in zip(timed_rows(pairs), map(timed, pairs), strict=True):
        assert row.ns.tolist() == alone.ns.tolist()
        assert row.mask.tolist() == alone.mask.tolist()


def test_the_collector_is_as_it_was_afterwards() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match=f"collected after {OBJECTS}"):
        _fails_seldom_collected()
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with seldom_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
