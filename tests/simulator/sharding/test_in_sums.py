"""Elementwise work inside the sums of tensor parallelism, in closed form and on all engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.searcher.space.strategies import replicated, tensor_parallel
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.reference_engines import simulate_plain, simulate_simpy
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.forward_pass import forward_pass
from stratagem.simulator.graph.models import gpt, llama, mlp
from stratagem.simulator.graph.models.layers import linear
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import PARTIAL, REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import algorithm_times, finished_share
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.pricing.cost_rows import EdgeRow
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.choice_options import JoinedInputs, joined_inputs
from stratagem.simulator.sharding.pieces_and_fusion import fuses_in_sum
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.simulation.plan_in_words import choice_phrase
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.stage.block_tasks import stage_blocks

WAYS = 8
COSTS = RooflineCosts()
BF16 = Training(precision="bfloat16")
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
NBYTES = 2 * 16 * 256 * 512
"""Of a result of a layer."""
LINKS = [(2.0, 30.0), (300.0, 5.0), (1e5, 0.0)]
"""GB/s and µs: the last is so fast that the work takes longer than its sum."""


def layers(*, dropout: float = 0.0, num_layers: int = 1) -> OperatorGraph:
    sizes = {"hidden": 512, "num_heads": 8, "vocabulary": 512, "sequence": 256, "batch": 16}
    return gpt(num_layers=num_layers, dropout=dropout, **sizes)


def linked(bandwidth: float, latency: float, *, busy: bool = False, **more: float) -> Cluster:
    link = replace(
        CLUSTER.intra_node,
        bandwidth_gb_s=bandwidth,
        latency_us=latency,
        by_group_size=(),
        shares_compute=busy,
    )
    return replace(CLUSTER, intra_node=link, calibration=Calibration(**more))


def flat(ways: int) -> DeviceMesh:
    return DeviceMesh((MeshAxis("a", ways),), tuple(range(ways)))


def changed(choices: Choices, **fields: Mapping[str, object]) -> Choices:
    """With other options of some operators; a dot in a name is two underscores."""
    given = {name.replace("__", "."): each for name, each in fields.items()}
    return {n: replace(c, **given[n]) if n in given else c for n, c in choices.items()}  # type: ignore[arg-type]


ADDED = {"h__0__add": {"in_sum": True}}


def table_of(
    graph: OperatorGraph, choices: Choices, cluster: Cluster, ways: int = WAYS
) -> CostTable:
    ends = {i: [choices[name]] for i, name in enumerate(graph.names)}
    builder = TableBuilder(graph, flat(ways), cluster, BF16, COSTS)
    return builder.build(range(len(graph.names)), ends)


def edge_of(table: CostTable, producer: str, consumer: str) -> EdgeRow:
    ends = table.graph.index[producer], table.graph.index[consumer]
    pairs = zip(table.edges, table.edge_row_of, strict=True)
    (row,) = (row for edge, row in pairs if (edge.producer, edge.consumer) == ends)
    return table.edge_rows[row]


def apart_and_in_sum(
    graph: OperatorGraph, base: Choices, cluster: Cluster
) -> tuple[float, float, float, CostTable]:
    """Nanoseconds of the sum, of the addition behind it, and of both in one; and the table."""
    plain = table_of(graph, base, cluster)
    table = table_of(graph, changed(base, **ADDED), cluster)
    ends = "h.0.attn.out", "h.0.add"
    add = graph.index["h.0.add"]
    assert int(table.row(add).forward.ns[0]) == 0
    assert table.row(add).backward.ns.tolist() == plain.row(add).backward.ns.tolist()
    own = int(plain.row(add).forward.ns[0])
    before, after = (int(edge_of(each, *ends).forward_ns[0, 0]) for each in (plain, table))
    return before, own, after, table


class TestClosedForm:
    @pytest.mark.parametrize("dropout", [0.0, 0.1])
    @pytest.mark.parametrize(("bandwidth", "latency"), LINKS)
    def test_an_all_reduce(self, bandwidth: float, latency: float, dropout: float) -> None:
        """max(T, C/n) for a ring's all-reduce of T, wherever the sum is among the inputs."""
        graph = layers(dropout=dropout)
        base = tensor_parallel(graph, (WAYS,), 0)
        moved, own, found, _ = apart_and_in_sum(graph, base, linked(bandwidth, latency))
        hops = 2 * (WAYS - 1)
        assert moved == pytest.approx(hops * (latency * 1e3 + NBYTES / WAYS / bandwidth), abs=1)
        assert found == pytest.approx(max(moved, own / WAYS), abs=1)
        assert (found > moved) == (bandwidth == 1e5)

    @pytest.mark.parametrize(("bandwidth", "latency"), LINKS)
    def test_a_reduce_scatter(self, bandwidth: float, latency: float) -> None:
        """Under sequence parallelism a device adds up what it keeps: max(T, C), C of its part."""
        graph = layers()
        base = tensor_parallel(graph, (WAYS,), 0, sequence_parallel=True)
        moved, own, found, _ = apart_and_in_sum(graph, base, linked(bandwidth, latency))
        hops = WAYS - 1
        assert moved == pytest.approx(hops * (latency * 1e3 + NBYTES / WAYS / bandwidth), abs=1)
        assert found == pytest.approx(max(moved, own), abs=1)

    @pytest.mark.parametrize("bandwidth", [2.0, 1e5])
    def test_cores_that_a_collective_keeps_busy(self, bandwidth: float) -> None:
        """T + C/n: there is nobody to compute meanwhile."""
        graph = layers()
        base = tensor_parallel(graph, (WAYS,), 0)
        moved, own, found, _ = apart_and_in_sum(graph, base, linked(bandwidth, 5.0, busy=True))
        assert found == pytest.approx(moved + own / WAYS, abs=1)

    def test_several_steps(self) -> None:
        """T + max(0, C/N − t): t of the last sum, between nodes; its parts are 1/N of all."""
        graph = layers()
        cluster = Cluster.preset("dgx-a100", num_nodes=2)
        cluster = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth_gb_s=1e6))
        mesh = DeviceMesh((MeshAxis("node", 2), MeshAxis("a", 8)), tuple(range(16)))
        builder = TableBuilder(graph, mesh, cluster, BF16, COSTS)
        down, add = graph.index["h.0.mlp.down"], graph.index["h.0.add_1"]
        cut = Choice((Shard("in"), Shard("in")))
        whole = [Choice((REPLICATE, REPLICATE), in_sum=each) for each in (False, True)]
        table = builder.build([down, add], {down: [cut], add: whole})
        (row,) = (table.edge_rows[k] for k in table.edge_row_of)
        moved, found = row.forward.ns[0].tolist()
        own = int(table.row(add).forward.ns[0])
        ends = (PARTIAL, PARTIAL), (REPLICATE, REPLICATE)
        path = builder.resharder.path((16, 256, 512), 2, *ends)
        steps = [step.collective for step in path]
        assert steps == [Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.ALL_GATHER]
        last = 1e9 * builder.resharder.seconds(path[1:2], 2)
        assert found == pytest.approx(moved + max(0.0, own / 16 - last), abs=2)

    @pytest.mark.parametrize("chunks", [2, 8])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_with_pieces(self, chunks: int, streamed: bool) -> None:
        """Of each piece its part is computed on the way: together max(0, C/n − T) more."""
        graph, cluster = layers(), linked(1e5, 0.0)
        base = changed(
            tensor_parallel(graph, (WAYS,), 0),
            h__0__attn__out={"chunks": chunks, "streamed": streamed},
        )
        moved, own, found, _ = apart_and_in_sum(graph, base, cluster)
        assert found - moved == pytest.approx(own / WAYS - moved, abs=chunks + 1)

    def test_where_nothing_is_summed_it_runs_by_itself(self) -> None:
        """And is launched: a choice without effect is no gain."""
        graph, cluster = layers(), linked(300.0, 5.0, launch_us=7.0)
        base = replicated(graph, (WAYS,))
        moved, own, found, _ = apart_and_in_sum(graph, base, cluster)
        launch = int(
            table_of(graph, base, cluster).row(graph.index["h.0.add"]).launch_forward.ns[0]
        )
        assert (moved, launch) == (0, 7000)
        assert found == own + launch

    def test_it_has_no_launch_of_its_own(self) -> None:
        graph, cluster = layers(dropout=0.1), linked(300.0, 5.0, launch_us=7.0)
        base = tensor_parallel(graph, (WAYS,), 0)
        add = graph.index["h.0.add"]
        rows = [table_of(graph, c, cluster).row(add) for c in (base, changed(base, **ADDED))]
        assert [int(row.launch_forward.ns[0]) for row in rows] == [2 * 7000, 0]
        assert len({int(row.launch_backward.ns[0]) for row in rows}) == 1

    def test_roots_of_trees_have_a_half_each(self) -> None:
        link = AxisLink(5e-6, 1e-10, True, False, inside=AxisLink(1e-6, 1e-11, False, False))
        times = algorithm_times(Collective.ALL_REDUCE, 1e4, 16, link)
        assert min(times, key=times.__getitem__).value == "tree"
        assert finished_share(Collective.ALL_REDUCE, 1e4, 16, link) == 0.5
        assert finished_share(Collective.ALL_REDUCE, 1e9, 16, link) == 1 / 16
        assert finished_share(Collective.REDUCE_SCATTER, 1e9, 16, link) == 1 / 16
        assert finished_share(Collective.REDUCE, 1e9, 16, link) == 1


