"""Bounds of training setups are those of each by itself: what is remembered leaves nothing out."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from stratagem.searcher.methods.literature.setup_families import megatron_setups, zero_setups
from stratagem.searcher.methods.literature.setup_screening import Rates, screen
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.training_setup import DEGREES, TrainingSetup
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.graph.models import gpt, moe
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training

GRAPH = moe(num_layers=8, hidden=64, num_heads=4, sequence=16, experts=4, batch=32)
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
BASE = TrainingSetup(microbatch=2, tensor=2, training=Training(), zero=1)
OTHERS = {
    "microbatch": 1,
    "tensor": 4,
    "pipeline": 2,
    "virtual_stages": 2,
    "schedule": "gpipe",
    "zero": 3,
    "recompute": "full",
    "sequence_parallel": True,
    "expert": 2,
    "overlap_gradients": False,
    "bucket_bytes": 1 << 20,
    "inputs_first": True,
    "partition": "parameters",
}
"""A value beside the usual one of each field; the training is that of the situation."""


def situation() -> Situation:
    return Situation(GRAPH, CLUSTER, Training(), default_costs())


def test_each_field_has_another_value() -> None:
    assert {*OTHERS, "training"} == {field.name for field in fields(TrainingSetup)}
    assert {degree.name for degree in DEGREES} <= OTHERS.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_setup_is_priced_as_if_it_were_the_first(name: str) -> None:
    base = replace(BASE, pipeline=2) if name == "virtual_stages" else BASE
    shared = Rates(situation())
    for setup in (base, replace(base, **{name: OTHERS[name]})):
        assert shared.outlook(setup) == Rates(situation()).outlook(setup)


def family(tight: bool) -> tuple[Situation, list[TrainingSetup]]:
    """All setups of two frameworks that can be built, where much fits or little does."""
    graph = gpt(num_layers=8, hidden=1024, num_heads=16, sequence=512, vocabulary=8192, batch=32)
    (device,) = CLUSTER.device_types
    cluster = replace(CLUSTER, device_types=(replace(device, memory_gib=2.5, reserved_gib=0.0),))
    where = Situation(graph, cluster if tight else CLUSTER, Training("bfloat16"), default_costs())
    return where, [*megatron_setups(where), *zero_setups(where, 3)]


@pytest.mark.parametrize("tight", [False, True])
def test_what_recomputes_more_takes_longer_and_needs_less(tight: bool) -> None:
    """So it need not be priced before what recomputes less was looked at."""
    where, setups = family(tight)
    rates, compared = where.derive(Rates), 0
    by_policy = {setup.recompute: setup for setup in setups}
    for setup in setups:
        if setup.recompute != "none":
            continue
        try:
            ladder = [rates.outlook(replace(setup, recompute=policy)) for policy in by_policy]
        except ValueError:
            continue
        for less, more in pairwise(sorted(ladder, key=lambda outlook: outlook.bound)):
            compared += 1
            assert RECOMPUTE_POLICIES.index(less.setup.recompute) <= RECOMPUTE_POLICIES.index(
                more.setup.recompute
            )
            assert less.estimate <= more.estimate * (1 + 1e-12)
            assert less.need >= more.need * (1 - 1e-12)
    assert compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("tight", [False, True])
def test_the_best_of_all_setups_is_among_the_few_that_are_simulated(tight: bool) -> None:
    where, setups = family(tight)
    found = screen(where, setups)
    every = []
    for setup in setups:
        try:
            setup.check(where.graph, where.cluster)
            simulation = where.simulate(setup.plan(where.graph, where.cluster))
        except ValueError:
            continue
        every += [simulation.step_time] if simulation.fits else []
    assert len(found.simulated) < len(every) / 4
    assert len(found.simulated) + len(found.dropped) == len(setups)
    assert found.simulated[0].step_time <= 1.01 * min(every)
