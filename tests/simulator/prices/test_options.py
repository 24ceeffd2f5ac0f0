"""Recompute, pieces, fusion, buckets and split backward passes, against closed forms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.strategies import data_parallel, replicated, tensor_parallel
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators, run_again
from stratagem.simulator.graph.models import gpt, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.work_kinds import FORWARD
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.priced_plan import StageModel, block_times, plan_model
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.timeline.timeline import Timeline

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
COSTS = RooflineCosts()
BF16 = Training(precision="bfloat16")


def layers(num_layers: int, **changes: int) -> OperatorGraph:
    sizes = {"hidden": 256, "num_heads": 8, "vocabulary": 512, "sequence": 128, "batch": 16}
    return gpt(num_layers=num_layers, **(sizes | changes))


def flat(ways: int) -> DeviceMesh:
    return DeviceMesh((MeshAxis("a", ways),), tuple(range(ways)))


def plan_of(graph: OperatorGraph, choices: Choices, ways: int = 1, **more: object) -> Plan:
    fields: dict[str, object] = {
        "name": "test",
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "cluster": CLUSTER,
        "training": BF16,
        "stages": (Stage(tuple(op.name for op in graph.operators), flat(ways), choices),),
    }
    return Plan(**(fields | more))  # type: ignore[arg-type]


def changed(choices: Choices, names: Collection[str], **fields: object) -> Choices:
    return {n: replace(c, **fields) if n in names else c for n, c in choices.items()}  # type: ignore[arg-type]


def only_stage(plan: Plan, graph: OperatorGraph) -> StageModel:
    return plan_model(plan, graph, COSTS).stages[0]


class TestSegments:
    def test_layers_of_a_transformer(self) -> None:
        graph = layers(3)
        segment = dict(zip((op.name for op in graph.operators), graph.segments, strict=True))
        for layer in range(3):
            inside = {n for n in segment if n.startswith(f"h.{layer}.")}
            assert len({segment[name] for name in inside}) == 1
        assert len({segment[f"h.{layer}.ln_1"] for layer in range(3)}) == 3

    def test_residual_blocks_of_a_convolutional_network(self) -> None:
        """Behind every residual addition one tensor goes on, so a segment may end there."""
        graph = resnet(50, batch=4)
        segment = graph.segments
        first = graph.index["layer1.0.conv1"]
        assert {segment[i] for i in range(first, graph.index["layer1.0.relu_2"] + 1)} == {first}

    @pytest.mark.parametrize("policy", ["selective", "full"])
    def test_what_a_segment_hands_on_is_never_recomputed(self, policy: str) -> None:
        graph = layers(4)
        again, segment = recomputed_operators(graph, policy), graph.segments
        assert again
        for edge in graph.edges:
            if segment[edge.producer] != segment[edge.consumer]:
                assert graph.operators[edge.producer].name not in again

    def test_selective_is_the_attention_core(self) -> None:
        graph = layers(2)
        kinds = {graph.operator(name).kind for name in recomputed_operators(graph, "selective")}
        assert kinds == {"attention"}

    def test_an_unknown_policy_suggests_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"no recompute policy 'ful' .did you mean 'full'"):
            recomputed_operators(layers(2), "ful")


class TestRecompute:
    def test_backward_lasts_longer_by_what_runs_again(self) -> None:
        graph = layers(4)
        plain = replicated(graph, (1,))
        again = recomputed_operators(graph, "full")
        before = only_stage(plan_of(graph, plain), graph)
        after = only_stage(plan_of(graph, changed(plain, again, recompute=True)), graph)
        runs = run_again(graph, range(len(graph.operators)), {graph.index[n] for n in again})
        more = sum(int(before.table.row(i).forward.ns[0]) for i in runs)
        none = np.zeros(len(graph.operators), dtype=np.int64)
        spans = [
            simulate(s.blocks.task_graph(s.blocks.backward, none, last=True)).makespan
            for s in (before, after)
        ]
        assert spans[1] - spans[0] == more

    def test_full_recompute_keeps_only_the_inputs_of_layers(self) -> None:
        """2·s·b·h bytes a layer in 16 bits (Korthikanti et al. 2022, equation 5)."""
        held = []
        for num_layers in (3, 4):
            graph = layers(num_layers)
            again = recomputed_operators(graph, "full")
            choices = changed(replicated(graph, (1,)), again, recompute=True)
            held.append(only_stage(plan_of(graph, choices), graph).tensors.held[0])
        assert held[1] - held[0] == 2 * 128 * 16 * 256

    def test_under_tensor_parallelism_its_collectives_are_repeated(self) -> None:
        graph = layers(2)
        base = tensor_parallel(graph, (4,), 0)
        again = recomputed_operators(graph, "full")
        names = simulate_plan(
            plan_of(graph, changed(base, again, recompute=True), 4), graph, COSTS
        ).timeline.names
        repeated = {name for name in names if name.endswith(" again")}
        plain = simulate_plan(plan_of(graph, base, 4), graph, COSTS).timeline.names
        forward = {name for name in plain if " → " in name}
        for name in repeated:
            assert name.removesuffix(" again") in forward
        # Each layer but the last addition runs again, with the all-reduce behind attention.
        assert sum("attn.out" in name for name in repeated) == 2

    def test_what_a_repeated_conversion_starts_from_is_held(self) -> None:
        """The reader keeps the whole copy; or, recomputed, the half that it is gathered from."""
        graph = layers(2)
        base = replicated(graph, (2,))
        act = graph.operator("h.0.mlp.act")
        base["h.0.mlp.act"] = Choice((Shard(act.dims[-1].name),))
        before, after = (
            only_stage(plan_of(graph, choices, 2), graph).tensors.held[0]
            for choices in (base, changed(base, ["h.0.mlp.down"], recompute=True))
        )
        whole = 2 * 16 * 128 * 4 * 256
        assert after == before - whole + whole // 2

    def test_a_layer_is_not_made_again_before_backward_comes_to_it(self) -> None:
        graph = layers(3)
        again = recomputed_operators(graph, "full")
        choices = changed(replicated(graph, (1,)), again, recompute=True)
        timeline = simulate_plan(plan_of(graph, choices), graph, COSTS).timeline
        start = dict(zip(timeline.names, timeline.start.tolist(), strict=True))
        end = dict(zip(timeline.names, timeline.end.tolist(), strict=True))
        assert start["h.0.ln_1 recompute"] >= end["h.1.ln_1 backward"]
        assert start["h.1.mlp.down backward"] >= end["h.1.mlp.act recompute"]


class TestRegather:
    """Sequence parallelism that keeps a shard of what it gathers."""

    def plans(self, graph: OperatorGraph) -> tuple[Plan, Plan]:
        kept, again = (
            plan_of(
                graph,
                tensor_parallel(graph, (4,), 0, sequence_parallel=True, regather=each),
                4,
            )
            for each in (False, True)
        )
        return kept, again

    def test_what_was_gathered_is_gathered_again_and_takes_as_long(self) -> None:
        graph = layers(2)
        before, after = (simulate_plan(p, graph, COSTS).timeline for p in self.plans(graph))
        spans = {n: e - s for n, s, e in zip(after.names, after.start, after.end, strict=True)}
        repeated = {name for name in after.names if name.endswith(" again")}
        first = {"ln_1 → {}.attn.qkv", "ln_2 → {}.mlp.up"}
        wanted = {f"h.{i}.{name.format(f'h.{i}')} again" for i in range(2) for name in first}
        assert repeated == {*wanted, "ln_f → lm_head again"}
        for name in repeated:
            assert spans[name] == spans[name.removesuffix(" again")]
        assert set(after.names) - repeated == set(before.names)

    def test_it_runs_beside_the_operator_before(self) -> None:
        graph = layers(2)
        timeline = simulate_plan(self.plans(graph)[1], graph, COSTS).timeline
        start = dict(zip(timeline.names, timeline.start, strict=True))
        end = dict(zip(timeline.names, timeline.end, strict=True))
        again = "h.1.ln_2 → h.1.mlp.up again"
        assert start[again] >= end["h.1.mlp.down backward"]
        assert start[again] < end["h.1.mlp.act backward"]
        assert end[again] <= start["h.1.mlp.up backward"]

    def test_it_is_saved(self, tmp_path: Path) -> None:
        plan = self.plans(layers(2))[1]
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


class TestPieces:
    @pytest.mark.parametrize("chunks", [2, 4, 8])
    @pytest.mark.parametrize("bandwidth", [3.0, 300.0])
    def test_the_pipeline_of_pieces_has_its_closed_form(
        self, chunks: int, bandwidth: float
    ) -> None:
        """n pieces of c computing and g communicating: max(n·c + g, c + n·g)."""
        link = replace(CLUSTER.intra_node, bandwidth_gb_s=bandwidth)
        cluster = replace(CLUSTER, intra_node=link)
        graph = layers(2)
        base = tensor_parallel(graph, (8,), 0)
        choices = changed(base, ["h.0.mlp.down"], chunks=chunks)
        plan = plan_of(graph, choices, 8, cluster=cluster)
        stage = only_stage(plan, graph)
        timeline = simulate_plan(plan, graph, COSTS).timeline
        index = graph.index["h.0.mlp.down"]
        row = stage.table.row(index)
        k = next(k for k, e in enumerate(stage.table.edges) if e.producer == index)
        piece = stage.table.edge_rows[stage.table.edge_row_of[k]]
        c, g = int(row.forward.ns[0]), int(piece.forward.ns[0, 0])
        begins = min(
            s
            for n, s in zip(timeline.names, timeline.start, strict=True)
            if n == "h.0.mlp.down forward"
        )
        ends = max(
            e
            for n, e in zip(timeline.names, timeline.end, strict=True)
            if n.startswith("h.0.mlp.down → ")
        )
        assert ends - begins == max(chunks * c + g, c + chunks * g)

    def test_a_reader_in_pieces_starts_with_the_first(self) -> None:
        """A gather before a product in pieces: max(n·g + c, g + n·c)."""
        graph = layers(2)
        base = tensor_parallel(graph, (8,), 0, sequence_parallel=True)
        plan = plan_of(graph, changed(base, ["h.0.mlp.up"], chunks=4), 8)
        stage = only_stage(plan, graph)
        index = graph.index["h.0.mlp.up"]
        row = stage.table.row(index)
        k = next(k for k, e in enumerate(stage.table.edges) if e.consumer == index)
        piece = stage.table.edge_rows[stage.table.edge_row_of[k]]
        assert int(piece.read_forward[0, 0]) == 4
        c, g = int(row.forward.ns[0]), int(piece.forward.ns[0, 0])
        timeline = simulate_plan(plan, graph, COSTS).timeline
        begins = min(
            s
            for n, s in zip(timeline.names, timeline.start, strict=True)
            if n.endswith("→ h.0.mlp.up")
        )
        ends = max(
            e
            for n, e in zip(timeline.names, timeline.end, strict=True)
            if n.startswith("h.0.mlp.up forward")
        )
        assert ends - begins == max(4 * g + c, g + 4 * c)

    def test_one_piece_is_the_whole(self) -> None:
        graph = layers(2)
        base = tensor_parallel(graph, (4,), 0)
        again = {name: replace(choice, chunks=1) for name, choice in base.items()}
        steps = [
            simulate_plan(plan_of(graph, c, 4), graph, COSTS).step_time for c in (base, again)
        ]
        assert steps[0] == steps[1]

    @pytest.mark.parametrize(
        ("name", "chunks", "message"),
        [
            ("h.0.attn.attention", 2, "cannot run in 2 pieces: only matrix products"),
            ("h.0.mlp.up", 7, r"multiple of 7 \(local sizes: sample 16"),
        ],
    )
    def test_impossible_pieces_are_refused(self, name: str, chunks: int, message: str) -> None:
        graph = layers(2)
        plan = plan_of(graph, changed(replicated(graph, (1,)), [name], chunks=chunks))
        with pytest.raises(ValueError, match=message):
            simulate_plan(plan, graph, COSTS)

    def test_no_pieces_at_all(self) -> None:
        with pytest.raises(ValueError, match="0 chunks; there must be at least 1"):
            Choice((), chunks=0)


class TestFusion:
    def test_an_update_hides_in_the_gradient_sync(self) -> None:
        graph = mlp([256, 256, 256], batch=64)
        base = data_parallel(graph, (8,))
        weighted = [op.name for op in graph.operators if op.weights]
        plain = only_stage(plan_of(graph, base, 8), graph).table
        fused = only_stage(plan_of(graph, changed(base, weighted, fused=True), 8), graph).table
        for name in weighted:
            before, after = plain.row(graph.index[name]), fused.row(graph.index[name])
            assert int(after.sync.ns[0]) == max(int(before.sync.ns[0]), int(before.update.ns[0]))
            assert int(after.update.ns[0]) == 0

    def test_an_elementwise_operator_hides_in_the_collective_that_feeds_it(self) -> None:
        graph = layers(2)
        base = tensor_parallel(graph, (8,), 0)
        names = ["h.0.add"]
        plain = only_stage(plan_of(graph, base, 8), graph).table
        fused = only_stage(plan_of(graph, changed(base, names, fused=True), 8), graph).table
        index = graph.index["h.0.add"]
        k = next(k for k, e in enumerate(plain.edges) if e.consumer == index and e.slot == 0)
        moved = int(plain.edge_rows[plain.edge_row_of[k]].forward.ns[0, 0])
        own = int(plain.row(index).forward.ns[0])
        assert int(fused.row(index).forward.ns[0]) == 0
        assert int(fused.edge_rows[fused.edge_row_of[k]].forward.ns[0, 0]) == max(moved, own)

    def test_what_cannot_be_fused_is_refused(self) -> None:
        graph = layers(2)
        choices = changed(replicated(graph, (1,)), ["h.0.attn.attention"], fused=True)
        with pytest.raises(ValueError, match="cannot be fused with a collective"):
            simulate_plan(plan_of(graph, choices), graph, COSTS)


def ends_of(timeline: Timeline, what: str) -> dict[str, tuple[int, int]]:
    """Start and end in ns of what operators do, by operator, in turn."""
    return {
        name.removesuffix(f" {what}"): (int(start), int(end))
        for name, start, end in zip(timeline.names, timeline.start, timeline.end, strict=True)
        if name.endswith(f" {what}")
    }


def first_ends(plan: Plan, graph: OperatorGraph, what: str) -> dict[str, tuple[int, int]]:
    """The same of the first time that each does it in a step."""
    timeline = simulate_plan(plan, graph, COSTS).timeline
    found: dict[str, tuple[int, int]] = {}
    for name, start, end in zip(timeline.names, timeline.start, timeline.end, strict=True):
        if name.endswith(f" {what}"):
            span = found.setdefault(name.removesuffix(f" {what}"), (int(start), int(end)))
            if start < span[0]:
                found[name.removesuffix(f" {what}")] = int(start), int(end)
    return found


class TestBuckets:
    def test_equal_gradients_in_a_bucket_pay_one_latency(self) -> None:
        widths = [64] * 9
        graph = mlp(widths, batch=64)
        choices = data_parallel(graph, (8,))
        total = {}
        for nbytes in (0, 10**9):
            timeline = simulate_plan(
                plan_of(graph, choices, 8, bucket_bytes=nbytes), graph, COSTS
            ).timeline
            total[nbytes] = sum(
                int(e - s)
                for n, s, e in zip(timeline.names, timeline.start, timeline.end, strict=True)
                if n.endswith(" sync")
            )
        stage = only_stage(plan_of(graph, choices, 8), graph)
        paths = [
            path
            for i in stage.table.operators
            for path in stage.table.row(i).sync_latency[0].values()
        ]
        messages = sum(count for count, _ in paths)
        latency = round(paths[0][1] * 1e9)
        assert total[0] - total[10**9] == pytest.approx((messages - 1) * latency, abs=messages)

    def test_a_bucket_waits_for_its_last_gradient(self) -> None:
        graph = mlp([64] * 9, batch=64)
        plan = plan_of(graph, data_parallel(graph, (8,)), 8, bucket_bytes=10**9)
        timeline = simulate_plan(plan, graph, COSTS).timeline
        rows = list(zip(timeline.names, timeline.kinds, timeline.start, timeline.end, strict=True))
        last = max(end for _, kind, _, end in rows if kind is TaskKind.BACKWARD)
        assert min(start for name, _, start, _ in rows if name.endswith(" sync")) >= last

    @pytest.mark.parametrize("zero", [1, 2])
    @pytest.mark.parametrize(("nbytes", "num_buckets"), [(10**9, 1), (4 * (64 * 64 + 64), 4)])
    def test_a_bucket_is_published_at_one_latency_behind_its_last_update(
        self, zero: int, nbytes: int, num_buckets: int
    ) -> None:
        """Eight layers publish their weights and biases in buckets of two layers, or as one."""
        graph = mlp([64] * 9, batch=64)
        choices = data_parallel(graph, (8,), zero=zero)
        alone, together = (
            simulate_plan(plan_of(graph, choices, 8, bucket_bytes=least), graph, COSTS).timeline
            for least in (0, nbytes)
        )
        row = only_stage(plan_of(graph, choices, 8), graph).table.row(graph.index["layers.0"])
        ((count, latency),) = row.publish_latency[0].values()
        spared = (8 * count - num_buckets) * round(latency * 1e9)
        both = [ends_of(timeline, "publish") for timeline in (alone, together)]
        totals = [sum(end - start for start, end in ends.values()) for ends in both]
        assert totals[0] - totals[1] == pytest.approx(spared, abs=8 * count)
        updated = ends_of(together, "update")
        names = list(updated)
        size = len(names) // num_buckets
        for first in range(0, len(names), size):
            bucket = names[first : first + size]
            last = max(updated[name][1] for name in bucket)
            assert min(both[1][name][0] for name in bucket) >= last
            if first + size < len(names):
                assert last < min(updated[name][1] for name in names[first + size :])

    def test_who_is_gathered_before_each_pass_spares_nobody_who_is_published(self) -> None:
        """Beside a layer under ZeRO 3, one under ZeRO 2 pays the latency of its own gather."""
        graph = mlp([64] * 3, batch=64)
        first, last = (op.name for op in graph.operators if op.weights)
        base = data_parallel(graph, (8,), zero=2)
        mixed = changed(base, [last], zero=3)
        plans = [plan_of(graph, c, 8, bucket_bytes=10**9) for c in (base, mixed)]
        took = []
        for plan in plans:
            start, end = ends_of(simulate_plan(plan, graph, COSTS).timeline, "publish")[first]
            took.append(end - start)
        row = only_stage(plans[0], graph).table.row(graph.index[first])
        ((_, latency),) = row.publish_latency[0].values()
        assert took[1] - took[0] == pytest.approx(latency * 1e9, abs=2)

    def test_layers_are_gathered_at_one_latency_two_at_a_time(self) -> None:
        """Under ZeRO 3, in the forward pass, by hand: layers are segments of the model."""
        graph = layers(4)
        choices = data_parallel(graph, (8,), zero=3)
        alone, together = (plan_of(graph, choices, 8, bucket_bytes=n) for n in (0, 10**9))
        table = only_stage(alone, graph).table
        weighted = [i for i in table.operators if table.row(i).gather.ns[0]]
        units = [
            [i for i in weighted if graph.segments[i] == segment]
            for segment in dict.fromkeys(graph.segments[i] for i in weighted)
        ]
        # Both tables, the layers and the last norm; the head's matrix is that of a table.
        assert [len(unit) for unit in units] == [1, 1, 6, 6, 6, 6, 1]
        spared = [
            sum(count for i in unit for count, _ in table.row(i).gather_latency[0].values()) - 1
            for unit in units
        ]
        ((_, latency),) = table.row(weighted[0]).gather_latency[0].values()
        gathers = [first_ends(plan, graph, "gather") for plan in (alone, together)]
        passes = first_ends(together, graph, "forward")
        names = [[graph.names[i] for i in unit] for unit in units]
        for unit, number in zip(names, spared, strict=True):
            took = [sum(ends[n][1] - ends[n][0] for n in unit) for ends in gathers]
            assert took[0] - took[1] == pytest.approx(number * latency * 1e9, abs=2 * len(unit))
            assert max(gathers[1][n][1] for n in unit) <= min(passes[n][0] for n in unit)
        for before, unit in zip(names, names[2:], strict=False):
            assert min(gathers[1][n][0] for n in unit) >= max(passes[n][1] for n in before)
        memory = [simulate_plan(p, graph, COSTS).memory[0] for p in (alone, together)]
        assert memory[1].peak > memory[0].peak

    def test_a_negative_size_is_refused(self) -> None:
        graph = mlp([8, 8], batch=8)
        with pytest.raises(ValueError, match="bucket_bytes is -1; it must be 0 or more"):
            plan_of(graph, replicated(graph, (1,)), bucket_bytes=-1)


def one_device(graph: OperatorGraph) -> Choices:
    return replicated(graph, (1,))


def tensor_ways(graph: OperatorGraph) -> Choices:
    return tensor_parallel(graph, (4,), 0)


@pytest.mark.parametrize(("ways", "strategy"), [(1, one_device), (4, tensor_ways)])
def test_a_split_backward_is_the_whole_in_two(
    ways: int, strategy: Callable[[OperatorGraph], Choices]
) -> None:
    graph = layers(2)
    stage = only_stage(plan_of(graph, strategy(graph), ways), graph)
    blocks = stage_blocks(stage.table, split=True)
    assert blocks.input_backward is not None
    assert blocks.weight_backward is not None
    none = np.zeros(len(graph.operators), dtype=np.int64)

    def computing(block: object) -> int:
        tasks = blocks.task_graph(block, none, last=False)  # type: ignore[arg-type]
        kinds = block.kinds  # type: ignore[attr-defined]
        return sum(
            int(ns)
            for ns, kind in zip(tasks.durations, kinds, strict=True)
            if kind is TaskKind.BACKWARD
        )

    parts = computing(blocks.input_backward) + computing(blocks.weight_backward)
    assert parts == pytest.approx(computing(blocks.backward), abs=2 * len(graph.operators))
    rows = [(graph.operators[i].kind, stage.table.row(i)) for i in stage.table.operators]
    halves = sum(int(row.backward.ns[0]) for kind, row in rows if kind == "linear") // 2
    whole = sum(int(row.backward.ns[0]) for kind, row in rows if kind == "embedding")
    assert computing(blocks.weight_backward) == pytest.approx(halves + whole, abs=len(rows))


class TestContention:
    def test_computing_beside_a_collective_lasts_longer_by_the_constant_at_most(self) -> None:
        graph = layers(4, hidden=512)
        steps = {}
        for slowdown in (0.0, 0.13):
            cluster = replace(CLUSTER, compute_slowdown=slowdown)
            plan = plan_of(graph, data_parallel(graph, (8,)), 8, cluster=cluster)
            steps[slowdown] = simulate_plan(plan, graph, COSTS).step_time
        assert steps[0.0] < steps[0.13] <= 1.13 * steps[0.0]

    def test_nothing_is_slowed_down_where_nothing_overlaps(self) -> None:
        graph = layers(2)
        cluster = replace(CLUSTER, compute_slowdown=0.5)
        plans = [plan_of(graph, replicated(graph, (1,)), cluster=c) for c in (CLUSTER, cluster)]
        alone, beside = (simulate_plan(plan, graph, COSTS).step_time for plan in plans)
        assert alone == beside


def test_computation_moves_between_the_halves_of_an_all_reduce() -> None:
    """CoCoNet's split is a choice of configs: reduce-scatter, a sharded operator, all-gather."""
    graph = layers(1, hidden=2048, sequence=1024)
    base = tensor_parallel(graph, (8,), 0)
    moved = dict(base)
    moved["h.0.add_1"] = replace(base["h.0.add_1"], config=(Shard("sequence"),))
    whole, split = (only_stage(plan_of(graph, c, 8), graph) for c in (base, moved))

    def conversion(stage: StageModel, producer: str, consumer: str) -> int:
        ends = graph.index[producer], graph.index[consumer]
        found = [
            int(stage.table.edge_rows[row].forward.ns[0, 0])
            for edge, row in zip(stage.table.edges, stage.table.edge_row_of, strict=True)
            if (edge.producer, edge.consumer) == ends
        ]
        return max(found)

    def forward(stage: StageModel, name: str) -> int:
        return int(stage.table.row(graph.index[name]).forward.ns[0])

    all_reduce = conversion(whole, "h.0.mlp.down", "h.0.add_1")
    assert conversion(whole, "h.0.add_1", "ln_f") == 0
    halves = (
        conversion(split, "h.0.mlp.down", "h.0.add_1"),
        conversion(split, "h.0.add_1", "ln_f"),
    )
    assert sum(halves) == pytest.approx(all_reduce, abs=2)
    assert forward(split, "h.0.add_1") < forward(whole, "h.0.add_1")
    assert block_times(split)[FORWARD].makespan < block_times(whole)[FORWARD].makespan
