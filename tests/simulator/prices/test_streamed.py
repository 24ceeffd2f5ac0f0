"""Streamed pieces: one product and one collective that waits for its parts, in closed form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.searcher.space.strategies import replicated, tensor_parallel
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.reference_engines import simulate_plain, simulate_simpy
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.simulation.plan_in_words import choice_phrase
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.timeline.timeline import Timeline
from tests.simulator.prices.test_options import BF16, CLUSTER, changed, flat, plan_of

COSTS = RooflineCosts()
WAYS = 8


def layers(**changes: int) -> OperatorGraph:
    sizes = {"hidden": 512, "num_heads": 8, "vocabulary": 512, "sequence": 256, "batch": 16}
    return gpt(num_layers=1, **(sizes | changes))


def linked(bandwidth: float, latency: float, **calibration: float) -> Cluster:
    link = replace(
        CLUSTER.intra_node,
        bandwidth_gb_s=bandwidth,
        latency_us=latency,
        by_group_size=(),
    )
    return replace(CLUSTER, intra_node=link, calibration=Calibration(**calibration))


def timeline_of(
    graph: OperatorGraph, choices: Choices, cluster: Cluster, parts: int = 1
) -> Timeline:
    plan = plan_of(graph, choices, WAYS, cluster=cluster, num_microbatches=parts)
    return simulate_plan(plan, graph, COSTS).timeline


def length(timeline: Timeline, wanted: Callable[[str], bool]) -> int:
    """From where the first task of some names begins to the end of the last, the first time."""
    found: dict[str, tuple[int, int]] = {}
    for row in np.argsort(timeline.start, kind="stable").tolist():
        if wanted(timeline.names[row]):
            begin, end = int(timeline.start[row]), int(timeline.end[row])
            found.setdefault(timeline.names[row], (begin, end))
    return max(end for _, end in found.values()) - min(begin for begin, _ in found.values())


def named(text: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(text)


def ring(nbytes: float, bandwidth: float, latency: float, passes: int) -> tuple[float, float]:
    """Nanoseconds of a ring of all devices (Patarasuk and Yuan 2009): of its hops, of bytes."""
    hops = passes * (WAYS - 1)
    return hops * latency * 1e3, hops * nbytes / WAYS / bandwidth


class TestClosedForm:
    @pytest.mark.parametrize("chunks", [2, 4, 16])
    @pytest.mark.parametrize(("bandwidth", "latency"), [(2.0, 30.0), (300.0, 5.0), (50.0, 0.0)])
    def test_behind_a_product(self, chunks: int, bandwidth: float, latency: float) -> None:
        """max(C + G/n, C/n + G) + λ for a product of C and an all-reduce of λ + G."""
        graph, cluster = layers(), linked(bandwidth, latency)
        base = tensor_parallel(graph, (WAYS,), 0)
        streamed = changed(base, ["h.0.mlp.down"], chunks=chunks, streamed=True)
        product = length(timeline_of(graph, base, cluster), named("h.0.mlp.down forward"))
        late, moved = ring(2 * 16 * 256 * 512, bandwidth, latency, passes=2)
        found = length(
            timeline_of(graph, streamed, cluster),
            lambda n: n.startswith(("h.0.mlp.down forward", "h.0.mlp.down → ")),
        )
        expected = max(product + moved / chunks, product / chunks + moved) + late
        assert found == pytest.approx(expected, abs=2 * chunks + 2)

    @pytest.mark.parametrize("chunks", [2, 4, 16])
    @pytest.mark.parametrize(("bandwidth", "latency"), [(2.0, 30.0), (300.0, 5.0), (50.0, 0.0)])
    def test_before_a_product(self, chunks: int, bandwidth: float, latency: float) -> None:
        """λ + max(G + C/n, G/n + C) for an all-gather of λ + G and a product of C."""
        graph, cluster = layers(), linked(bandwidth, latency)
        base = tensor_parallel(graph, (WAYS,), 0, sequence_parallel=True)
        streamed = changed(base, ["h.0.mlp.up"], chunks=chunks, streamed=True)
        product = length(timeline_of(graph, base, cluster), named("h.0.mlp.up forward"))
        late, moved = ring(2 * 16 * 256 * 512, bandwidth, latency, passes=1)
        found = length(
            timeline_of(graph, streamed, cluster),
            lambda n: n.startswith("h.0.mlp.up forward") or "→ h.0.mlp.up" in n,
        )
        expected = late + max(moved + product / chunks, moved / chunks + product)
        assert found == pytest.approx(expected, abs=2 * chunks + 2)

    @pytest.mark.parametrize("chunks", [2, 8])
    @pytest.mark.parametrize(("bandwidth", "latency"), [(2.0, 30.0), (300.0, 5.0)])
    def test_backward(self, chunks: int, bandwidth: float, latency: float) -> None:
        """The gradient of a result is gathered before the pass, that of inputs scattered behind.

        A part of the pass makes its gradients of inputs and of weights. Looked at is the first of
        two microbatches, beside which no gradients are summed.
        """
        graph, cluster = layers(), linked(bandwidth, latency)
        base = tensor_parallel(graph, (WAYS,), 0, sequence_parallel=True)
        plain = timeline_of(graph, base, cluster, parts=2)
        late, moved = ring(2 * 8 * 256 * 512, bandwidth, latency, passes=1)
        for name, arrow in (("h.0.mlp.down", "h.0.mlp.down ← "), ("h.0.mlp.up", "← h.0.mlp.up")):
            streamed = changed(base, [name], chunks=chunks, streamed=True)
            product = length(plain, named(f"{name} backward"))
            wanted = [f"{name} backward", arrow]
            found = length(
                timeline_of(graph, streamed, cluster, parts=2),
                lambda n, wanted=wanted: any(each in n for each in wanted),  # type: ignore[misc]
            )
            expected = late + max(moved + product / chunks, moved / chunks + product)
            assert found == pytest.approx(expected, abs=2 * chunks + 2)

    def test_pieces_of_their_own_pay_latency_and_small_products(self) -> None:
        """Latency binds: n collectives take n latencies, a streamed one takes one."""
        graph, cluster = layers(), linked(300.0, 100.0)
        base = tensor_parallel(graph, (WAYS,), 0)
        lengths = [
            length(
                timeline_of(graph, changed(base, ["h.0.mlp.down"], **fields), cluster),
                lambda n: n.startswith(("h.0.mlp.down forward", "h.0.mlp.down → ")),
            )
            for fields in ({"chunks": 8}, {"chunks": 8, "streamed": True}, {})
        ]
        late = 14 * 100_000
        assert lengths[0] > 8 * late
        assert late < lengths[1] < lengths[2] < 2 * late

    def test_a_step_is_never_longer_for_it(self) -> None:
        """On any link: one launch and one latency as without pieces, and overlap beside."""
        graph = layers()
        base = tensor_parallel(graph, (WAYS,), 0, sequence_parallel=True)
        products = [n for n in graph.names if n.endswith((".qkv", ".out", ".up", ".down"))]
        for bandwidth, latency in ((1.0, 0.0), (10.0, 50.0), (600.0, 5.0)):
            cluster = linked(bandwidth, latency, launch_us=4.0)
            steps = [
                simulate_plan(plan_of(graph, each, WAYS, cluster=cluster), graph, COSTS).step_time
                for each in (base, changed(base, products, chunks=4, streamed=True))
            ]
            assert steps[1] < steps[0]


def test_a_streamed_product_is_one_launch() -> None:
    graph, cluster = layers(), linked(300.0, 5.0, launch_us=7.0)
    base = replicated(graph, (1,))
    launched = []
    for fields in ({}, {"chunks": 4}, {"chunks": 4, "streamed": True}):
        plan = plan_of(graph, changed(base, ["h.0.mlp.up"], **fields), cluster=cluster)
        builder = TableBuilder(graph, flat(1), cluster, BF16, COSTS)
        index = graph.index["h.0.mlp.up"]
        row = builder.build([index], {index: [plan.choice("h.0.mlp.up")]}).row(index)
        launched.append((int(row.launch_forward.ns[0]), int(row.launch_backward.ns[0])))
    assert launched[1] == (4 * launched[0][0], 4 * launched[0][1])
    assert launched[2] == launched[0]


def test_a_fused_reader_of_pieces_takes_its_time_once() -> None:
    """Each piece of a conversion has its share of the reader inside, not all of it."""
    graph, cluster = mlp([512, 2048, 512], batch=4096), linked(1e6, 0.0)
    base = tensor_parallel(graph, (WAYS,), 0)
    index, reader = graph.index["layers.0"], graph.index["relu"]
    found = []
    for chunks, streamed in ((1, False), (4, False), (4, True)):
        choices = changed(base, ["layers.0"], chunks=chunks, streamed=streamed)
        choices = changed(choices, ["relu"], fused=True)
        builder = TableBuilder(graph, flat(WAYS), cluster, BF16, COSTS)
        ends = {i: [choices[graph.names[i]]] for i in (index, reader)}
        table = builder.build([index, reader], ends)
        (row,) = (table.edge_rows[n] for n in table.edge_row_of)
        found.append(int(row.forward_ns[0, 0]))
    assert found[0] > 1000
    assert found[1:] == pytest.approx([found[0]] * 2, abs=4)


@pytest.mark.parametrize("seed", range(6))
def test_all_engines_agree_on_blocks_with_streamed_pieces(seed: int) -> None:
    """The engine, plain Python and SimPy play every block of drawn choices alike."""
    rng = np.random.default_rng(seed)
    graph = layers(hidden=64, vocabulary=96, sequence=32)
    cluster = linked(float(rng.choice([0.5, 20.0])), float(rng.choice([0.0, 20.0])), launch_us=2.0)
    options = Options(chunks=(1, 2, 4), fuse=True, regather=True, stream=True)
    choices = {
        i: operator_choices(graph, operator, (4,), (0, 3), options)
        for i, operator in enumerate(graph.operators)
    }
    table = TableBuilder(graph, flat(4), cluster, BF16, COSTS).build(
        range(len(graph.operators)), choices
    )
    step = StepOptions(inputs_first=seed % 3 == 0)
    blocks = stage_blocks(table, split=bool(seed % 2), options=step, slowdown=130)
    streamed = 0
    for _ in range(3):
        chosen = np.array([rng.integers(len(choices[i])) for i in range(len(choices))])
        streamed += sum(choices[i][number].streamed for i, number in enumerate(chosen))
        for block in (blocks.forward, blocks.backward):
            played = blocks.task_graph(block, chosen, last=True)
            ends = [each(played).end for each in (simulate, simulate_plain, simulate_simpy)]
            assert np.array_equal(ends[0], ends[1])
            assert np.array_equal(ends[0], ends[2])
    assert streamed


class TestFiles:
    def plan(self) -> Plan:
        graph = layers()
        choices = changed(replicated(graph, (1,)), ["h.0.mlp.up"], chunks=4, streamed=True)
        return plan_of(graph, choices)

    def test_it_is_saved(self, tmp_path: Path) -> None:
        plan = self.plan()
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert plan.streamed == ("h.0.mlp.up",)

    def test_files_from_before_have_pieces_of_their_own(self) -> None:
        file = json.loads(self.plan().to_json())
        for choice in file["stages"][0]["choices"].values():
            del choice["streamed"]
        before = Plan.from_json(json.dumps(file))
        assert before.streamed == ()
        assert before.choice("h.0.mlp.up") == replace(
            self.plan().choice("h.0.mlp.up"), streamed=False
        )

    def test_one_piece_has_nothing_to_stream(self) -> None:
        with pytest.raises(ValueError, match=r"streamed with 1 chunk.*set chunks to 2 or more"):
            Choice((), streamed=True)
        with pytest.raises(ValueError, match=r"stream is True, but chunks are \(1,\)"):
            Options(stream=True)

    def test_it_is_said(self) -> None:
        operator = layers().operator("h.0.mlp.up")
        choice = self.plan().choice("h.0.mlp.up")
        assert "in 4 streamed pieces" in choice_phrase(operator, choice, (1,))
