"""Space on recompute policies hold for every plan that a search may hand back."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.search.search_words import in_records

GRAPH = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=64, sequence=32, batch=8)
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


def setup(policy: str, pipeline: int = 1) -> Plan:
    made = TrainingSetup(microbatch=2, pipeline=pipeline, recompute=policy)
    return made.plan(GRAPH, CLUSTER)


def recomputed(plan: Plan) -> list[set[str]]:
    return [
        {n for n, choice in stage.choices.items() if choice.recompute} for stage in plan.stages
    ]


def found(wishes: Space, **changed: Any) -> SearchResult:
    given = {"skeletons": 1, "bounded": 0, "baselines": (), **changed}
    return search(
        GRAPH, CLUSTER, **in_records({"space": wishes, "budget": Budget(60, gap=0.1), **given})
    )


@pytest.mark.parametrize("allowed", [("full",), ("selective",), ("selective", "full")])
def test_no_plan_recomputes_otherwise(allowed: tuple[str, ...]) -> None:
    """Baselines recompute nothing where they fit: one of them was the plan of such a search."""
    wishes = Space(recompute=allowed, max_pipeline=1, microbatches=(1, 2))
    result = found(wishes)
    policies = [recomputed_operators(GRAPH, policy) for policy in allowed]
    for stage, names in zip(result.plan.stages, recomputed(result.plan), strict=True):
        assert names in [policy.intersection(stage.operators) for policy in policies]
    assert names
    assert wishes.bind(GRAPH).violations(result.simulation) == []


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_what_a_plan_recomputes_is_said(policy: str) -> None:
    simulation = simulate_plan(setup(policy, pipeline=2), GRAPH, RooflineCosts())
    for allowed in ("none", "selective", "full"):
        found = Space(recompute=(allowed,)).bind(GRAPH).breaks(simulation)
        said = [f"stage {s} follows no recompute policy of {allowed}" for s in range(2)]
        assert found == ([] if allowed == policy else said)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_start_that_recomputes_is_taken_as_such(policy: str) -> None:
    """The skeleton of a start was one that recomputes nothing, which none of its plans may be."""
    wishes = Space(recompute=("full",), pipeline=2, microbatches=(2, 4))
    result = found(wishes, start=setup(policy, pipeline=2))
    assert wishes.bind(GRAPH).violations(result.simulation) == []
    assert {str(record.skeleton.recompute) for record in result.space} == {"full"}
    compared = result.notes.get("the plan to start from is only compared")
    assert (compared == "it does not meet the constraints") == (policy == "none")
