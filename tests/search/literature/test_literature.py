"""The registry of the literature; degrees and their bounds; device placement; random ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.methods import literature
from stratagem.searcher.methods.literature import (
    LITERATURE,
    Rates,
    gshard_setups,
    megatron_setups,
    operator_groups,
    random_choices,
    reinforce,
    screen,
    zero_setups,
)
from stratagem.searcher.methods.literature.device_placement_rl import _Policy
from stratagem.searcher.methods.literature.setup_screening import MOST_WITHOUT_ROOM
from stratagem.searcher.methods.literature.shortened_models import shortened
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.skeletons import operator_choices
from stratagem.searcher.space.strategies import tensor_dims
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt, llama, mlp, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from tests.support.plans import crossed

CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2)
SMALL = {"hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16}
MODELS = {
    "gpt": gpt(num_layers=4, **SMALL, batch=16),
    "moe": moe(num_layers=4, **SMALL, experts=4, batch=16),
    "mlp": mlp([16, 32, 64, 8], batch=16),
    "resnet": resnet(18, batch=16, image=32),
}
HALF = Training(precision="bfloat16")


def situation(graph: OperatorGraph, cluster: Cluster = CLUSTER) -> Situation:
    return Situation(graph, cluster, HALF, default_costs())


def with_memory(cluster: Cluster, nbytes: float) -> Cluster:
    device = replace(cluster.device_types[0], memory_gib=nbytes / 2**30, reserved_gib=0)
    calibration = replace(cluster.calibration, reserved_gib=0)
    return replace(cluster, device_types=(device,), calibration=calibration)


# -- the registry -------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "name"), crossed(MODELS, LITERATURE, every=2))
def test_every_method_proposes_plans_that_are_priced(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(literature, "NUM_PLACEMENTS", 8)
    s = situation(MODELS[model])
    plans = list(LITERATURE[name](s))
    has_experts = model == "moe"
    assert bool(plans) == (has_experts or not name.startswith("GShard"))
    for plan in plans:
        simulation = s.simulate(plan)
        assert simulation.step_time > 0
        assert plan.num_devices == CLUSTER.num_devices
    assert len({plan.name for plan in plans}) == len(plans)


def test_methods_do_not_place_operators_beyond_the_size_of_the_papers() -> None:
    large = situation(MODELS["mlp"], Cluster.preset("dgx-a100", num_nodes=4))
    assert not list(LITERATURE["REINFORCE"](large))


def test_where_memory_is_short_microbatches_and_then_recompute_are_tried() -> None:
    graph = gpt(num_layers=4, hidden=256, num_heads=4, vocabulary=256, sequence=256, batch=64)
    s = situation(graph)
    (whole,) = LITERATURE["Tofu"](s)
    assert whole.num_microbatches == 1
    limit = 0.99 * s.simulate(whole).peak_memory
    counts = []
    while True:
        smaller = situation(graph, with_memory(CLUSTER, limit))
        (plan,) = LITERATURE["Tofu"](smaller)
        assert smaller.simulate(plan).fits
        if plan.name.endswith("full recompute"):
            break
        counts.append(plan.num_microbatches)
        limit = 0.99 * smaller.simulate(plan).peak_memory
    assert counts == [2, 4, 8, 16, 32]


# -- degrees ------------------------------------------------------------------------------------

FAMILIES = {
    "Megatron-LM": megatron_setups,
    "ZeRO-1": lambda s: zero_setups(s, 1),
    "ZeRO-2": lambda s: zero_setups(s, 2),
    "ZeRO-3": lambda s: zero_setups(s, 3),
    "GShard": gshard_setups,
}
LAYERED = {
    "gpt": gpt(num_layers=8, hidden=256, num_heads=8, vocabulary=512, sequence=64, batch=32),
    "moe": moe(num_layers=4, **SMALL, experts=4, batch=32),
    "llama": llama(num_layers=4, **SMALL, batch=16),
}


@pytest.mark.parametrize(("model", "family"), crossed(LAYERED, FAMILIES, every=2))
def test_bounds_hold_for_every_setup(family: str, model: str) -> None:
    """No simulated step is below its bound, no simulated peak below its need."""
    s = situation(LAYERED[model])
    rates = Rates(s)
    setups = list(FAMILIES[family](s))
    checked = 0
    for setup in setups[:: max(1, len(setups) // 15)]:
        try:
            outlook = rates.outlook(setup)
        except ValueError:
            continue
        simulation = s.simulate(setup.plan(s.graph, s.cluster))
        assert outlook.bound <= simulation.step_time * (1 + 1e-9), setup.describe()
        assert outlook.need <= simulation.peak_memory, setup.describe()
        assert outlook.need > 0.1 * simulation.peak_memory
        checked += 1
    assert checked > 5 or (family == "GShard" and model != "moe")


@pytest.mark.parametrize("family", ["Megatron-LM", "ZeRO-3", "GShard"])
def test_screening_finds_the_best_of_a_family(family: str) -> None:
    """All setups that can be built are simulated by hand."""
    s = situation(LAYERED["moe" if family == "GShard" else "gpt"])
    setups = [
        setup
        for setup in FAMILIES[family](s)
        if setup.microbatch == 4 and setup.recompute != "selective"
    ]
    simulated = []
    for setup in setups:
        try:
            plan = setup.plan(s.graph, s.cluster)
        except ValueError:
            continue
        simulated.append(s.simulate(plan))
    found = screen(s, setups, max_simulated=len(setups))
    assert found.simulated[0].step_time == min(simulated, key=rank).step_time
    few = screen(s, setups)
    assert few.simulated[0].step_time <= 1.05 * found.simulated[0].step_time
    assert len(few.simulated) + len(few.dropped) == len(setups)
    assert all(dropped.reason for dropped in few.dropped)


def test_what_is_dropped_says_why() -> None:
    s = situation(LAYERED["gpt"])
    training = s.training
    setups = [
        TrainingSetup(tensor=3, training=training),
        TrainingSetup(pipeline=4, virtual_stages=2, microbatch=32, training=training),
        TrainingSetup(microbatch=8, training=training),
        TrainingSetup(microbatch=1, training=training),
    ]
    found = screen(s, setups, max_simulated=1)
    reasons = [dropped.reason for dropped in found.dropped]
    assert reasons[0].startswith("3 tensor × 1 pipeline ways are 3 devices")
    assert reasons[1].startswith("schedule 'interleaved' cannot run 1 microbatches through 8")
    assert len(found.simulated) == 1
    assert "takes at least" in reasons[2] or "estimated at" in reasons[2]


def test_what_cannot_fit_is_not_simulated() -> None:
    graph = gpt(
        num_layers=24, hidden=8192, num_heads=64, vocabulary=51200, sequence=2048, batch=16
    )
    found = screen(
        situation(graph),
        [
            TrainingSetup(training=HALF),
            TrainingSetup(tensor=2, pipeline=2, training=HALF, recompute="full"),
        ],
    )
    assert any("needs at least" in dropped.reason for dropped in found.dropped)


def test_where_nothing_fits_few_are_simulated() -> None:
    """All that a family of GPT-3 might do was simulated, to say by how much it does not fit."""
    graph = gpt(
        num_layers=24, hidden=8192, num_heads=64, vocabulary=51200, sequence=2048, batch=16
    )
    setups = [TrainingSetup(microbatch=m, training=HALF) for m in (1, 2, 4, 8, 16)]
    found = screen(situation(graph), setups)
    assert len(found.simulated) == MOST_WITHOUT_ROOM < len(setups)
    assert not any(simulation.fits for simulation in found.simulated)
    assert all(dropped.reason for dropped in found.dropped)


def test_megatron_setups_are_all_degrees_that_divide() -> None:
    s = situation(LAYERED["gpt"])
    setups = list(megatron_setups(s))
    degrees = {(x.tensor, x.pipeline) for x in setups}
    assert degrees == {(t, p) for t in (1, 2) for p in (1, 2, 4) if 4 % (t * p) == 0}
    assert len(set(map(repr, setups))) == len(setups)
    assert any(x.sequence_parallel for x in setups)
    assert any(x.virtual_stages > 1 for x in setups)
    assert not any(x.sequence_parallel and x.tensor == 1 for x in setups)


def test_zero_has_three_stages() -> None:
    with pytest.raises(ValueError, match="ZeRO stages 1, 2 and 3, not 4"):
        next(zero_setups(situation(MODELS["gpt"]), 4))


@pytest.mark.parametrize("model", MODELS)
def test_a_shortened_model_has_the_operators_of_the_whole(model: str) -> None:
    graph = MODELS[model]
    short = shortened(graph)
    for i, operator in enumerate(graph.operators):
        twin = short.graph.operators[int(short.stands_for[i])]
        assert operator.signature == twin.signature
    assert set(short.stands_for.tolist()) == set(range(len(short.graph.operators)))


def test_a_shortened_model_is_sharded_like_the_whole() -> None:
    graph = gpt(num_layers=12, **SMALL, batch=4)
    short = shortened(graph)
    whole, few = tensor_dims(graph, 2), tensor_dims(short.graph, 2)
    for i, name in enumerate(graph.names):
        assert whole.get(name) == few.get(short.graph.names[int(short.stands_for[i])])
    assert len(short.graph.operators) < len(graph.operators) / 2


# -- device placement ---------------------------------------------------------------------------


def test_placements_are_priced_as_they_are_simulated() -> None:
    s = situation(MODELS["gpt"])
    found = reinforce(s, num_samples=30, seed=3)
    assert found.step_time == pytest.approx(s.simulate(found.plan).step_time, rel=1e-12)
    assert found.fits
    for operator in s.graph.operators:
        (placement,) = found.plan.choice(operator.name).config
        assert isinstance(placement, Pin) or operator.is_source


def test_equal_seeds_give_equal_placements_and_other_seeds_others() -> None:
    s = situation(MODELS["moe"])
    first, again, other = (reinforce(s, num_samples=40, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.mean_times != other.mean_times


def test_the_policy_learns_to_keep_a_chain_on_one_device() -> None:
    """Layers that wait for each other gain nothing from a second device but its transfers."""
    one_node = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    s = Situation(mlp([256] * 9, batch=4096), one_node, Training(), RooflineCosts())
    found = reinforce(s, num_samples=600, seed=0)
    assert np.mean(found.mean_times[-5:]) < np.mean(found.mean_times[:5])
    pins = {c.config[0] for c in found.plan.stages[0].choices.values()} - {None}
    assert sum(isinstance(pin, Pin) for pin in pins) <= 2
    assert found.num_simulated < found.num_samples


def test_one_step_of_the_policy_follows_the_gradient() -> None:
    """∇ log p of a softmax is the choice less its share, checked by finite differences."""
    rng = np.random.default_rng(0)
    policy = _Policy(3, 4, 0.0)
    policy.logits = rng.normal(size=(3, 4))
    drawn = [rng.integers(0, 4, 3) for _ in range(5)]
    advantages = rng.normal(size=5)

    def objective(logits: np.ndarray) -> float:
        other = _Policy(3, 4, 0.0)
        other.logits = logits
        shares = other.shares
        logs = np.array([np.log(shares[np.arange(3), placement]).sum() for placement in drawn])
        entropy = -(shares * np.log(shares)).sum()
        return float((advantages / advantages.std() * logs).mean() + 0.01 * entropy)

    policy.learn(drawn, advantages)
    gradient = policy.mean / 0.1
    for place in np.ndindex(3, 4):
        step = np.zeros((3, 4))
        step[place] = 1e-6
        slope = (objective(policy.logits + step) - objective(policy.logits - step)) / 2e-6
        assert gradient[place] == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_memory_is_counted_device_by_device() -> None:
    """What one placement needs on its fullest device, others need two thirds of."""
    graph = mlp([2000] * 9, batch=16)
    need = situation(graph).simulate(reinforce(situation(graph), num_samples=1).plan).peak_memory
    short = situation(graph, with_memory(CLUSTER, 0.67 * need))
    found = reinforce(short, num_samples=60)
    assert found.fits
    assert short.simulate(found.plan).fits
    none = situation(graph, with_memory(CLUSTER, 0.1 * need))
    assert not reinforce(none, num_samples=60).fits


def test_groups_are_segments_merged_in_order() -> None:
    graph = gpt(num_layers=16, **SMALL, batch=4)
    groups = operator_groups(graph, 64)
    few = operator_groups(graph, 4)
    assert (np.diff(groups) >= 0).all()
    assert (np.diff(few) >= 0).all()
    assert set(few.tolist()) == {0, 1, 2, 3}
    assert groups[graph.index["h.3.ln_1"]] == groups[graph.index["h.3.mlp.down"]]


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="reinforce: num_samples is 0; it must be at least 1"):
        reinforce(situation(MODELS["mlp"]), num_samples=0)
    with pytest.raises(ValueError, match="screen: max_simulated is 0; it must be at least 1"):
        screen(situation(MODELS["mlp"]), [], max_simulated=0)


# -- random strategies --------------------------------------------------------------------------


def test_random_strategies_are_drawn_evenly_from_the_space() -> None:
    graph = mlp([16, 32, 8], batch=16)
    operator = graph.operator("layers.1")
    space = operator_choices(graph, operator, (2, 2), (0, 3))
    drawn = [
        random_choices(graph, (2, 2), zero_stages=(0, 3), seed=seed)["layers.1"]
        for seed in range(400)
    ]
    assert set(drawn) == set(space)
    expected = 400 / len(space)
    assert all(abs(drawn.count(c) - expected) < 5 * math.sqrt(expected) for c in space)


def test_random_strategies_of_one_seed_are_one() -> None:
    graph = MODELS["gpt"]
    assert random_choices(graph, (2, 2), seed=5) == random_choices(graph, (2, 2), seed=5)
    assert random_choices(graph, (2, 2), seed=5) != random_choices(graph, (2, 2), seed=6)
