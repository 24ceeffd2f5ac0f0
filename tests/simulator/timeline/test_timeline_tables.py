"""Tables and differences of timelines, held against counting nanoseconds one by one."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.timeline.step_difference import diff_timelines
from stratagem.simulator.timeline.time_attribution import (
    IDLE_AFTER,
    IDLE_BEFORE,
    IDLE_BETWEEN,
    attribute,
    collective_of,
    family,
)
from stratagem.simulator.timeline.timeline import (
    Row,
    Timeline,
    from_rows,
    lane_group,
    lane_name,
    shift,
    statistics,
)
from stratagem.simulator.timeline.timeline_tables import (
    collective_table,
    group_table,
    operator_table,
)

COMPUTE, LINK, OUT = (lane_name("stage 0", what) for what in ("compute", "link", "to stage 1"))
OTHER = lane_name("stage 1", "compute")
MS = 10**6


def step(label: str = "predicted", sync_end: int = 16) -> Timeline:
    """A step of two stages, a column a ms; the sync of stage 0 holds both of its links.

    stage 0 · compute      FFFFRR.BBBBu...
    stage 0 · link         ..GG......SSSSSS
    stage 0 · to stage 1   ....>>....SSSSSS
    stage 1 · compute      ......FF........
    """
    rows = [
        Row("h.0.fc forward", TaskKind.FORWARD, COMPUTE, 0, 4 * MS),
        Row("h.1.fc gather", TaskKind.GRADIENT_SYNC, LINK, 2 * MS, 4 * MS),
        Row("h.0.fc recompute", TaskKind.FORWARD, COMPUTE, 4 * MS, 6 * MS),
        Row("stage 0 ⇢ stage 1, microbatch 0", TaskKind.COMMUNICATION, OUT, 4 * MS, 7 * MS),
        Row("h.1.fc backward", TaskKind.BACKWARD, COMPUTE, 7 * MS, 11 * MS),
        Row("h.1.fc update", TaskKind.UPDATE, COMPUTE, 11 * MS, 12 * MS),
        Row("h.1.fc sync", TaskKind.GRADIENT_SYNC, LINK, 10 * MS, sync_end * MS),
        Row("h.1.fc sync", TaskKind.GRADIENT_SYNC, OUT, 10 * MS, sync_end * MS),
        Row("loss", TaskKind.OTHER, OTHER, 6 * MS, 8 * MS),
    ]
    return from_rows(rows, label=label)


def crowded_timeline(seed: int, num_rows: int = 40) -> Timeline:
    """Rows that overlap in every way on four groups of two lanes, some of length 0."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 100, num_rows)
    lanes = tuple(lane_name(f"stage {s}", what) for s in range(4) for what in ("compute", "link"))
    kinds = list(TaskKind)
    return Timeline(
        label=f"random {seed}",
        lanes=lanes,
        names=tuple(f"h.{n % 3}.op{n % 5} pass" for n in range(num_rows)),
        kinds=tuple(kinds[k] for k in rng.integers(0, len(kinds), num_rows)),
        lane=rng.integers(0, int(rng.integers(1, 9)), num_rows),
        start=start,
        end=start + rng.integers(0, 12, num_rows),
    )


def owners_one_by_one(timeline: Timeline) -> dict[str, list[int | None]]:
    """Per group the row that owns each ns, by the definition."""
    begin, end = int(timeline.start.min()), int(timeline.end.max())
    owners: dict[str, list[int | None]] = {}
    for group in dict.fromkeys(map(lane_group, timeline.lanes)):
        owners[group] = []
        for ns in range(begin, end):
            running = [
                (timeline.kinds[r].is_communication, int(timeline.start[r]), r)
                for r in range(timeline.num_rows)
                if lane_group(timeline.lanes[timeline.lane[r]]) == group
                and timeline.start[r] <= ns < timeline.end[r]
            ]
            owners[group].append(min(running)[2] if running else None)
    return owners


