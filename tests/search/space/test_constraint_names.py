"""Names in constraints are looked up, and hold on graphs that the search rewrites."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.constraints import AXES, Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import all_skeletons
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import llama
from stratagem.simulator.graph.placement import REPLICATE, Config, Shard
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.graph.substitutions.edits import Substituted
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from tests.search.search_words import in_records
from tests.support.plans import few

GRAPH = llama(num_layers=1, hidden=64, num_heads=4, ffn=96, vocabulary=64, sequence=32, batch=8)
CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2)
SAMPLES: Config = (Shard("sample"),)


def found(  # type: ignore[no-untyped-def]
    constraints: Space, cluster: Cluster = CLUSTER, **changed: object
):
    given = {"skeletons": 1, "bounded": 0, "baselines": (), **changed}
    budget = Budget(evaluations=60, gap=0.3)
    return search(GRAPH, cluster, **in_records({"space": constraints, "budget": budget, **given}))


def test_axes_are_those_of_the_search() -> None:
    nodes = replace(CLUSTER, devices_per_node=4)
    skeletons = all_skeletons(GRAPH, nodes, ("1f1b",))
    meshes = [mesh for each in skeletons for mesh in each.meshes]
    plans = baseline_plans(Situation(GRAPH, nodes, Training(), RooflineCosts())).values()
    meshes += [stage.mesh for each in plans for stage in each.plan.stages]
    assert {axis.name for mesh in meshes for axis in mesh.axes} == set(AXES)


@pytest.mark.parametrize("what", ["forbid", "require"])
def test_a_misspelt_axis_is_refused(what: str) -> None:
    pairs = (("heads", "device"), ("vocab", "nodes"))
    said = rf"no axis to {what} for dim 'vocab' called 'nodes' \(did you mean 'node'\?\)"
    with pytest.raises(ValueError, match=said):
        found(Space(**{what: pairs}))  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_axis_of_the_plan_to_start_from_is_known() -> None:
    setup = TrainingSetup(microbatch=1, training=Training()).plan(GRAPH, CLUSTER)
    ring = DeviceMesh((MeshAxis("ring", 4), MeshAxis("one", 1)), setup.stages[0].mesh.devices)
    start = replace(setup, stages=(replace(setup.stages[0], mesh=ring),))
    wishes = Space(require=(("batch", "ring"),))
    with pytest.raises(ValueError, match="no axis to require for dim 'batch' called 'ring'"):
        found(wishes)
    assert not wishes.bind(GRAPH).violations(found(wishes, start=start).simulation)


def test_a_pinned_dim_that_the_operator_lacks_is_refused() -> None:
    said = r"pin of 'norm': no dim 'sampel' \(did you mean 'sample'"
    with pytest.raises(ValueError, match=said):
        Space(pin={"norm": (Shard("sampel"),)}).bind(GRAPH)


@pytest.mark.slow
@pytest.mark.parametrize("pin", few(["layers.0.*.*", "layers.0.mlp.gate"], 1))
def test_rewritten_graphs_keep_what_is_pinned(pin: str) -> None:
    """A pinned operator that a rewriting merged once ended the search with an error."""
    result = found(Space(pin={pin: SAMPLES}), rewrites=2)
    said = [why for why in result.notes if why.startswith("rewritten graphs left out")]
    assert any("is pinned, which they merge with others or split" in why for why in said)
    graph = result.plan.rewrite(GRAPH).graph
    for stage, name in itertools.product(result.plan.stages, ["layers.0.mlp.gate"]):
        assert name in graph.index
        if name in stage.choices:
            assert stage.choices[name].config == SAMPLES


@pytest.mark.slow
def test_rewritten_graphs_may_merge_what_is_not_pinned() -> None:
    node = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    result = found(Space(pin={"layers.0.mlp.gate": SAMPLES}), node, rewrites=2)
    plain = found(Space(pin={"layers.0.mlp.gate": SAMPLES}), node)
    assert len(result.space) > len(plain.space)


@pytest.mark.slow
@pytest.mark.parametrize("pin", few(["layers.*.mlp.gate", "layers.0.mlp.gate"], 1))
def test_a_rewritten_start_without_what_is_pinned_is_only_compared(pin: str) -> None:
    """It was an error where nothing of the name was left, and taken where something was."""
    graph = llama(
        num_layers=2, hidden=64, num_heads=4, ffn=96, vocabulary=64, sequence=32, batch=8
    )
    pair = ("layers.0.mlp.gate", "layers.0.mlp.up")
    rewritten = rewrite(graph, [Substituted("merge", (pair,))])
    start = replace(
        TrainingSetup(microbatch=1).plan(rewritten.graph, CLUSTER), substitutions=rewritten.steps
    )
    width = len(start.stages[0].mesh.axes)
    config = (Shard("sample"), *(REPLICATE,) * (width - 1))
    result = search(
        graph,
        CLUSTER,
        space=Space(pin={pin: config}),
        start=start,
        budget=Budget(evaluations=60, gap=0.3, skeletons=1, bounded=0),
        baselines=(),
    )
    assert all(f"layers.{k}.mlp.gate" in choices_of(result.plan) for k in range(2))
    assert "the plan to start from is only compared" in result.notes
