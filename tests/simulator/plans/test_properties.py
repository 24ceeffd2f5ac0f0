"""Properties that every prediction must have, on a few cases (many: `benchmarks.properties`)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.properties import steps
from benchmarks.properties.setups import simulated, with_free_links
from benchmarks.properties.states import state_on, waiting_gradients
from benchmarks.properties.tries import Property, Try, score
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.training import Training


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "count"),
    [
        (steps.orders, 60),
        (steps.faster_hardware, 28),
        (steps.interleaving, 6),
        (steps.affine_layers, 4),
        (steps.bubbles, 20),
        (waiting_gradients, 40),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_property_holds(made: Property, count: int) -> None:
    line = score(made.__name__, made, count, seed=1)
    assert line["failed"] == 0, line


def test_a_property_that_fails_is_told() -> None:
    def odd(rng: random.Random) -> Iterator[Try]:
        for number in range(10):
            yield Try(f"case {number}", number % 2 - 0.5 + number / 100)

    assert score("odd", odd, 4, seed=0) == {
        "property": "odd",
        "tried": 4,
        "worst": 0.53,
        "failed": 2,
        "case": "case 3",
    }


@pytest.mark.parametrize("count", [2, 3, 7, 48, 96, 112, 255])
def test_zero_shares_state_out(count: int) -> None:
    assert state_on(count).holds


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_interleaving_shortens_the_bubble_and_nothing_else(optimizer: str) -> None:
    """Links free: compute · (1 + (p − 1) / (v · m)) + update, v = 1 or more.

    A sync and an update of each stage in the drain made it 5 % longer, whatever v was.
    """
    ranks, parts = 4, 16
    graph = gpt(
        num_layers=32, hidden=1024, num_heads=16, vocabulary=64, sequence=1024, batch=parts
    )
    setup = TrainingSetup(training=Training("bfloat16", optimizer=optimizer))

    def step(num_devices: int, virtual: int) -> float:
        preset = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=num_devices)
        stated = replace(setup, pipeline=num_devices, virtual_stages=virtual)
        return simulated(stated, graph, with_free_links(preset)).step_time

    share = step(1, 1) / ranks
    for virtual in (1, 2, 4, 8):
        bubble = share * (ranks - 1) / (virtual * parts)
        assert step(ranks, virtual) == pytest.approx(share + bubble, rel=0.02)
