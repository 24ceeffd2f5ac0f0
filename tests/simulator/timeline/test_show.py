"""Pictures of plans, clusters, graphs and searches: what is in them, and that they are markup."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.searcher.driver.incumbent import TracePoint
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.drawing.convergence_curve import convergence_curve
from stratagem.simulator.drawing.pictures import picture_of
from stratagem.simulator.graph.models import gpt, mlp
from tests.support.chromium import CHROMIUM, MISSING, Chromium

SIZES = {"hidden": 64, "num_heads": 4, "sequence": 32, "batch": 32}
GRAPH = gpt(num_layers=4, **SIZES)
CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=2)
NASTY = "a <b> & \"c\" '<script>'"


def plan_of(**setup: Any) -> sg.Plan:
    return sg.TrainingSetup(**setup).plan(GRAPH, CLUSTER)


def picture(thing: Any) -> ET.Element:
    """The SVG that an object shows; raises where it is no well-formed markup."""
    return ET.fromstring(picture_of(thing))


def words(root: ET.Element) -> list[str]:
    return [each.text or "" for each in root.iter() if each.tag.endswith("text")]


def boxes(root: ET.Element) -> list[ET.Element]:
    return [each for each in root.iter() if each.tag.endswith("rect")]


@pytest.mark.filterwarnings("ignore:tensor is 8.*left whole")
class TestPlan:
    def test_every_device_is_there_with_its_stage(self):
        told = words(picture(plan_of(tensor=4, pipeline=2)))
        assert Counter(told)["s0"] == Counter(told)["s1"] == 8
        told = words(picture(plan_of(tensor=8)))
        assert {str(device) for device in range(16)} <= set(told)

    def test_chips_name_dims_and_copies(self):
        plan = plan_of(tensor=8)
        told = words(picture(plan))
        config = plan.choice("h.0.mlp.up").config
        assert {"data × 2", "tensor × 8"} <= set(told)
        for placement in config:
            assert str(getattr(placement, "dim", "copies")) in told

    def test_equal_stages_are_drawn_once(self):
        plan = sg.TrainingSetup(pipeline=4).plan(gpt(num_layers=8, **SIZES), CLUSTER)
        told = words(picture(plan))
        assert "Stages 1 to 2, each" in told
        assert {"Stage 0", "Stage 3"} <= set(told)

    def test_devices_that_are_not_used_are_hollow(self):
        plan = sg.TrainingSetup(tensor=4, pipeline=2).plan(
            GRAPH, sg.Cluster.preset("dgx-a100", num_nodes=1)
        )
        wide = replace(plan, cluster=CLUSTER)
        tips = [each.text for each in picture(wide).iter() if each.tag.endswith("title")]
        assert sum("not used" in (tip or "") for tip in tips) == 8

    def test_remarks_say_what_else_is_done(self):
        told = words(picture(plan_of(zero=1, recompute="full")))
        assert any("ZeRO-1" in each and "recomputed" in each for each in told)


class TestCluster:
    def test_nodes_devices_and_links(self):
        told = words(picture(CLUSTER))
        assert {str(device) for device in range(16)} <= set(told)
        assert any(each.startswith("node 1 · A100") for each in told)
        between = CLUSTER.inter_node
        assert any(f"{between.bandwidth_gb_s:g} GB/s a node" in each for each in told)

    def test_many_nodes_are_counted(self):
        root = picture(CLUSTER.resized(num_nodes=100))
        assert "and 97 more nodes" in words(root)
        assert len(boxes(root)) < 50

    def test_one_node_has_no_link_between_nodes(self):
        told = words(picture(CLUSTER.resized(num_nodes=1)))
        assert not any("between nodes" in each for each in told)


class TestGraph:
    def test_layers_are_folded(self):
        told = words(picture(GRAPH))
        (title,) = [each for each in told if "×" in each and "operators" in each]
        assert title.startswith("4 × 10 operators")
        layer = [o for o in GRAPH.operators if o.name.startswith("h.0.")]
        for operator in layer:
            assert operator.name.removeprefix("h.0.") in told

    def test_parameters_add_up(self):
        """Those of blocks, times how often they come, are those of the model, tied ones again."""
        told = words(picture(mlp([64] * 6, batch=8)))
        total = 0
        for title, size in pairwise(told[2:]):
            if size.endswith(("parameters", "parameters each")) and size[0].isdigit():
                times = int(title.split(" × ")[0]) if " × " in title else 1
                total += times * int(size.split()[0].replace(",", ""))
        assert total == mlp([64] * 6, batch=8).num_parameters


@pytest.fixture(scope="module")
def result() -> sg.SearchResult:
    return sg.search(
        mlp([64, 64, 64], batch=32),
        CLUSTER.resized(num_nodes=1, devices_per_node=2),
        budget=sg.Budget(50),
        progress=False,
    )


class TestSearch:
    def test_table_and_certificate(self, result):
        shown = result._repr_html_()
        assert "found plan" in shown
        assert result.certificate in shown
        ET.fromstring(f"<div>{shown.replace('<tr>', '<tr/>').replace('</tr>', '')}</div>")
        steps = result.table.column("step")
        assert steps[0] == result.simulation.step_time
        assert steps[1:] == sorted(steps[1:])

    def test_in_a_terminal(self, result):
        """Printed with all that they hold, they were megabytes of numbers."""
        shown = str(result)
        assert str(result.table) in shown
        assert result.certificate in shown
        step = f"{result.simulation.in_words}>"
        assert repr(result) == f"<SearchResult of 'mlp': {step}"
        assert repr(result.simulation) == f"<Simulation of {result.plan.name!r}: {step}"
        assert step.startswith(format_duration(result.simulation.step_time))
        assert repr(result.graph) == "<OperatorGraph 'mlp': 7 operators, 8,320 parameters>"
        assert "num_devices=2, num_microbatches=1" in repr(result.plan)

    def test_the_curve_never_rises(self, result):
        """Also where a second graph's search begins anew."""
        points = [TracePoint(n, "s", best) for n, best in ((5, 3.0), (9, 2.0), (4, 5.0), (8, 1.0))]
        known = replace(result, trace=tuple(points), bound=0.5, baselines={})
        (line, *_) = [e for e in ET.fromstring(known.curve).iter() if e.tag.endswith("polyline")]
        corners = [tuple(map(float, each.split(","))) for each in line.get("points").split()]
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(corners))
        assert "lower bound 500 ms" in words(ET.fromstring(known.curve))

    def test_nothing_is_drawn_of_nothing(self):
        assert convergence_curve([], None) == ""
        assert convergence_curve([(0, float("inf")), (5, 1.0)], 0.5) == ""


