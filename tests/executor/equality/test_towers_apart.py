"""Towers on parts of a mesh, as a search places them: equal to one process, and its memory."""

from __future__ import annotations

import pytest
import torch

from stratagem.executor import execute, lower, model_state
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.search.moves.test_operator_placement import TwoTowers
from tests.support.plans import Case, assert_runs_like_torch, make_case


def towers() -> Case:
    torch.manual_seed(0)
    model = TwoTowers(inputs=32, width=96, depth=3)
    data = {"user": torch.randn(12, 32), "item": torch.randn(12, 32), "wanted": torch.randn(12)}
    return make_case(model, **data)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(2, 1), (2, 2)])
def test_what_a_search_places_trains_as_one_process_does(nodes: tuple[int, int]) -> None:
    case = towers()
    cluster = Cluster.preset("p3.16xlarge", num_nodes=nodes[0], devices_per_node=nodes[1])
    found = search(
        case.graph,
        cluster,
        space=Space(place=True),
        budget=Budget(evaluations=100, gap=0.3, threads=1),
        baselines=(),
        start=None,
    )
    placed = [
        choice.config
        for stage in found.plan.stages
        for choice in stage.choices.values()
        if any(isinstance(each, Pin) for each in choice.config)
    ]
    assert len(placed) > 4
    assert_runs_like_torch(case, found.plan)
    # Devices hold their own tower: half the states of both, as the simulator says and as measured.
    simulated = simulate_plan(found.plan, case.graph, default_costs()).memory[0]
    states = 16 * case.graph.num_parameters
    assert simulated.state == pytest.approx(states / 2, rel=0.05)
    result = execute(found.plan, case.graph, model_state(case.model), case.batch, memory=True)
    assert max(result.peak_bytes) == pytest.approx(
        max(peak_bytes(lower(found.plan, case.graph))), rel=0.1
    )
    assert 0.8 * simulated.peak <= max(result.peak_bytes) <= 1.3 * simulated.peak
