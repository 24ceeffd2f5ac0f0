"""Timelines: their columns, statistics, drawings and trace files."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.engine.critical_path import Wait
from stratagem.simulator.timeline.chrome_trace import trace_events, write_trace
from stratagem.simulator.timeline.step_critical_path import StepPath, StepTask
from stratagem.simulator.timeline.timeline import (
    Row,
    Timeline,
    from_rows,
    lane_group,
    lane_name,
    merge,
    shift,
    statistics,
)

COMPUTE, LINK = lane_name("stage 0", "compute"), lane_name("stage 0", "link")
OTHER = lane_name("stage 1", "compute")


def small(label: str = "predicted") -> Timeline:
    """One microbatch and a message between two stages, a column a ms.

    stage 0 · compute   FFFF....BBBB..
    stage 0 · link      ...CCC..SSSSSS
    stage 1 · compute   ...CCC........
    """
    ms = 10**6
    rows = [
        Row("0F0", TaskKind.FORWARD, COMPUTE, 0, 4 * ms),
        Row("send", TaskKind.COMMUNICATION, LINK, 3 * ms, 6 * ms),
        Row("send", TaskKind.COMMUNICATION, OTHER, 3 * ms, 6 * ms),
        Row("0B0", TaskKind.BACKWARD, COMPUTE, 8 * ms, 12 * ms),
        Row("sync", TaskKind.GRADIENT_SYNC, LINK, 8 * ms, 14 * ms),
    ]
    return from_rows(rows, label=label)


def random_timeline(num_rows: int, seed: int = 0) -> Timeline:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 10**8, num_rows)
    kinds = list(TaskKind)
    lanes = tuple(lane_name(f"stage {s}", what) for s in range(4) for what in ("compute", "link"))
    return Timeline(
        label="random",
        lanes=lanes,
        names=tuple(f"task {number}" for number in range(num_rows)),
        kinds=tuple(kinds[k] for k in rng.integers(0, len(kinds), num_rows)),
        lane=rng.integers(0, len(lanes), num_rows),
        start=start,
        end=start + rng.integers(0, 10**6, num_rows),
    )


class TestColumns:
    """Making timelines, moving and joining them."""

    def test_lanes_are_in_the_order_of_rows(self):
        assert small().lanes == (COMPUTE, LINK, OTHER)
        assert small().lane.tolist() == [0, 1, 2, 0, 1]

    def test_lanes_that_are_given_come_first(self):
        timeline = from_rows([Row("a", TaskKind.OTHER, "b", 0, 1)], label="", lanes=["c", "d"])
        assert timeline.lanes == ("c", "d", "b")

    def test_duration_is_from_first_start_to_last_end(self):
        assert small().duration == pytest.approx(0.014)
        assert shift(small(), 10**18).duration == pytest.approx(0.014)

    def test_shift_is_exact(self):
        moved = shift(small(), 10**18 + 1)
        assert moved.begin_ns == 10**18 + 1
        assert shift(moved, -moved.begin_ns).to_dict() == small().to_dict()

    def test_merge_joins_lanes_of_one_name(self):
        other = from_rows([Row("1F0", TaskKind.FORWARD, OTHER, 6, 7)], label="rank 1")
        both = merge([small(), other], label="all")
        assert both.lanes == (COMPUTE, LINK, OTHER)
        assert both.names[-2:] == ("sync", "1F0")
        assert both.lane.tolist() == [0, 1, 2, 0, 1, 2]
        assert both.end[-1] == 7
        assert merge([], label="none").num_rows == 0

    @pytest.mark.parametrize("timeline", [small(), random_timeline(500), from_rows([], label="")])
    def test_json_round_trip(self, timeline):
        columns = json.loads(json.dumps(timeline.to_dict()))
        assert Timeline.from_dict(columns).to_dict() == timeline.to_dict()

    def test_an_empty_timeline(self):
        empty = from_rows([], label="nothing")
        assert (empty.duration, empty.begin_ns, empty.num_rows) == (0.0, 0, 0)
        assert statistics(empty).busy == {}

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("kinds", (TaskKind.OTHER,), "5 names but 1 kinds"),
            ("lane", np.zeros(5), "column lane is float64"),
            ("start", np.zeros(4, np.int64), r"column start is int64 of shape \(4,\); 5 rows"),
            ("lanes", ("a", "b", "a"), "not all different"),
            ("lane", np.array([0, 1, 2, 3, 0]), "task '0B0' is on lane 3, but there are 3"),
            ("lane", np.array([0, -1, 2, 0, 0]), "task 'send' is on lane -1"),
            ("end", np.zeros(5, np.int64), "'send' starts at 3000000 ns but ends at 0 ns"),
        ],
    )
    def test_columns_that_do_not_fit(self, field, value, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(small(), **{field: value})

    def test_seconds_are_refused(self):
        with pytest.raises(ValueError, match="column start must be whole numbers"):
            from_rows([Row("a", TaskKind.OTHER, "b", 0.25, 0.5)], label="")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"extra": 1}, "mend extra"),
            ({"kinds": ["coffee"] * 5}, "coffee"),
            ({"end": [0.5] * 5}, "column end must be whole numbers"),
        ],
    )
    def test_broken_dictionaries(self, change, message):
        with pytest.raises(ValueError, match=message):
            Timeline.from_dict(small().to_dict() | change)


class TestStatistics:
    """Where the time went."""

    def test_small(self):
        result = statistics(small())
        assert result.duration == pytest.approx(0.014)
        assert result.busy == pytest.approx({COMPUTE: 0.008, LINK: 0.009, OTHER: 0.003})
        assert result.utilisation[COMPUTE] == pytest.approx(8 / 14)
        # 4 to 6 ms and 12 to 14 ms; stage 1 does nothing but communicate.
        assert result.exposed_communication == pytest.approx({"stage 0": 0.004, "stage 1": 0.003})
        assert result.by_kind == pytest.approx(
            {
                TaskKind.FORWARD: 0.004,
                TaskKind.BACKWARD: 0.004,
                TaskKind.RECOMPUTE: 0.0,
                TaskKind.UPDATE: 0.0,
                TaskKind.COMMUNICATION: 0.006,
                TaskKind.GRADIENT_SYNC: 0.006,
                TaskKind.OTHER: 0.0,
            }
        )

    def test_overlapping_tasks_are_busy_once(self):
        rows = [
            Row("", TaskKind.OTHER, "a", *time) for time in [(0, 10), (2, 3), (5, 12), (20, 21)]
        ]
        assert statistics(from_rows(rows, label="")).busy["a"] == pytest.approx(13e-9)

    @pytest.mark.parametrize("seed", range(5))
    def test_agrees_with_counting_nanoseconds(self, seed):
        rng = np.random.default_rng(seed)
        start = rng.integers(0, 100, 30)
        timeline = dataclasses.replace(
            random_timeline(30, seed), start=start, end=start + rng.integers(0, 10, 30)
        )
        lane_busy = np.zeros((8, 200), bool)
        computes, communicates = np.zeros((4, 200), bool), np.zeros((4, 200), bool)
        columns = zip(timeline.kinds, timeline.lane, timeline.start, timeline.end, strict=True)
        for kind, lane, first, last in columns:
            lane_busy[lane, first:last] = True
            group = communicates if kind.is_communication else computes
            group[lane // 2, first:last] = True
        result = statistics(timeline)
        assert list(result.busy.values()) == pytest.approx((lane_busy.sum(1) * 1e-9).tolist())
        exposed = (communicates & ~computes).sum(1) * 1e-9
        assert list(result.exposed_communication.values()) == pytest.approx(exposed.tolist())
        begin, end = int(timeline.start.min()), int(timeline.end.max())
        computing = computes.sum(1)
        assert list(result.computing.values()) == pytest.approx((computing * 1e-9).tolist())
        idle = (~computes & ~communicates)[:, begin:end].sum(1) * 1e-9
        assert list(result.idle.values()) == pytest.approx(idle.tolist())
        bubble = 1 - computing / (end - begin)
        assert list(result.bubble.values()) == pytest.approx(bubble.tolist())
        assert result.total_bubble == pytest.approx(bubble.mean())
        assert result.total_exposed_communication == pytest.approx(exposed.sum())


class TestWords:
    """What people read."""

    def test_lane_names(self):
        assert lane_name("stage 0", "compute") == "stage 0 · compute"
        assert lane_group("stage 0 · compute") == "stage 0"
        assert lane_group("gpu") == "gpu"

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0.0, "0 ns"),
            (900e-9, "900 ns"),
            (6.1e-3, "6.10 ms"),
            (12.34e-6, "12.3 µs"),
            (0.252, "252 ms"),
            (3.0, "3.00 s"),
            (4321.0, "4,321 s"),
        ],
    )
    def test_durations(self, seconds, text):
        assert format_duration(seconds) == text

    def test_repr(self):
        assert repr(small()) == "<Timeline 'predicted': 14.0 ms, 5 rows on 3 lanes>"

    def test_html_table(self):
        text = small("<b>")._repr_html_()
        assert "&lt;b&gt;: 14.0 ms" in text
        assert f"<td>{COMPUTE}</td><td>8.00 ms</td><td>57.1%</td>" in text

    def test_html_table_of_many_lanes_is_short(self):
        lanes = [f"rank {rank}" for rank in range(1000)]
        assert "and 984 more lanes" in from_rows([], label="", lanes=lanes)._repr_html_()


class TestTrace:
    """The file that Perfetto opens."""

    def test_small(self):
        events = trace_events(small())
        tasks = [event for event in events if event["ph"] == "X"]
        assert tasks[0] == {
            "ph": "X", "name": "0F0", "cat": "forward", "pid": 1, "tid": 1, "ts": 0.0, "dur": 4e3
        }  # fmt: skip
        names = [
            (event["pid"], event["tid"], event["args"]["name"])
            for event in events
            if event["name"] in ("process_name", "thread_name")
        ]
        assert names == [
            (1, 0, "predicted · stage 0"),
            (1, 1, "compute"),
            (1, 2, "link"),
            (2, 0, "predicted · stage 1"),
            (2, 1, "compute"),
        ]

    def test_predicted_and_measured_stand_side_by_side(self):
        events = trace_events(small(), shift(small("measured"), 10**18 + 7))
        processes = {
            event["pid"]: event["args"]["name"]
            for event in events
            if event["name"] == "process_name"
        }
        assert [processes[pid] for pid in sorted(processes)] == [
            "predicted · stage 0",
            "measured · stage 0",
            "predicted · stage 1",
            "measured · stage 1",
        ]
        times = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        assert times[: len(times) // 2] == times[len(times) // 2 :]

    def test_nanoseconds_survive(self):
        timeline = from_rows([Row("a", TaskKind.OTHER, "b", 0, 10**15 + 1)], label="long")
        (task,) = (event for event in trace_events(timeline) if event["ph"] == "X")
        assert round(json.loads(json.dumps(task))["dur"] * 1000) == 10**15 + 1

    def test_overlapping_tasks_get_tracks_of_their_own(self):
        rows = [Row(f"{t}", TaskKind.OTHER, "a", *t) for t in [(0, 10), (2, 3), (5, 12), (12, 21)]]
        tasks = [event for event in trace_events(from_rows(rows, label="")) if event["ph"] == "X"]
        threads = {task["name"]: task["tid"] for task in tasks}
        assert threads == {"(0, 10)": 1, "(2, 3)": 2, "(5, 12)": 2, "(12, 21)": 1}

    def test_files_are_the_same_byte_for_byte(self, tmp_path):
        for name in ("a.json.gz", "b.json.gz"):
            write_trace(tmp_path / name, random_timeline(300), small())
        first, second = ((tmp_path / name).read_bytes() for name in ("a.json.gz", "b.json.gz"))
        assert first == second
        trace = json.loads(gzip.decompress(first))
        assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 305
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz"]

    def test_nothing_to_write(self, tmp_path):
        with pytest.raises(ValueError, match="0 timelines"):
            write_trace(tmp_path / "a.json.gz")
        assert not list(tmp_path.iterdir())


class TestPlot:
    """Drawings, on a canvas that needs no screen."""

    @pytest.fixture(autouse=True)
    def canvas(self):
        import matplotlib as mpl

        mpl.use("agg")

    def test_names_lanes_legend_and_title(self, tmp_path):
        from stratagem.simulator.drawing.timeline_plot import plot_timelines

        slower = dataclasses.replace(small("measured"), end=small().end + 1_400_000)
        figure = plot_timelines([small(), slower], tmp_path / "two.png")
        first, second = figure.axes
        assert [text.get_text() for text in first.texts] == ["0F0", "send", "send", "0B0", "sync"]
        assert [label.get_text() for label in first.get_yticklabels()] == [COMPUTE, "link", OTHER]
        legend = first.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == [
            "forward", "backward", "communication", "gradient sync"
        ]  # fmt: skip
        assert first.get_title(loc="left") == "predicted: 14.0 ms"
        assert second.get_title(loc="left") == "measured: 15.4 ms  (+10.0%)"
        assert second.get_xlabel() == "time (ms)"
        assert first.get_xlim() == second.get_xlim()
        assert legend.get_window_extent().x0 > first.bbox.x1
        assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
        assert [path.name for path in tmp_path.iterdir()] == ["two.png"]

    def test_20_000_tasks_are_a_handful_of_artists(self, tmp_path):
        from stratagem.simulator.drawing.timeline_plot import plot_timelines

        figure = plot_timelines([random_timeline(20_000)], tmp_path / "many.png")
        (ax,) = figure.axes
        assert len(ax.collections) == 1 + 2 * len(TaskKind)
        assert len(ax.texts) < 200

    @pytest.mark.parametrize("seed", range(3))
    def test_what_is_drawn_covers_what_is_busy(self, seed):
        """Narrow tasks that touch are one bar, and none is lost or drawn longer than it is."""
        from stratagem.simulator.drawing.timeline_plot import plot_timelines

        rng = np.random.default_rng(seed)
        length, gap = rng.integers(1, 200, 3000), rng.integers(0, 3, 3000) * 50
        length[::100] *= 500  # some wide ones
        start = np.cumsum(length + gap) - length
        kinds = [TaskKind.FORWARD, TaskKind.BACKWARD]
        timeline = dataclasses.replace(
            random_timeline(3000),
            kinds=tuple(kinds[k] for k in rng.integers(0, 2, 3000)),
            start=start,
            end=start + length,
        )
        (ax,) = plot_timelines([timeline]).axes
        _, *bars = ax.collections
        unit = timeline.duration / (ax.get_xlim()[1] / 1.004) * 1e9
        drawn = [path.vertices for each in bars for path in each.get_paths()]
        assert len(drawn) < 3000
        widths = [np.ptp(corners[:, 0]) * unit for corners in drawn]
        assert sum(widths) == pytest.approx(length.sum())
        begins = sorted(corners[:, 0].min() * unit for corners in drawn)
        assert np.isin(np.rint(begins), start - start[0]).all()

    def test_the_critical_path_is_drawn_under_its_tasks(self):
        from stratagem.simulator.drawing.timeline_plot import plot_timelines

        path = StepPath(
            (
                StepTask("0F0", TaskKind.FORWARD, COMPUTE, 0, 3 * 10**6, Wait.NOTHING),
                StepTask("a", TaskKind.FORWARD, COMPUTE, 3 * 10**6, 4 * 10**6, Wait.RESOURCE),
                StepTask(
                    "send", TaskKind.COMMUNICATION, OTHER, 4 * 10**6, 6 * 10**6, Wait.RESOURCE
                ),
            )
        )
        (ax,) = plot_timelines([small()], critical_path=path).axes
        flat, upright = (c for c in ax.collections if type(c).__name__ == "LineCollection")
        assert [segment[:, 0].tolist() for segment in flat.get_segments()] == [
            pytest.approx([0, 4]),
            pytest.approx([4, 6]),
        ]
        (move,) = upright.get_segments()
        assert move[:, 0].tolist() == pytest.approx([4, 4])
        legend = [text.get_text() for text in ax.get_legend().get_texts()]
        assert legend[-1] == "critical path"
        elsewhere = from_rows([Row("a", TaskKind.OTHER, "rank 0", 0, 1)], label="measured")
        with pytest.raises(ValueError, match="runs on lane 'stage 0 · compute', which timeline"):
            plot_timelines([elsewhere], critical_path=path)

    def test_on_axes_of_the_user(self):
        from matplotlib.figure import Figure

        from stratagem.simulator.drawing.timeline_plot import plot_timeline

        figure = Figure(layout="constrained")
        assert plot_timeline(small(), figure.subplots()) is figure
        part = figure.subfigures(1, 2)[0]
        assert plot_timeline(small(), part.subplots()) is figure

    def test_a_figure_of_its_own_is_not_left_open(self):
        from matplotlib import pyplot as plt

        from stratagem.simulator.drawing.timeline_plot import plot_timeline

        plot_timeline(small())
        assert not plt.get_fignums()

    @pytest.mark.parametrize("num_lanes", [0, 1, 300])
    def test_any_number_of_lanes(self, num_lanes):
        from stratagem.simulator.drawing.timeline_plot import plot_timeline

        lanes = [lane_name(f"rank {lane}", "compute") for lane in range(num_lanes)]
        (ax,) = plot_timeline(from_rows([], label="idle", lanes=lanes)).axes
        labels = [label.get_window_extent() for label in ax.get_yticklabels()]
        assert all(a.y0 >= b.y1 for a, b in itertools.pairwise(labels))

    def test_nothing_to_draw(self):
        from stratagem.simulator.drawing.timeline_plot import plot_timelines

        with pytest.raises(ValueError, match="0 timelines"):
            plot_timelines([])

    def test_importing_it_does_not_import_matplotlib(self):
        code = "import sys, stratagem.simulator.drawing.timeline_plot;"
        code += "sys.exit('matplotlib' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
