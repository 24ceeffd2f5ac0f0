"""What was priced before is found again for equal questions, and for no others.

Exports priced plans in another precision by the rows of the first: a step whose gradients are
float32 seemed as fast as one whose gradients are bfloat16.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Calibration, Cluster, Link
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import simulate_plan

GRAPH = gpt(num_layers=2, batch=64)
CLUSTER = Cluster.preset("dgx-a100", num_nodes=2)
FASTER = replace(CLUSTER.device_types[0], memory_bandwidth_gb_s=4000.0, memory=None)
CLUSTERS = (
    CLUSTER,
    replace(CLUSTER, calibration=Calibration(product_scale=2.0, relative_error=0.1)),
    replace(CLUSTER, device_types=(FASTER,)),
    replace(CLUSTER, compute_slowdown=0.5),
    replace(CLUSTER, inter_node=Link("slow", bandwidth_gb_s=1.0, latency_us=50.0)),
)
TRAININGS = (
    Training("bfloat16"),
    Training("bfloat16", gradient_precision="float32"),
    Training("bfloat16", optimizer="sgd"),
    Training("float32"),
)
SETUPS = (TrainingSetup(zero=1), TrainingSetup(pipeline=2, microbatch=8, zero=1))


@pytest.mark.parametrize("setup", SETUPS, ids=["one stage", "two stages"])
def test_equal_questions_only(setup: TrainingSetup) -> None:
    memory, models = RowMemory(), (default_costs(), RooflineCosts())
    found: list[float] = []
    for _, cluster, training, costs in itertools.product((1, 2), CLUSTERS, TRAININGS, models):
        plan = replace(setup, training=training).plan(GRAPH, cluster)
        alone = simulate_plan(plan, GRAPH, costs)
        shared = simulate_plan(plan, GRAPH, costs, memory=memory)
        assert shared.step_time == alone.step_time
        assert [rank.peak for rank in shared.memory] == [rank.peak for rank in alone.memory]
        found.append(shared.step_time)
    assert len(set(found)) > len(found) / 4, "half are asked for again, and most others differ"


def test_equal_models_of_costs_that_are_others_share_nothing() -> None:
    """Two that count as equal may have learnt other times; only the same one is the same."""
    memory, cluster = RowMemory(), CLUSTER
    one, two = RooflineCosts(), RooflineCosts()
    numbers = [memory.priced_by(cluster, TRAININGS[0], costs) for costs in (one, two, one)]
    assert numbers == [0, 1, 0]
