"""Bounds of training setups are those of each by itself: what is remembered leaves nothing out."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from stratagem.searcher.methods.literature.setup_screening import Rates
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.training_setup import DEGREES, TrainingSetup
from stratagem.simulator.graph.models import moe
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