class TestMemory:
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_the_sum_is_stored_by_nobody(self, sequence_parallel: bool) -> None:
        """Masks of dropout are kept as without, and so is all else that backward needs."""
        graph, cluster = layers(dropout=0.1), linked(300.0, 5.0)
        base = tensor_parallel(graph, (WAYS,), 0, sequence_parallel=sequence_parallel)
        tables = [table_of(graph, each, cluster) for each in (base, changed(base, **ADDED))]
        ends = "h.0.attn.out", "h.0.add"
        copies = [int(edge_of(table, *ends).copy_bytes[0, 0]) for table in tables]
        assert copies == [NBYTES // (WAYS if sequence_parallel else 1), 0]
        rows = [table.row(graph.index["h.0.add"]) for table in tables]
        assert rows[0].own_bytes.tolist() == rows[1].own_bytes.tolist()
        assert rows[0].output_bytes[0].tolist() == rows[1].output_bytes[0].tolist()

    def test_a_forward_pass_has_room_for_it(self) -> None:
        """Where a sum was read there were the parts, the sum and what is made of it."""
        graph = forward_pass(mlp([8, 512, 8], batch=4096))
        base = replicated(graph, (WAYS,)) | {"layers.0": Choice((Shard("in"),))}
        peaks = [
            simulation_of(graph, choices, schedule="gpipe").memory[0].peak
            for choices in (base, changed(base, relu={"in_sum": True}))
        ]
        assert peaks[0] - peaks[1] == 2 * 4096 * 512


def simulation_of(graph: OperatorGraph, choices: Choices, **more: Any) -> Simulation:
    return simulate_plan(plan_of(graph, choices, **more), graph, COSTS)


def plan_of(
    graph: OperatorGraph,
    choices: Choices,
    *,
    ways: int = WAYS,
    cuts: tuple[int, ...] = (),
    schedule: str = "1f1b",
) -> Plan:
    """A pipeline whose stages begin at some operators."""
    bounds = [0, *cuts, len(graph.names)]
    stages = []
    for number, (lo, hi) in enumerate(pairwise(bounds)):
        mesh = DeviceMesh((MeshAxis("a", ways),), tuple(range(number * ways, (number + 1) * ways)))
        names = graph.names[lo:hi]
        stages.append(Stage(tuple(names), mesh, {name: choices[name] for name in names}))
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=BF16,
        stages=tuple(stages),
        schedule=schedule,
    )


