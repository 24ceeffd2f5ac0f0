"""Known strategies: those of their plans that cannot be the best are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.searcher.methods import simple_strategies
from stratagem.searcher.methods.simple_strategies import pipeline_plans, simulate_family
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.graph.models import gpt, mlp, moe
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training

GRAPHS: dict[str, OperatorGraph] = {
    "mlp": mlp([512] * 12, batch=256),
    "gpt": gpt(num_layers=4, hidden=256, num_heads=4, vocabulary=96, sequence=64, batch=128),
    "moe": moe(num_layers=2, hidden=128, num_heads=4, vocabulary=64, sequence=32, batch=64),
}


def situation(graph: OperatorGraph, gib: float | None = None) -> Situation:
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
    if gib is not None:
        small = replace(cluster.device_types[0], memory_gib=gib, reserved_gib=0.0)
        cluster = replace(cluster, device_types=(small,))
    return Situation(graph, cluster, Training("bfloat16"), default_costs())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "chimera"])
@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=pytest.mark.long) for name in ("mlp", "moe"))]
)
def test_a_strategy_keeps_its_best_plan(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's pipelines were simulated 48 times to show the two best of them.

    With memory for all plans, for about half of them, and for none.
    """
    graph = GRAPHS[name]
    plans = pipeline_plans(situation(graph), schedule, "x")
    assert len(plans) >= simple_strategies.FEW
    alone = [situation(graph).simulate(plan) for plan in plans]
    peaks = sorted(each.peak_memory for each in alone)
    counted = []
    for nbytes in (80 * 2**30, peaks[len(peaks) // 2], peaks[0] // 2):
        here = situation(graph, nbytes / 2**30)
        listed = pipeline_plans(here, schedule, "x")
        few = simulate_family(here, listed)
        with monkeypatch.context() as patched:
            patched.setattr(simple_strategies, "FEW", len(listed) + 1)
            every = simulate_family(here, listed)
        best, of_all = min(few, key=rank), min(every, key=rank)
        assert best.plan == of_all.plan
        assert (best.fits, best.step_time) == (of_all.fits, of_all.step_time)
        counted.append((len(few), len(every)))
    assert counted[0][0] < counted[0][1]
