"""A pipeline under every schedule, against simulated plans and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import replicated
from stratagem.simulator.base.tables import Table
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.schedule_comparison import compare_schedules
from stratagem.simulator.simulation.simulation import simulate_plan

NAMES = {
    *("gpipe", "1f1b", "zb-h1", "chimera", "dualpipe"),
    *("pipedream", "pipedream-vertical", "ampnet"),
}
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
COSTS = RooflineCosts()


def model() -> OperatorGraph:
    return gpt(num_layers=8, hidden=512, num_heads=8, vocabulary=1024, sequence=128, batch=64)


def pipeline(graph: OperatorGraph, num_stages: int = 4, parts: int = 8) -> Plan:
    choices = replicated(graph.microbatch(parts), (1,))
    return Plan(
        name="pipeline",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(),
        stages=tuple(
            Stage(names, DeviceMesh((MeshAxis("a", 1),), (s,)), {n: choices[n] for n in names})
            for s, names in enumerate(balanced_stages(graph, CLUSTER, num_stages))
        ),
        num_microbatches=parts,
    )


def by_name(table: Table) -> dict[str, dict[str, object]]:
    return {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_schedules_that_plans_have_are_as_simulated() -> None:
    """They were played with one time for transfers both ways, so steps differed by a percent."""
    graph = model()
    plan = pipeline(graph)
    found = by_name(compare_schedules(plan, graph, COSTS))
    for name in ("gpipe", "1f1b", "zb-h1", "chimera"):
        simulated = simulate_plan(replace(plan, schedule=name), graph, COSTS)
        assert found[name]["step"] == pytest.approx(simulated.step_time, rel=1e-12)
        assert found[name]["memory"] == simulated.peak_memory


def test_the_order_that_the_papers_promise() -> None:
    graph = model()
    found = by_name(compare_schedules(pipeline(graph), graph, COSTS))
    assert set(found) == NAMES
    assert found["pipedream-vertical"]["versions"] == 4
    assert found["zb-h1"]["step"] < found["1f1b"]["step"]
    assert found["pipedream"]["step"] < found["1f1b"]["step"]
    assert found["1f1b"]["memory"] < found["gpipe"]["memory"]
    # Chimera keeps two copies of the weights, PipeDream as many versions as stages.
    assert found["chimera"]["memory"] > found["1f1b"]["memory"]
    assert found["dualpipe"]["step"] < min(found["chimera"]["step"], found["zb-h1"]["step"])
    assert (found["pipedream"]["versions"], found["pipedream"]["staleness"]) == (4, 3)
    assert found["1f1b"]["versions"] == 1


def test_an_odd_pipeline_has_no_chimera() -> None:
    graph = model()
    assert "chimera" not in by_name(compare_schedules(pipeline(graph, 3), graph, COSTS))
    assert "chimera" not in by_name(compare_schedules(pipeline(graph, 2, 1), graph, COSTS))


def test_what_is_no_pipeline_is_refused() -> None:
    graph = model()
    with pytest.raises(ValueError, match="1 stages on 1 sets of devices: schedules are compared"):
        compare_schedules(pipeline(graph, 1), graph, COSTS)


class TestTokenSlices:
    def test_slices_shorten_a_pipeline_of_few_microbatches(self) -> None:
        """TeraPipe's promise: one long sequence fills the pipeline as many microbatches would."""
        graph = gpt(
            num_layers=8, hidden=2048, num_heads=16, vocabulary=1024, sequence=2048, batch=2
        )
        plan = pipeline(graph, num_stages=4, parts=2)
        found = by_name(compare_schedules(plan, graph, COSTS, token_slices=4))
        assert found["terapipe, 4 slices"]["step"] < 0.75 * found["gpipe"]["step"]
        assert found["terapipe, 4 slices"]["held"] == 8
        sliced = replace(plan, schedule="terapipe", token_slices=4)
        simulated = simulate_plan(sliced, graph, COSTS)
        step = found["terapipe, 4 slices"]["step"]
        assert step == pytest.approx(simulated.step_time, rel=1e-12)
