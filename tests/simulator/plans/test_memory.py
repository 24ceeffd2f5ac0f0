"""Memory over time and its peak: brute force, closed forms, and the curve against the peak."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import (
    data_parallel,
    replicated,
    tensor_parallel,
    with_recompute,
)
from stratagem.simulator.drawing.memory_plot import plot_memory
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import gpt, llama, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import (
    saved_inside,
    saved_slots,
    saves_output,
)
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.device_memory import MemoryTimeline
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
COSTS = RooflineCosts()


def small_gpt(batch: int = 16) -> OperatorGraph:
    return gpt(num_layers=3, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=batch)


def mesh(ways: int, first: int = 0) -> DeviceMesh:
    return DeviceMesh((MeshAxis("a", ways),), tuple(range(first, first + ways)))


def plan_of(
    graph: OperatorGraph, choices: Choices, num_stages: int, parts: int, schedule: str, ways: int
) -> Plan:
    stages = balanced_stages(graph, CLUSTER, num_stages)
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(),
        stages=tuple(
            Stage(names, mesh(ways, s * ways), {n: choices[n] for n in names})
            for s, names in enumerate(stages)
        ),
        num_microbatches=parts,
        schedule=schedule,
    )


def alive_by_definition(graph: OperatorGraph, again: set[str]) -> int:
    """The peak of one device without state: a tensor is in memory from its making to its last use.

    What is recomputed is used in forward, let go, made again when backward enters its segment, and
    used in backward. Written down place by place, without intervals or look-ups.
    """
    n = len(graph.operators)
    segment = graph.segments
    outside = {e.producer for e in graph.edges if segment[e.producer] != segment[e.consumer]}

    def back(i: int) -> int:
        return 2 * n - 1 - i

    def enters(i: int) -> int:
        return min(back(j) for j in range(n) if segment[j] == segment[i])

    alive = np.zeros(2 * n, dtype=np.int64)
    for i, operator in enumerate(graph.operators):
        if operator.is_source:
            continue
        size = 4 * int(np.prod([operator.sizes[f] for g in operator.outputs[0].layout for f in g]))
        reads = [e for e in graph.edges if e.producer == i]
        uses = [e.consumer for e in reads]
        needs = [
            back(e.consumer)
            for e in reads
            if e.slot in saved_slots(graph.operators[e.consumer])
            and graph.needs_gradient[e.consumer]
        ]
        if saves_output(operator):
            needs.append(back(i))
        dropped = operator.name in again and i not in outside
        places = set(range(i, max([i, *uses]) + 1))
        if needs and not dropped:
            places |= set(range(i, max(needs) + 1))
        if needs and dropped:
            places |= set(range(enters(i), max(needs) + 1))
        for place in places:
            alive[place] += size
        tensors, masks = saved_inside(operator)
        own = tensors * size + masks * size // 4
        if operator.kind == "cross_entropy":
            first = operator.inputs[0].layout
            own = 4 * int(np.prod([operator.sizes[f] for g in first for f in g]))
        kept = {*range(i, back(i) + 1)}
        if operator.name in again:
            kept = set(range(enters(i), back(i) + 1))
        for place in kept:
            alive[place] += own
        if graph.needs_gradient[i]:
            last = max([i, *uses])
            born = back(last) + (i < last and graph.operators[last].kind == "cross_entropy")
            alive[born : back(i) + 1] += size
            read = sum(
                int(np.prod([operator.sizes[f] for g in r.layout for f in g]))
                for r in operator.inputs
            )
            alive[back(i)] += 2 * own if operator.kind == "cross_entropy" else 4 * read
    return int(alive.max())


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("model", ["gpt", "mlp", "resnet"])
def test_the_peak_is_that_of_the_definition(model: str, policy: str) -> None:
    graph = {
        "gpt": small_gpt(),
        "mlp": mlp([64, 256, 64, 256, 64], batch=16),
        "resnet": resnet(50, batch=2, image=64),
    }[model]
    choices = with_recompute(graph, replicated(graph, (1,)), policy)
    again = {name for name, choice in choices.items() if choice.recompute}
    memory = simulate_plan(plan_of(graph, choices, 1, 1, "1f1b", 1), graph, COSTS).memory[0]
    assert memory.peak - memory.state == alive_by_definition(graph, again)


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 2**31),
    num_stages=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
)
def test_the_curve_peaks_where_the_peak_says(seed: int, num_stages: int, schedule: str) -> None:
    graph = small_gpt()
    parts, ways = 4, 8 // num_stages
    small, rng = graph.microbatch(parts), np.random.default_rng(seed)
    options = Options(chunks=(1, 2), fuse=True, stream=True, in_sums=True)
    again = rng.random() < 0.5
    choices: dict[str, Choice] = {}
    for operator in small.operators:
        recompute = bool(again and rng.random() < 0.7 and not operator.is_source)
        found = operator_choices(small, operator, (ways,), (0, 2, 3), options, recompute=recompute)
        choices[operator.name] = found[int(rng.integers(len(found)))]
    simulation = simulate_plan(
        plan_of(graph, choices, num_stages, parts, schedule, ways), graph, COSTS
    )
    for rank, memory in enumerate(simulation.memory):
        curve = simulation.memory_timeline(rank)
        assert curve.peak == memory.peak
        assert int(curve.total[-1]) == memory.state
        assert sum(each.total for each in memory.alive) == memory.peak
        assert (np.diff(curve.times) >= 0).all()
        assert (curve.nbytes >= 0).all()


def test_1f1b_holds_fewer_microbatches_the_later_the_stage() -> None:
    graph = small_gpt(batch=32)
    choices = replicated(graph.microbatch(8), (2,))
    plan = plan_of(graph, choices, 4, 8, "1f1b", 2)
    assert [m.in_flight for m in simulate_plan(plan, graph, COSTS).memory] == [4, 3, 2, 1]
    gpipe = replace(plan, schedule="gpipe")
    assert [m.in_flight for m in simulate_plan(gpipe, graph, COSTS).memory] == [8, 8, 8, 8]


def test_zero_shards_what_it_says() -> None:
    """ZeRO-1 shards optimizer state, 2 also gradients, 3 also parameters."""
    graph = mlp([512, 512, 512], batch=64)
    held: dict[int, dict[Purpose, int]] = {}
    for zero in (0, 1, 2, 3):
        plan = plan_of(graph, data_parallel(graph, (8,), zero=zero), 1, 1, "1f1b", 8)
        found: dict[Purpose, int] = {}
        memory = simulate_plan(plan, graph, COSTS).memory[0]
        for each in memory.alive:
            found[each.use] = found.get(each.use, 0) + each.total
        held[zero] = found
    whole = held[0]
    weights = graph.num_parameters * 4
    assert whole[Purpose.PARAMETERS] == whole[Purpose.GRADIENTS] == weights
    assert whole[Purpose.OPTIMIZER] == 2 * weights
    assert held[1][Purpose.OPTIMIZER] == pytest.approx(whole[Purpose.OPTIMIZER] / 8, rel=0.01)
    assert held[1][Purpose.GRADIENTS] == weights
    assert held[2][Purpose.GRADIENTS] < 0.7 * weights
    assert held[3][Purpose.PARAMETERS] == pytest.approx(weights / 8, rel=0.01)


class TestPublishedActivations:
    """Bytes of one layer in 16 bits by Korthikanti et al. 2022 (arXiv 2205.05198), Table 2."""

    SEQUENCE, BATCH, HIDDEN, HEADS = 48, 2, 96, 6

    def of_a_layer(
        self, ways: int, policy: str, *, sequence_parallel: bool = False, regather: bool = False
    ) -> Fraction:
        """What a layer adds to the activations of a microbatch, in units of s·b·h bytes."""
        held: list[int] = []
        for num_layers in (4, 5):
            graph = gpt(
                num_layers=num_layers,
                hidden=self.HIDDEN,
                num_heads=self.HEADS,
                vocabulary=96,
                sequence=self.SEQUENCE,
                batch=self.BATCH,
                attention="unfused",
                dropout=0.1,
            )
            choices = tensor_parallel(
                graph, (ways,), 0, sequence_parallel=sequence_parallel, regather=regather
            )
            plan = plan_of(graph, with_recompute(graph, choices, policy), 1, 1, "1f1b", ways)
            plan = replace(plan, training=Training(precision="float16"))
            held.append(simulate_plan(plan, graph, COSTS).memory[0].activations)
        return Fraction(held[1] - held[0], self.SEQUENCE * self.BATCH * self.HIDDEN)

    @property
    def scores(self) -> Fraction:
        """a·s / h."""
        return Fraction(self.HEADS * self.SEQUENCE, self.HIDDEN)

    def test_one_device(self) -> None:
        assert self.of_a_layer(1, "none") == 34 + 5 * self.scores

    @pytest.mark.parametrize("ways", [2, 3, 6])
    def test_tensor_parallelism(self, ways: int) -> None:
        expected = 10 + Fraction(24, ways) + 5 * self.scores / ways
        assert self.of_a_layer(ways, "none") == expected

    @pytest.mark.parametrize("ways", [1, 2, 6])
    def test_selective_recompute_drops_the_scores(self, ways: int) -> None:
        assert self.of_a_layer(ways, "selective") == 10 + Fraction(24, ways)

    @pytest.mark.parametrize("ways", [2, 6])
    @pytest.mark.parametrize("policy", ["none", "selective"])
    def test_sequence_parallelism(self, policy: str, ways: int) -> None:
        """Everything is sharded; 4·s·b·h, the inputs of two linear layers, only if gathered again
        in backward, as in the paper."""
        sharded = Fraction(34) + (5 * self.scores if policy == "none" else 0)
        found = self.of_a_layer(ways, policy, sequence_parallel=True, regather=True)
        assert found == sharded / ways
        gathered = 4 * (1 - Fraction(1, ways))
        assert self.of_a_layer(ways, policy, sequence_parallel=True) == sharded / ways + gathered

    @pytest.mark.parametrize("ways", [1, 2])
    def test_full_recompute_keeps_the_input_of_a_layer(self, ways: int) -> None:
        assert self.of_a_layer(ways, "full") == 2
        assert self.of_a_layer(ways, "full", sequence_parallel=True) == Fraction(2, ways)


def test_backward_keeps_what_autograd_keeps() -> None:
    """One chain a case; the output counts where it is kept, masks have one byte an element."""
    b = GraphBuilder("chains")
    x, y = b.input("x", (4, 8)), b.input("y", (4, 8))
    cases = {
        "relu": ([["relu", [["in", 0]]]], set(), True, (0, 0)),
        "gelu": ([["gelu", [["in", 0], "tanh"]]], {0}, False, (0, 0)),
        "dropped": ([["dropout", [["in", 0], 0.5]], ["add", [["step", 0], ["in", 1]]]],
                    set(), False, (0, 1)),
        "gated": ([["silu", [["in", 0]]], ["mul", [["step", 0], ["in", 1]]]],
                  {0, 1}, False, (1, 0)),
        "masked": ([["gt", [["in", 0], 0.0]], ["masked_fill", [["in", 1], ["step", 0], 0.0]]],
                   set(), False, (0, 1)),
        "scaled": ([["mul", [["in", 0], 2.0]]], set(), False, (0, 0)),
    }  # fmt: skip
    total = b.pointwise("neg", x)
    for name, (steps, *_) in cases.items():
        inputs = [x, y] if "['in', 1]" in str(steps) else [x]
        total = b.cat([total, b.elementwise(inputs, steps, name=name)], dim=1)
    graph = b.build(b.reduce(total))
    for name, (_, slots, output, inside) in cases.items():
        operator = graph.operator(name)
        assert saved_slots(operator) == slots
        assert saves_output(operator) == output
        assert saved_inside(operator) == inside


def test_a_fused_chain_keeps_what_it_reads_and_what_it_draws() -> None:
    """Its backward is one kernel, which makes the rest again: x + b for its GELU, silu(gate)."""
    b = GraphBuilder("chains")
    x, y = b.input("x", (4, 8)), b.input("y", (4, 8))
    cases = {
        "gated": ([["silu", [["in", 0]]], ["mul", [["step", 0], ["in", 1]]]], {0, 1}, (0, 0)),
        "behind": ([["add", [["in", 0], ["in", 1]]], ["gelu", [["step", 0], "tanh"]],
                    ["neg", [["step", 1]]]], {0, 1}, (0, 0)),
        "masked": ([["gt", [["in", 0], 0.0]], ["masked_fill", [["in", 1], ["step", 0], 0.0]]],
                   {0}, (0, 0)),
        "dropped": ([["gelu", [["in", 0], "tanh"]], ["dropout", [["step", 0], 0.5]]],
                    {0}, (0, 1)),
        "added": ([["add", [["in", 0], ["in", 1]]], ["neg", [["step", 0]]]], set(), (0, 0)),
    }  # fmt: skip
    total = b.pointwise("neg", x)
    for name, (steps, *_) in cases.items():
        inputs = [x, y] if "['in', 1]" in str(steps) else [x]
        total = b.cat([total, b.elementwise(inputs, steps, name=name)], dim=1)
    graph = b.build(b.reduce(total))
    for name, (_, slots, inside) in cases.items():
        assert saved_slots(graph.operator(name), fused=True) == slots, name
        assert saved_inside(graph.operator(name), fused=True) == inside, name


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_fused_swiglu_holds_one_tensor_less(policy: str) -> None:
    """2·s·b·ffn bytes a layer in 16 bits: silu(gate), unless the layer runs again anyway."""
    sequence, batch, ffn, held = 32, 4, 96, []
    for num_layers in (2, 3):
        graph = llama(
            num_layers=num_layers, hidden=64, num_heads=4, ffn=ffn, vocabulary=96,
            sequence=sequence, batch=batch,
        )  # fmt: skip
        choices = with_recompute(graph, replicated(graph, (1,)), policy)
        plan = plan_of(graph, choices, 1, 1, "1f1b", 1)
        held.append(
            [
                simulate_plan(
                    replace(plan, training=Training("bfloat16", fused_elementwise=fused)),
                    graph,
                    COSTS,
                ).memory[0].activations
                for fused in (False, True)
            ]
        )  # fmt: skip
    eager, fused = (after - before for before, after in zip(*held, strict=True))
    assert eager - fused == (2 * sequence * batch * ffn if policy == "none" else 0)


class TestPlot:
    def test_a_panel_a_rank_and_a_colour_a_use(self, tmp_path: Path) -> None:
        graph = small_gpt()
        plan = plan_of(graph, replicated(graph.microbatch(4), (2,)), 2, 4, "1f1b", 2)
        simulation = simulate_plan(plan, graph, COSTS)
        curves = [simulation.memory_timeline(rank) for rank in range(2)]
        figure = plot_memory(curves, tmp_path / "memory.png")
        assert (tmp_path / "memory.png").stat().st_size > 5_000
        assert [panel.get_title(loc="left").split(":")[0] for panel in figure.axes] == [
            "rank 0",
            "rank 1",
        ]
        shown = {text.get_text() for text in figure.legends[0].get_texts()}
        assert {"parameters", "activations", "tensors in use"} <= shown

    def test_too_much_is_said_by_how_much(self) -> None:
        times = np.array([0, 10], dtype=np.int64)
        nbytes = np.zeros((len(Purpose), 2), dtype=np.int64)
        nbytes[3] = 3 * 2**30
        figure = plot_memory([MemoryTimeline("rank 0", times, nbytes, 2 * 2**30)])
        title = figure.axes[0].get_title(loc="left")
        assert title == "rank 0: peak 3.00 of 2 GiB, 1.00 GiB too much"

    def test_long_curves_keep_their_peak(self) -> None:
        size = 100_000
        nbytes = np.zeros((len(Purpose), size), dtype=np.int64)
        nbytes[0] = np.random.default_rng(0).integers(0, 2**30, size)
        nbytes[0, 54_321] = 2**31
        timeline = MemoryTimeline("rank 0", np.arange(size, dtype=np.int64), nbytes, 2**32)
        drawn = plot_memory([timeline]).axes[0].collections[0]
        heights = drawn.get_paths()[0].vertices[:, 1]
        assert heights.max() == 2.0
        assert heights.size < 20_000

    def test_nothing_to_draw(self) -> None:
        with pytest.raises(ValueError, match="0 memory timelines"):
            plot_memory([])