class TestWhereItMay:
    def test_of_transformers(self) -> None:
        """Residual additions, with dropout or without; no activation that keeps its input."""
        graph = layers(dropout=0.1)
        may = [n for n in graph.names if fuses_in_sum(graph.operator(n))]
        assert may == ["embedding", "h.0.add", "h.0.add_1"]
        other = llama(num_layers=1, hidden=64, num_heads=4, vocabulary=64, sequence=8, batch=4)
        may = [n for n in other.names if fuses_in_sum(other.operator(n))]
        assert may == ["layers.0.add", "layers.0.add_1"]

    def test_a_bias_of_its_own_may_too(self) -> None:
        """Its update may be in the sync of its gradient beside."""
        b = GraphBuilder("biased")
        x, labels = b.input("x", (16, 32)), b.input("target", (16,), "int64")
        y = b.pointwise("add", linear(b, "a", x, 32, bias=False), b.parameter("shift", (32,)))
        graph = b.build(b.cross_entropy(y, labels))
        (name,) = (n for n in graph.names if graph.operator(n).kind == "elementwise")
        operator = graph.operator(name)
        assert operator.weights
        options = Options(fuse=True, in_sums=True)
        choices = operator_choices(graph, operator, (2,), (0,), options)
        assert {(c.fused, c.in_sum) for c in choices} == {*product((False, True), repeat=2)}
        base = replicated(graph, (2,)) | {"a": Choice((Shard("in"),))}
        one = changed(base, **{name: {"fused": True, "in_sum": True}})
        tables = [table_of(graph, each, CLUSTER, 2) for each in (base, one)]
        i = graph.index[name]
        rows = [table.row(i).forward.ns.tolist() for table in tables]
        assert rows == [[rows[0][0]], [0]]
        assert rows[0][0] > 0

    def test_it_joins_the_sum_that_is_made_last(self) -> None:
        graph = layers(dropout=0.1)
        every = range(len(graph.names))
        joined = {n: joined_inputs(graph, graph.index[n], every) for n in graph.names}
        assert joined["h.0.add"] == JoinedInputs(first=0, summed=0)
        assert joined["h.0.add_1"] == JoinedInputs(first=0, summed=0)
        plain = layers()
        assert joined_inputs(plain, plain.index["h.0.add"], every) == JoinedInputs(0, 1)
        # A table of words may be split along them.
        assert joined["embedding"].summed == 1

    def test_what_cannot_is_refused(self) -> None:
        graph = layers()
        choices = changed(replicated(graph, (1,)), h__0__mlp__act={"in_sum": True})
        told = r"'h.0.mlp.act' \(elementwise\) cannot run inside a sum.*set in_sum to false"
        with pytest.raises(ValueError, match=told):
            simulation_of(graph, choices, ways=1)
        both = changed(replicated(graph, (1,)), h__0__add={"in_sum": True, "fused": True})
        with pytest.raises(ValueError, match="is fused and in_sum: its forward pass runs inside"):
            simulation_of(graph, both, ways=1)

    def test_searches_try_it_where_asked_to(self) -> None:
        graph = layers(dropout=0.1)
        for options, found in ((Options(), [False]), (Options(in_sums=True), [False, True])):
            for name in graph.names:
                choices = operator_choices(graph, graph.operator(name), (2,), (0,), options)
                may = found if fuses_in_sum(graph.operator(name)) else [False]
                assert sorted({choice.in_sum for choice in choices}) == may

    @pytest.mark.parametrize("field", ["fused", "in_sum"])
    def test_behind_the_cut_of_a_pipeline_it_runs_by_itself(self, field: str) -> None:
        """What comes from another stage is summed there: the work of a fused operator was in no
        task at all.
        """
        graph = mlp([512, 512, 512], batch=4096)
        base = replicated(graph, (1,))
        cuts = (graph.index["relu"],)
        steps = [
            simulation_of(graph, choices, ways=1, cuts=cuts).step_time
            for choices in (base, changed(base, relu={field: True}))
        ]
        assert steps[0] == steps[1]


