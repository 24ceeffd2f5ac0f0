"""What methods of the literature propose computes what one process of torch computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples.models import MLP, SmallCNN, SmallGPT
from stratagem.searcher.methods import literature
from stratagem.searcher.methods.literature import (
    LITERATURE,
    TRANSFORMER_RECIPES,
    complete,
    layout_choices,
    megatron_setups,
    one_stage_plan,
    tofu,
    transformer_annotations,
)
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from tests.support.plans import Case, assert_equal_to_torch, crossed, make_case

CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2)
METHODS = [name for name in LITERATURE if not name.startswith("GShard")]
"""Captured models have no experts."""


def situation_of(case: Case) -> Situation:
    """What a case is searched in."""
    return Situation(case.graph, CLUSTER, Training(), RooflineCosts())


@pytest.fixture(scope="module")
def gpt() -> Case:
    torch.manual_seed(0)
    model = SmallGPT(num_layers=2, hidden=24, num_heads=4, vocabulary=50, sequence=10)
    ids = torch.randint(0, 50, (4, 10))
    return make_case(model, input_ids=ids, labels=ids.roll(-1, 1))


@pytest.fixture(scope="module")
def mlp() -> Case:
    torch.manual_seed(1)
    model = MLP([10, 12, 9, 8])
    return make_case(model, x=torch.randn(8, 10), target=torch.randint(0, 8, (8,)))


@pytest.fixture(scope="module")
def cnn() -> Case:
    torch.manual_seed(2)
    model = SmallCNN(channels=4, image=8, classes=6)
    return make_case(model, images=torch.randn(4, 3, 8, 8), labels=torch.randint(0, 6, (4,)))


def sees_whole_batches(plan: Plan) -> bool:
    """Not batches that norms would see in parts."""
    return plan.num_microbatches == 1


@pytest.mark.parametrize(("model", "method"), crossed(["gpt", "mlp", "cnn"], METHODS, every=2))
def test_plans_of_every_method_equal_torch(
    method: str, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(literature, "NUM_PLACEMENTS", 10)
    case = request.getfixturevalue(model)
    plans = [plan for plan in LITERATURE[method](situation_of(case)) if sees_whole_batches(plan)]
    assert plans
    for plan in plans[:2]:
        assert_equal_to_torch(case, plan)


@pytest.mark.parametrize(
    ("recipe", "shape"), crossed(TRANSFORMER_RECIPES, [(2, 2), (1, 4), (4, 1)], every=2)
)
def test_gspmds_recipes_equal_torch(gpt: Case, recipe: str, shape: tuple[int, int]) -> None:
    axes = (MeshAxis("X", shape[0]), MeshAxis("Y", shape[1]))
    choices = complete(gpt.graph, axes, transformer_annotations(gpt.graph, axes, recipe)).choices
    mesh = DeviceMesh(axes, tuple(range(4)))
    assert_equal_to_torch(gpt, one_stage_plan(recipe, situation_of(gpt), mesh, choices))


@pytest.mark.parametrize(
    "layout",
    [
        {"batch": "data", "heads": "model", "hidden": "model", "vocab": "model"},
        {"length": "data", "heads": "model"},
        {"features": "data", "hidden": "model"},
        {"vocab": "data", "head_dim": "model"},
    ],
)
def test_layouts_equal_torch(gpt: Case, layout: dict[str, str]) -> None:
    axes = (MeshAxis("data", 2), MeshAxis("model", 2))
    choices = layout_choices(gpt.graph, axes, layout)
    mesh = DeviceMesh(axes, tuple(range(4)))
    assert_equal_to_torch(gpt, one_stage_plan("layout", situation_of(gpt), mesh, choices))


@pytest.mark.parametrize(
    ("model", "shape"), crossed(["gpt", "mlp", "cnn"], [(4,), (2, 2), (3,)], every=2)
)
def test_recursive_partitions_equal_torch(
    model: str, shape: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    case = request.getfixturevalue(model)
    axes = tuple(MeshAxis(f"level {k}", size) for k, size in enumerate(shape))
    count = 4 if shape != (3,) else 3
    mesh = DeviceMesh(axes, tuple(range(count)))
    choices = tofu(case.graph, shape).choices
    assert_equal_to_torch(case, one_stage_plan("Tofu", situation_of(case), mesh, choices))


def test_megatrons_pipelines_equal_torch(gpt: Case) -> None:
    setups = [
        replace(setup, inputs_first=False)
        for setup in megatron_setups(situation_of(gpt))
        if setup.recompute == "none" and not setup.sequence_parallel
        if setup.virtual_stages == 1 and setup.pipeline > 1
    ]
    assert {setup.tensor for setup in setups} == {1, 2}
    for setup in setups:
        plan = setup.plan(gpt.graph, CLUSTER)
        assert_equal_to_torch(gpt, replace(plan, training=Training()))
