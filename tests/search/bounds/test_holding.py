"""What ranks hold at least is never more than a plan's peak, and proves that nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.bounds.memory_bound import HoldingBounds
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.improvement.outcomes import Fate
from stratagem.searcher.problem.priced_skeleton import make_problem
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.microbatch_graphs import MicrobatchModels
from stratagem.searcher.space.schedule_traits import searched_schedules
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, all_skeletons, skeletons
from stratagem.searcher.space.strategies import data_parallel, with_recompute
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.graph.models import gpt, mlp, moe, nmt, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.headroom import Headroom
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.optimizers.parameter_groups import ParameterGroup
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)


def tiny_gpt() -> OperatorGraph:
    return gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


MODELS: dict[str, Callable[[], OperatorGraph]] = {
    "mlp": lambda: mlp([64, 48, 32, 64], batch=32),
    "gpt": tiny_gpt,
    "gpt, unfused": lambda: gpt(
        num_layers=2, hidden=32, num_heads=4, vocabulary=64, sequence=16, batch=8,
        attention="unfused", dropout=0.1,
    ),
    "moe": lambda: moe(num_layers=2, hidden=32, experts=4, batch=16),
    "resnet": lambda: resnet(18, batch=8, image=32),
    "nmt": lambda: nmt(hidden=64, vocabulary=96, sequence=3, batch=16),
}  # fmt: skip


def situation(
    graph: OperatorGraph, cluster: Cluster = CLUSTER, training: Training | None = None
) -> Situation:
    return Situation(graph, cluster, training or Training(), default_costs())


def with_memory(gib: float) -> Cluster:
    """A node whose devices have so much memory, all of it free."""
    device = replace(CLUSTER.device_types[0], memory_gib=gib, reserved_gib=0.0)
    return replace(CLUSTER, device_types=(device,))


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(data=st.data())
def test_no_plan_holds_less(data: st.DataObject) -> None:
    graph = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]()
    schedule = data.draw(st.sampled_from(searched_schedules()))
    listed = list(skeletons(graph, CLUSTER, schedule=schedule))
    policy = data.draw(st.sampled_from(RECOMPUTE_POLICIES))
    skeleton = replace(data.draw(st.sampled_from(listed)), recompute=policy)
    training = Training(
        data.draw(st.sampled_from(["float32", "bfloat16"])),
        gradient_precision=data.draw(st.sampled_from(["", "float32"])),
        **data.draw(st.sampled_from([{}, {"fused_loss": True}, {"eager_loss": True}])),
        bucketed_gradients=data.draw(st.booleans()),
        groups=data.draw(st.sampled_from([(), (ParameterGroup(("*0*",), optimizer="sgd"),)])),
        fused_elementwise=data.draw(st.booleans()),
    )
    here = situation(graph, training=training)
    options = Options(
        chunks=(1, 2),
        fuse=True,
        regather=data.draw(st.booleans()),
        stream=data.draw(st.booleans()),
    )
    problem = make_problem(
        graph, skeleton, CLUSTER, training, here.costs, (0, 1, 2, 3), here.memory, options
    )
    holdings = HoldingBounds(MicrobatchModels(here)).holdings(skeleton)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    sizes = [len(choices) for choices in problem.choices]
    for _ in range(3):
        for peak, holding in zip(
            AnnealingChain(problem, rng.integers(0, sizes), 1, 0).peaks(), holdings, strict=True
        ):
            assert holding.least <= peak, (str(skeleton), holding)


@pytest.mark.parametrize("first", ["adam", "sgd"])
def test_layers_that_are_alike_may_be_trained_otherwise(first: str) -> None:
    """All of them were counted with the states of the first: more than there are, or fewer."""
    graph = mlp([64, 64, 64, 64, 64], batch=8)
    alone = replace(CLUSTER, devices_per_node=1)
    other = "sgd" if first == "adam" else "adam"
    rest = ParameterGroup(("layers.2.*",), optimizer=other)
    training = Training(optimizer=first, groups=(rest,))
    bounds = []
    for each in (training, replace(training, groups=())):
        models = MicrobatchModels(situation(graph, alone, each))
        bounds.append(HoldingBounds(models).holdings(next(skeletons(graph, alone)))[0].least)
    states = 2 * 4 * (64 * 64 + 64)
    assert bounds[0] - bounds[1] == (states if first == "sgd" else -states)


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_one_device_holds_hardly_more(policy: str) -> None:
    """Nothing is sharded there, so only what passes need for a moment is missing."""
    graph = gpt(num_layers=8, hidden=256, num_heads=4, vocabulary=512, sequence=128, batch=8)
    alone = replace(CLUSTER, devices_per_node=1)
    here = situation(graph, alone)
    skeleton = replace(next(skeletons(graph, alone)), recompute=policy)
    problem = make_problem(
        graph, skeleton, alone, here.training, here.costs, (0,), here.memory, Options()
    )
    peak = AnnealingChain(problem, np.zeros(len(problem.choices), dtype=np.int64), 1, 0).peaks()[0]
    least = HoldingBounds(MicrobatchModels(here)).holdings(skeleton)[0].least
    assert 0.75 * peak < least <= peak


def test_what_must_stay_free_counts() -> None:
    here = situation(tiny_gpt())
    skeleton = next(skeletons(here.graph, CLUSTER))
    holding = HoldingBounds(MicrobatchModels(here), headroom=Headroom(0.5)).holdings(skeleton)[0]
    assert holding.capacity == int(skeleton.meshes[0].memory_bytes(CLUSTER) * 0.5)


def space_of(here: Situation) -> SkeletonList:
    space = SkeletonList(here, Options(), (0, 2, 3), Space(headroom=0.0).bind(here.graph))
    groups = space.listed(all_skeletons(here.graph, here.cluster, ("1f1b",)))
    space.look_at(groups, [space.quick.look(e.skeleton for e in group) for group in groups])
    return space


def test_skeletons_that_cannot_fit_say_what_lacks() -> None:
    graph = gpt(num_layers=4, hidden=512, num_heads=8, vocabulary=512, sequence=512, batch=256)
    entries = space_of(situation(graph, with_memory(0.5))).entries
    full = [entry for entry in entries if entry.fate is Fate.FULL]
    assert 0 < len(full) < len(entries)
    for entry in full:
        assert entry.bound == np.inf
        assert entry.fullness > 1
        assert "however sharded, of 512 MiB" in entry.why
    assert [e.fullness for e in full] == sorted(e.fullness for e in full)


def test_a_plan_whose_own_choices_fit_opens_its_skeleton_again() -> None:
    """Skeletons recompute by their policy; a plan that was given may recompute without one."""
    graph = gpt(num_layers=8, hidden=128, num_heads=4, vocabulary=64, sequence=256, batch=64)
    here = situation(graph, with_memory(0.2))
    space = space_of(here)
    entry = next(
        e for e in space.entries if e.fate is Fate.FULL and e.skeleton.recompute == "none"
        and e.skeleton.num_ranks == 1 and e.skeleton.num_microbatches == 1
    )  # fmt: skip
    skeleton: Skeleton = entry.skeleton
    small = graph.microbatch(skeleton.num_microbatches)
    plain = data_parallel(small, skeleton.meshes[0].shape, zero=3)
    own = with_recompute(small, plain, "full")
    simulation = here.simulate(here.plan(skeleton, own, name="given", options=Options()))
    assert simulation.fits
    assert space.take(skeleton, own, simulation) is entry
    assert entry.fate is Fate.RANKED
    assert 0 < entry.bound <= simulation.step_time


@pytest.mark.slow
def test_a_search_where_nothing_fits_names_the_plan_nearest_to_fitting() -> None:
    graph = gpt(num_layers=1, hidden=512, num_heads=8, vocabulary=512, sequence=128, batch=16)
    result = search(graph, with_memory(0.01), budget=Budget(200), baselines=())
    assert not result.simulation.fits
    assert result.bound is None
    assert all(record.fate is not Fate.OPEN for record in result.space)
    assert any("however sharded" in record.why for record in result.space)