@pytest.mark.parametrize("seed", range(6))
def test_all_engines_agree_on_blocks_with_work_in_sums(seed: int) -> None:
    """The engine, plain Python and SimPy play every block of drawn choices alike."""
    rng = np.random.default_rng(seed)
    graph = gpt(
        num_layers=1,
        hidden=64,
        num_heads=8,
        vocabulary=96,
        sequence=32,
        batch=16,
        dropout=0.1 * (seed % 2),
    )
    busy, latency = bool(seed % 3 == 0), float(rng.choice([0.0, 20.0]))
    cluster = linked(float(rng.choice([0.5, 20.0, 1e5])), latency, busy=busy, launch_us=2.0)
    options = Options(chunks=(1, 2), fuse=True, regather=True, stream=True, in_sums=True)
    choices = {
        i: operator_choices(graph, operator, (4,), (0, 3), options)
        for i, operator in enumerate(graph.operators)
    }
    builder = TableBuilder(graph, flat(4), cluster, BF16, COSTS)
    table = builder.build(range(len(graph.operators)), choices)
    step = StepOptions(inputs_first=seed % 3 == 0)
    blocks = stage_blocks(table, split=bool(seed % 2), options=step, slowdown=130)
    inside = 0
    for _ in range(3):
        chosen = np.array([rng.integers(len(choices[i])) for i in range(len(choices))])
        inside += sum(choices[i][number].in_sum for i, number in enumerate(chosen))
        for block in (blocks.forward, blocks.backward):
            played = blocks.task_graph(block, chosen, last=True)
            ends = [each(played).end for each in (simulate, simulate_plain, simulate_simpy)]
            assert np.array_equal(ends[0], ends[1])
            assert np.array_equal(ends[0], ends[2])
    assert inside


class TestFiles:
    def plan(self) -> Plan:
        graph = layers()
        return plan_of(graph, changed(tensor_parallel(graph, (WAYS,), 0), **ADDED))

    def test_it_is_saved(self, tmp_path: Path) -> None:
        plan = self.plan()
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert plan.in_sums == ("h.0.add",)

    def test_files_from_before_have_none(self) -> None:
        file = json.loads(self.plan().to_json())
        for choice in file["stages"][0]["choices"].values():
            del choice["in_sum"]
        assert Plan.from_json(json.dumps(file)).in_sums == ()

    def test_it_is_said(self) -> None:
        operator, choice = layers().operator("h.0.add"), self.plan().choice("h.0.add")
        assert "in shares inside the sum that it reads" in choice_phrase(operator, choice, (8,))