def test_names_are_text() -> None:
    plan = replace(plan_of(tensor=2), model=NASTY)
    for thing in (plan, replace(CLUSTER, name=NASTY), replace(GRAPH, name=NASTY)):
        assert any(NASTY in each for each in words(picture(thing)))


def test_nothing_is_imported_for_a_picture() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from stratagem.simulator.hardware.cluster import Cluster;"
        "from stratagem.simulator.drawing.pictures import picture_of;"
        "picture_of(Cluster.preset('dgx-a100'));"
        "print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with Chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize(
    "thing",
    [plan_of(tensor=4, pipeline=2, zero=1), CLUSTER, GRAPH],
    ids=["plan", "cluster", "graph"],
)
def test_words_stay_inside_the_picture(thing: Any, browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<meta charset=utf-8><body>{picture_of(thing)}")
    with browser.page() as tab:
        tab.resize(1400, 900)
        tab.open(tmp_path / "page.html")
        beyond = (
            "(() => { const edge = document.querySelector('svg').getBoundingClientRect();"
            "return [...document.querySelectorAll('text')].filter(text => {"
            "const box = text.getBoundingClientRect();"
            "return box.right > edge.right || box.bottom > edge.bottom || box.left < edge.left;"
            "}).map(text => text.textContent) })()"
        )
        assert tab.value(beyond) == []
        assert tab.errors == []