class TestAttribution:
    """Every nanosecond has one owner."""

    @pytest.mark.parametrize("seed", range(20))
    def test_agrees_with_asking_every_nanosecond(self, seed: int) -> None:
        timeline = shift(crowded_timeline(seed), 10**15)
        found, owners = attribute(timeline), owners_one_by_one(timeline)
        counts = Counter(row for line in owners.values() for row in line)
        assert found.owned.tolist() == [counts[row] for row in range(timeline.num_rows)]
        for group, line in owners.items():
            mine = [r for r, lane in enumerate(timeline.lane) if lane // 2 == int(group[-1])]
            begin = int(timeline.start.min())
            first = min((int(timeline.start[r]) for r in mine), default=begin + len(line))
            last = max((int(timeline.end[r]) for r in mine), default=begin + len(line))
            idle = [place + begin for place, owner in enumerate(line) if owner is None]
            assert found.idle[group] == (
                sum(ns < first for ns in idle),
                sum(first <= ns < last for ns in idle),
                sum(ns >= last for ns in idle),
            )

    @pytest.mark.parametrize("seed", range(20))
    def test_every_way_of_telling_sums_to_the_step(self, seed: int) -> None:
        timeline = crowded_timeline(seed)
        found = attribute(timeline)
        whole = (int(timeline.end.max()) - timeline.begin_ns) * found.num_groups
        for parts in (found.by_kind, found.by_operator, found.by_lane):
            assert sum(parts.values()) == whole

    @pytest.mark.parametrize("seed", range(5))
    def test_agrees_with_statistics(self, seed: int) -> None:
        timeline = crowded_timeline(seed)
        found, other = attribute(timeline), statistics(timeline)
        exposed = sum(ns for what, ns in found.by_kind.items() if what.startswith("exposed"))
        idle = sum(found.by_kind[what] for what in (IDLE_BEFORE, IDLE_BETWEEN, IDLE_AFTER))
        assert exposed * 1e-9 == pytest.approx(other.total_exposed_communication)
        assert idle * 1e-9 == pytest.approx(sum(other.idle.values()))

    def test_nothing_at_all(self) -> None:
        assert attribute(from_rows([], label="")).by_operator == {"idle": 0}

    def test_words(self) -> None:
        assert collective_of("stage 3 ⇢ stage 4, microbatch 17") == "stage 3 ⇢ stage 4"
        assert family("h.3.attn ← h.12.mlp.fc") == "h.*.attn ← h.*.mlp.fc"
        assert family("layer4.2.conv1 forward") == "layer4.*.conv1 forward"
        assert family("stage 0 ⇢ stage 1, microbatch 2") == "stage 0 ⇢ stage 1"


class TestTables:
    """Per group, per operator, per collective."""

    def test_groups(self) -> None:
        table = group_table(step())
        assert list(table.columns)[:4] == ["group", "computing", "exposed communication", "idle"]
        assert table.rows[0] == pytest.approx(("stage 0", 0.011, 0.005, 0.0, 5 / 16))
        assert table.rows[1] == pytest.approx(("stage 1", 0.002, 0.0, 0.014, 14 / 16))
        assert table.rows[2] == pytest.approx(("on average", 0.0065, 0.0025, 0.007, 19 / 32))

    def test_operators(self) -> None:
        table = operator_table(step())
        assert list(table.columns) == [
            "operator", "count", "forward", "recompute", "backward", "update", "other",
            "total", "share",
        ]  # fmt: skip
        assert table.rows[0] == pytest.approx(
            ("h.0.fc", 2, 0.004, 0.002, 0.0, 0.0, 0.0, 0.006, 6 / 13)
        )
        assert table.rows[1] == pytest.approx(
            ("h.1.fc", 2, 0.0, 0.0, 0.004, 0.001, 0.0, 0.005, 5 / 13)
        )
        together = operator_table(step(), by_layer=False)
        assert together.column("operator") == ["h.*.fc", "loss"]
        assert together.column("total") == pytest.approx([0.011, 0.002])

    def test_collectives(self) -> None:
        table = collective_table(step(), {"h.1.fc sync": 7, "h.1.fc gather": 3})
        assert table.rows[0] == pytest.approx(
            ("h.1.fc sync", "gradient sync", "link, to stage 1", 1, 7, 0.006, 0.004, 1 / 3)
        )
        assert table.rows[1][:5] == ("stage 0 ⇢ stage 1", "communication", "to stage 1", 1, None)
        assert table.rows[1][5:] == pytest.approx((0.003, 0.001, 2 / 3))
        assert table.rows[2][-1] == 1.0

    @pytest.mark.parametrize("seed", range(5))
    def test_exposed_parts_sum_to_the_exposed_communication(self, seed: int) -> None:
        timeline = crowded_timeline(seed)
        exposed = sum(collective_table(timeline).column("exposed"))
        assert exposed == pytest.approx(statistics(timeline).total_exposed_communication)

    def test_of_nothing(self) -> None:
        empty = from_rows([], label="nothing")
        for table in (group_table(empty), operator_table(empty), collective_table(empty)):
            assert table.rows == ()
            assert len(str(table).splitlines()) == 1

    def test_forms(self) -> None:
        units = {"<b>": Unit.TEXT, "n": Unit.COUNT, "more": Unit.CHANGE, "size": Unit.BYTES}
        rows = (("a", 1, -0.5, None), ("b", 1200, 0.25, 2048), ("c", 3, 0.0, 5 * 2**20))
        table = Table("title", units, rows)
        assert str(table) == (
            "<b>      n     more   size\n"
            "a        1  −500 ms      –\n"
            "b    1,200  +250 ms  2 KiB\n"
            "c        3   +0 ns  5 MiB"
        ).replace("+0 ns", " +0 ns")
        assert [row[0] for row in table.sorted_by("size").rows] == ["c", "b", "a"]
        assert [row[0] for row in table.sorted_by("size", descending=False).rows] == list("bca")
        assert table.head(1).title == "title (and 2 more rows)"
        assert table.head(3) is table
        assert list(csv.reader(table.to_csv().splitlines()))[1] == ["a", "1", "-0.5", ""]
        assert json.loads(json.dumps(table.to_dict()))["rows"][1]["size"] == 2048
        assert "<th>&lt;b&gt;</th>" in table._repr_html_()

    def test_mistakes(self) -> None:
        with pytest.raises(ValueError, match="2 values for 1 columns"):
            Table("t", {"a": Unit.TEXT}, (("x", "y"),))
        with pytest.raises(ValueError, match="no column 'b'; it has a"):
            Table("t", {"a": Unit.TEXT}, ()).sorted_by("b")


class TestDiff:
    """Where the milliseconds went."""

    @pytest.mark.parametrize("seed", range(10))
    def test_changes_sum_to_the_difference(self, seed: int) -> None:
        first, second = crowded_timeline(seed), crowded_timeline(seed + 100, num_rows=70)
        found = diff_timelines(first, second)
        for table in found.tables:
            assert sum(table.column(first.label)) == pytest.approx(first.duration, rel=1e-12)
            assert sum(table.column(second.label)) == pytest.approx(second.duration, rel=1e-12)
            difference = second.duration - first.duration
            assert sum(table.column("change")) == pytest.approx(difference, rel=1e-9)
            sizes = [abs(change) for change in table.column("change")]
            assert sizes == sorted(sizes, reverse=True)

    def test_a_slower_sync_is_found(self) -> None:
        found = diff_timelines(step(), step("measured", sync_end=20))
        # Of two groups, one syncs for 4 ms more and the other waits for 4 ms more.
        changes = [(row[0], row[3], row[4]) for row in found.by_operator.rows[:3]]
        assert changes[0] == ("h.*.fc sync", pytest.approx(0.002), pytest.approx(0.5))
        assert changes[1] == ("idle", pytest.approx(0.002), pytest.approx(0.5))
        assert changes[2][1] == 0
        assert found.headline == (
            "predicted takes 16.0 ms, measured 20.0 ms: 4.00 ms (25.0%) longer"
        )
        assert found.by_lane.rows[0][0] == "stage 0 · link"
        assert found.by_lane.rows[1][0] == "stage 1 · idle"

    def test_one_rank_against_many_that_do_the_same(self) -> None:
        """Folded and unfolded are alike: times are of a group on average."""
        rows = [Row("a forward", TaskKind.FORWARD, f"rank {r} · compute", 0, 9) for r in range(3)]
        one = [rows[0]._replace(lane="stage 0 · compute")]
        found = diff_timelines(from_rows(one, label="a"), from_rows(rows, label="b"))
        assert found.by_kind.rows == (("forward", 9e-9, 9e-9, 0.0, None),)

    def test_labels_that_are_alike_are_told_apart(self) -> None:
        found = diff_timelines(step(), step())
        assert found.labels == ("predicted (first)", "predicted (second)")
        assert "0 ns (0.0%) longer" in found.headline

    def test_forms(self) -> None:
        found = diff_timelines(step(), step("measured", sync_end=20))
        assert "where the time went, by operator" in str(found)
        assert "h.*.fc sync" in found._repr_html_()
        assert json.loads(json.dumps(found.to_dict()))["durations"] == pytest.approx([0.016, 0.02])
        assert "longer" in repr(found)


@pytest.fixture(scope="module")
def simulations() -> dict[str, Simulation]:
    graph = gpt(num_layers=4, hidden=256, num_heads=8, vocabulary=512, sequence=64, batch=256)
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    return baseline_plans(Situation(graph, cluster, Training("bfloat16"), RooflineCosts()))


class TestPlans:
    """The tools on simulated plans."""

    def test_tables_are_complete(self, simulations: dict[str, Simulation]) -> None:
        for simulation in simulations.values():
            timeline = simulation.timeline
            ends = statistics(timeline)
            computing = sum(
                (end - start) * 1e-9
                for kind, lane, start, end in zip(
                    timeline.kinds, timeline.lane, timeline.start, timeline.end, strict=True
                )
                if not kind.is_communication and timeline.lanes[lane].endswith("compute")
            )
            assert sum(simulation.operators.column("total")) == pytest.approx(computing)
            assert sum(simulation.collectives.column("exposed")) == pytest.approx(
                ends.total_exposed_communication
            )
            assert len(simulation.groups.rows) >= len(simulation.plan.stages)
            assert all(0 <= share < 1 for share in ends.bubble.values())

    def test_bytes_are_the_closed_forms(self, simulations: dict[str, Simulation]) -> None:
        """Two bytes an element; batch 256 of 64 tokens, hidden 256, two nodes of 8 devices."""
        data = simulations["data parallel"]
        matrix, bias = 2 * 4 * 256 * 256, 2 * 4 * 256
        # Reduce-scatter in the node, all-reduce between nodes, all-gather in the node; so small a
        # bias takes two all-reduces.
        hierarchical = matrix + matrix // 8 + matrix
        assert data.communication_bytes["h.0.mlp.up sync"] == hierarchical + 2 * bias
        count = len(data.collectives.rows)
        assert count == sum(value is not None for value in data.collectives.column("bytes"))
        zero = simulations["ZeRO-3"].communication_bytes
        # From sixteenths to eighths between nodes, and to the whole in the node.
        assert zero["h.0.mlp.up gather"] == (matrix + bias) // 8 + matrix + bias
        pipeline = simulations["1F1B pipeline"]
        stage, parts = pipeline.plan.stages[0], pipeline.plan.num_microbatches
        sent = 2 * (256 // parts // stage.mesh.num_devices) * 64 * 256
        moved = {row[0]: (row[3], row[4]) for row in pipeline.collectives.rows}
        assert moved["stage 0 ⇢ stage 1"] == (parts, parts * sent)
        assert moved["stage 1 ⇢ stage 0"] == (parts, parts * sent)

    def test_plans_differ_by_what_they_are(self, simulations: dict[str, Simulation]) -> None:
        data, pipeline = (
            replace(simulations[name].timeline, label=name)
            for name in ("data parallel", "1F1B pipeline")
        )
        found = diff_timelines(data, pipeline)
        kinds = dict(
            zip(found.by_kind.column("what"), found.by_kind.column("change"), strict=True)
        )
        assert kinds["idle before the first task"] > 0
        assert sum(kinds.values()) == pytest.approx(pipeline.duration - data.duration)
