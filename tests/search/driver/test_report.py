"""The report of a search: what is on the page, and the page in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stratagem as sg
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.report import hardware_changes, page, page_content
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.drawing.pictures import picture_of
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.timeline.timeline import Row, from_rows
from tests.support.chromium import CHROMIUM, MISSING, Chromium, Page

SIZES = {"hidden": 64, "num_heads": 4, "vocabulary": 256, "sequence": 32, "batch": 32}
NASTY = "</script><script>document.title='taken over'</script><b>&amp;\u2028'\"{{data}}"


WISHES = Space(pipeline=2, microbatches=(8,), recompute=("none",))


@pytest.fixture(scope="module")
def pipelined() -> SearchResult:
    return sg.search(
        gpt(num_layers=2, **SIZES),
        sg.Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2),
        budget=Budget(50, gap=0.3),
        space=WISHES,
        baselines=(),
        progress=False,
    )


@pytest.fixture(scope="module")
def written(pipelined: SearchResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    sg.report(pipelined, path, budget=Budget(0, gap=0.9), progress=False)
    return path


def data_of(path: Path) -> dict:
    text = path.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


class TestContent:
    @pytest.mark.slow
    def test_the_timeline_is_whole(self, pipelined, written):
        """Every task of the simulation, at its time, on its lane, under its name."""
        shown, timeline = data_of(written)["timeline"], pipelined.simulation.timeline
        rows = [
            Row(
                shown["names"][name],
                TaskKind(shown["kinds"][kind]["name"]),
                f"{lane['group']} · {lane['label']}",
                start,
                start + length,
            )
            for lane in shown["lanes"]
            for start, length, name, kind in zip(
                *(lane[each] for each in ("start", "length", "name", "kind")), strict=True
            )
        ]
        truth = [
            Row(name, kind, timeline.lanes[lane], start, end)
            for name, kind, lane, start, end in zip(
                *(timeline.names, timeline.kinds, timeline.lane.tolist()),
                *(timeline.start.tolist(), timeline.end.tolist()),
                strict=True,
            )
        ]
        key = lambda row: (row.lane, row.start, row.end, row.name)  # noqa: E731
        assert sorted(rows, key=key) == sorted(truth, key=key)
        groups = [lane["group"] for lane in shown["lanes"]]
        assert groups == sorted(groups, key=groups.index)

    def test_the_critical_path_covers_the_step(self, pipelined, written):
        """By the tasks drawn, but in last backwards that send before they end."""
        shown = data_of(written)["timeline"]
        step = pipelined.simulation._step
        macro, times = step.model.macro, step.times
        early = [(times.start[task], times.end[task]) for task in macro.rests]
        assert sum(length for _, _, length in shown["path"]) == shown["end"]
        for lane, start, length in shown["path"]:
            columns = (shown["lanes"][lane][each] for each in ("start", "length"))
            lengths = dict(zip(*columns, strict=True))
            within = any(low <= start and start + length <= high for low, high in early)
            assert within or lengths[start] == length

    def test_memory_has_its_peak(self, pipelined, written):
        for shown, rank in zip(
            data_of(written)["memory"], pipelined.simulation.memory, strict=True
        ):
            totals = np.sum([layer["nbytes"] for layer in shown["layers"]], axis=0)
            assert totals.max() == shown["peak"] == rank.peak

    def test_every_operator_is_there(self, pipelined, written):
        shown = data_of(written)["operators"]["values"]
        graph, plan = pipelined.graph, pipelined.plan
        assert [row[0] for row in shown] == [o.name for o in graph.operators if not o.is_source]
        assert [row[2] for row in shown] == [plan.stage_of[row[0]] for row in shown]
        computing = pipelined.simulation.operators
        totals = dict(zip(computing.column("operator"), computing.column("total"), strict=True))
        for name, *_, seconds, _ in shown:
            assert seconds <= totals[name] * (1 + 1e-9)
        assert sum(row[-1] for row in shown) >= graph.num_parameters

    @pytest.mark.slow
    def test_markup_in_names_stays_text(self, pipelined, written, tmp_path):
        plan = replace(pipelined.plan, model=NASTY)
        result = replace(pipelined, plan=plan, simulation=replace(pipelined.simulation, plan=plan))
        table = hardware_changes.hardware_changes(
            replace(result), default_costs(), budget=Budget(0, gap=0.9), space=Space()
        )
        made = page_content.page_content(result, table, "1")
        text = page.render(made, picture=picture_of(plan), curve=result.curve)
        assert "<script>document.title" not in text
        assert "<b>" not in text
        (tmp_path / "nasty.html").write_text(text)
        assert data_of(tmp_path / "nasty.html")["title"] == f"{NASTY} on dgx-a100"

    def test_summary_does_not_boast(self, pipelined):
        """A strategy that the constraints rule out may be faster, and the page says so."""
        best = min(s.step_time for s in pipelined.baselines.values() if s.fits)
        words = page_content._summary(pipelined)
        assert ("more than" in words) == (pipelined.simulation.step_time > best * 1.0005)
        slow = replace(pipelined, baselines={"slow": pipelined.simulation})
        assert "as long as the best known strategy, slow" in page_content._summary(slow)

    def test_joined_tasks_fill_the_same_time(self):
        rows = [
            Row(f"t{i}", TaskKind.FORWARD, "s · compute", 10 * i, 10 * i + 10) for i in range(5)
        ]
        rows.append(Row("late", TaskKind.FORWARD, "s · compute", 60, 65))
        rows.append(Row("back", TaskKind.BACKWARD, "s · compute", 65, 70))
        joined = page_content.join_neighbours(from_rows(rows, label="predicted"))
        told = list(zip(joined.names, joined.start.tolist(), joined.end.tolist(), strict=True))
        assert told == [("5 tasks", 0, 50), ("late", 60, 65), ("back", 65, 70)]


class TestChanges:
    @pytest.mark.slow
    def test_faster_links_are_simulated(self, pipelined):
        table = hardware_changes.hardware_changes(
            pipelined, default_costs(), budget=Budget(0, gap=0.9)
        )
        told = dict(zip(table.column("what if"), table.column("step"), strict=True))
        cluster, plan = pipelined.plan.cluster, pipelined.plan
        link = cluster.inter_node
        faster = replace(
            link,
            bandwidth_gb_s=2 * link.bandwidth_gb_s,
            by_group_size=tuple(
                replace(g, bandwidth_gb_s=2 * g.bandwidth_gb_s) for g in link.by_group_size
            ),
        )
        moved = replace(plan, cluster=replace(cluster, inter_node=faster))
        expected = simulate_plan(moved, pipelined.graph, default_costs()).step_time
        assert told["links between nodes twice as fast"] == expected
        assert told["as it is"] == pipelined.simulation.step_time
        assert told["all links twice as fast"] <= told["links in a node twice as fast"]

    @pytest.mark.slow
    def test_one_node_more_is_searched(self, pipelined):
        table = hardware_changes.hardware_changes(
            pipelined, default_costs(), budget=Budget(20, gap=0.5), space=WISHES
        )
        what, step, change, how = table.rows[-1]
        assert what == "one node more (3 nodes, 6 devices)"
        assert step is not None
        assert change == pytest.approx(step / pipelined.simulation.step_time - 1)
        assert "a quick search there" in how

    def test_a_search_that_fails_says_why(self, pipelined):
        table = hardware_changes.hardware_changes(
            pipelined,
            default_costs(),
            budget=Budget(0, gap=0.9),
            space=Space(pipeline=5),
        )
        _, step, _, how = table.rows[-1]
        assert step is None
        assert "no plan meets the constraints" in how


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with Chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def shown(browser: Chromium, written: Path) -> Iterator[Page]:
    """The report in a browser; whatever a test does, nothing may go wrong or leave the page."""
    with browser.page() as tab:
        tab.resize(1280, 900)
        tab.open(written)
        yield tab
        assert tab.errors == []
        assert tab.requests == [written.as_uri()]


COUNT_BOXES = """(() => {
    const kind = CanvasRenderingContext2D.prototype, fill = kind.fillRect;
    let boxes = 0;
    kind.fillRect = function (...all) { boxes += 1; fill.apply(this, all); };
    drawTimeline();
    kind.fillRect = fill;
    return boxes;
})()"""
CANVAS = "document.querySelector('#timeline canvas')"


def corner(tab: Page) -> tuple[float, float]:
    """Where the timeline is."""
    tab.value(f"{CANVAS}.scrollIntoView({{block: 'center'}})")
    tab.settle()
    box = f"{CANVAS}.getBoundingClientRect()"
    return tab.value(f"{box}.left"), tab.value(f"{box}.top")


def colours(tab: Page) -> int:
    """How many different colours the timeline is drawn in."""
    count = (
        f"new Set(new Uint32Array({CANVAS}.getContext('2d')"
        f".getImageData(0, 0, {CANVAS}.width, {CANVAS}.height).data.buffer)).size"
    )
    return tab.value(count)


class TestInTheBrowser:
    def test_everything_is_drawn(self, shown, pipelined):
        assert shown.value("document.title") == "gpt on dgx-a100"
        assert shown.value("document.querySelectorAll('section table').length") == 4
        assert shown.value("document.querySelectorAll('.picture svg rect').length") > 2
        strategies = "document.querySelectorAll('#strategies tbody tr').length"
        assert shown.value(strategies) == len(pipelined.rows)
        assert "Stage 1:" in shown.value("document.body.innerText")
        assert colours(shown) > 4

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 360])
    def test_readable_everywhere(self, shown, scheme, width):
        """Nothing sticks out sideways, and words stand out from what they are written on."""
        shown.prefer(scheme)
        shown.resize(width, 800)
        assert shown.value("document.documentElement.scrollWidth") <= width
        ink, paper = (shown.value(f"colours.{name}") for name in ("ink", "paper"))
        assert contrast(ink, paper) > 7
        assert contrast(shown.value("colours.faint"), paper) > 4.5
        assert shown.value("getComputedStyle(document.body).backgroundColor") == rgb(paper)
        assert colours(shown) > 4

    def test_zooming(self, shown):
        x, y = corner(shown)
        middle = shown.value(f"timeAt({CANVAS}, 700)")
        shown.mouse("mouseWheel", x + 700, y + 30, deltaX=0, deltaY=-400, modifiers=2)
        shown.wait("view.to - view.from < 0.5 * timeline.end")
        assert shown.value(f"timeAt({CANVAS}, 700)") == pytest.approx(middle, rel=1e-6)
        before = shown.value("view.from")
        shown.mouse("mousePressed", x + 700, y + 30, button="left", buttons=1, clickCount=1)
        shown.mouse("mouseMoved", x + 600, y + 30, button="left", buttons=1)
        shown.mouse("mouseReleased", x + 600, y + 30, button="left", clickCount=1)
        assert shown.value("view.from") > before
        shown.value("byId('whole').click()")
        assert shown.value("[view.from, view.to]") == [0, shown.value("timeline.end")]
        shown.value("byId('closer').click()")
        assert shown.value("view.to - view.from") == pytest.approx(
            shown.value("timeline.end") / 2, rel=1e-9
        )

    def test_plain_wheel_scrolls_the_page(self, shown):
        x, y = corner(shown)
        shown.mouse("mouseWheel", x + 700, y + 30, deltaX=0, deltaY=-400)
        assert shown.value("view.to - view.from") == shown.value("timeline.end")

    def test_pointing_names_the_task(self, shown):
        x, y = corner(shown)
        lane = "timeline.lanes[0]"
        longest = f"{lane}.length.indexOf(Math.max(...{lane}.length))"
        begin, length = (shown.value(f"{lane}.{each}[{longest}]") for each in ("start", "length"))
        name = shown.value(f"timeline.names[{lane}.name[{longest}]]")
        at = shown.value(f"left() + ({begin} + {length} / 2) * pixels({CANVAS}) / timeline.end")
        shown.mouse("mouseMoved", x + at, y + shown.value("tops[0]") + 8)
        tip = shown.value("byId('tip').hidden ? '' : byId('tip').textContent")
        assert tip.splitlines()[0] == name
        assert shown.value(f"duration({length})") in tip

    def test_filtering_and_sorting_operators(self, shown, pipelined):
        rows = "document.querySelectorAll('#operators tbody tr')"
        names = f"[...{rows}].map(row => row.cells[0].textContent)"
        shown.value("byId('filter').value = 'attention'")
        shown.value("byId('filter').dispatchEvent(new Event('input'))")
        wanted = {o.name for o in pipelined.graph.operators if "attention" in (o.name, o.kind)}
        assert set(shown.value(names)) == wanted
        shown.value("byId('stage').value = '1'")
        shown.value("byId('stage').dispatchEvent(new Event('change'))")
        stage = pipelined.plan.stage_of
        assert set(shown.value(names)) == {name for name in wanted if stage[name] == 1}
        shown.value("byId('filter').value = ''")
        shown.value("byId('filter').dispatchEvent(new Event('input'))")
        shown.value("document.querySelectorAll('#operators th button')[6].click()")
        numbers = shown.value(
            f"[...{rows}].map(row => Number(row.cells[6].textContent.replaceAll(',', '')))"
        )
        assert numbers == sorted(numbers, reverse=True)
        assert numbers[0] > 0

    def test_memory_is_drawn_as_it_is(self, shown):
        """What is drawn holds the peak, and what the curve has at the end of every pixel."""
        curve = "data.memory[0]"
        points = shown.value(f"drawMemory(), pointsSeen({curve}, 100 / timeline.end)")
        times, totals = shown.value(f"{curve}.times"), shown.value(f"{curve}.totals")
        assert len(times) > 2 * len(points) > 100
        assert max(totals[point] for point in points) == max(totals)
        end = shown.value("timeline.end")
        for pixel in range(1, 100):
            before = np.searchsorted(times, end * pixel / 100) - 1
            drawn = max(point for point in points if times[point] <= times[before])
            assert totals[drawn] == totals[before]

    def test_memory_of_another_rank(self, shown):
        words = "byId('memory-words').textContent"
        shown.value("byId('rank').value = '1'")
        shown.value("byId('rank').dispatchEvent(new Event('change'))")
        shown.settle()
        assert "rank 1" in shown.value(words)

    @pytest.mark.slow
    def test_names_with_markup_stay_text(self, browser, pipelined, tmp_path):
        plan = replace(pipelined.plan, model=NASTY)
        result = replace(pipelined, plan=plan, simulation=replace(pipelined.simulation, plan=plan))
        sg.report(result, tmp_path / "nasty.html", budget=Budget(0, gap=0.9), progress=False)
        with browser.page() as tab:
            tab.open(tmp_path / "nasty.html")
            assert tab.value("byId('title').textContent").startswith("</script><script>")
            assert "taken over'" in tab.value("document.title")
            assert tab.errors == []

    def test_thousands_of_tasks_are_fluid(self, browser, tmp_path, pipelined):
        """A frame of 60,000 tasks draws at most a few boxes a pixel, so it costs no more."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(100, 3000, 30_000)
        ends = np.cumsum(lengths)
        kinds = (TaskKind.FORWARD, TaskKind.BACKWARD)
        rows = [
            Row(f"task {i}", kinds[i // 40 % 2], f"stage {s} · compute", int(e - n), int(e))
            for s in range(2)
            for i, (e, n) in enumerate(zip(ends, lengths, strict=True))
        ]
        timeline = from_rows(rows, label="predicted")
        nothing = replace(pipelined.simulation.critical_path, tasks=())
        shown = page_content.timeline_content(timeline, nothing)
        assert shown["joined"] == 0
        made = {**page_content.page_content(pipelined, pipelined.table, "1"), "timeline": shown}
        path = tmp_path / "large.html"
        path.write_text(page.render(made, picture="", curve=""))
        with browser.page() as tab:
            tab.resize(1280, 900)
            tab.open(path)
            assert tab.value(COUNT_BOXES) < 3 * 1280  # two lanes and the grid
            assert tab.errors == []


def channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(each)) for each in channels(colour))})"


def contrast(first: str, second: str) -> float:
    """Contrast ratio of WCAG 2.1, from 1 to 21."""

    def luminance(colour: str) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (each / 255 for each in channels(colour))
        ]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_a_report_makes_its_folder(tmp_path: Path) -> None:
    result = sg.search(
        mlp([64, 64], batch=32),
        sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2),
        budget=Budget(20, gap=0.3),
        baselines=(),
        progress=False,
    )
    sg.report(result, tmp_path / "new" / "report.html", budget=Budget(0, gap=0.9), progress=False)
    shown = data_of(tmp_path / "new" / "report.html")
    assert shown["title"] == "mlp on dgx-a100"
    assert shown["changes"]["values"][-1][0] == "one node more (2 nodes, 4 devices)"
