"""Properties of predicted memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle

from benchmarks.properties.setups import simulated
from benchmarks.properties.tries import Try
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster

SLACK, BYTES = 1.1, 16
"""What ZeRO 3 keeps of a parameter at most: sixteen bytes over all devices, and a tenth more."""


def sharded_state(rng: random.Random) -> Iterator[Try]:
    """Parameters, gradients and optimizer state are shared out by ZeRO 3, whatever the devices."""
    for count in cycle(rng.sample(range(2, 257), 255)):
        yield state_on(count, tied=rng.random() < 0.5)


def state_on(count: int, *, tied: bool = True) -> Try:
    """What each of so many devices keeps of a small GPT under ZeRO 3."""
    graph = gpt(
        num_layers=2,
        hidden=1024,
        num_heads=16,
        vocabulary=50257,
        sequence=128,
        batch=count,
        tied=tied,
    )
    cluster = Cluster.preset("dgx-a100", num_nodes=count, devices_per_node=1)
    simulation = simulated(TrainingSetup(zero=3), graph, cluster)
    state = max(rank.state for rank in simulation.memory)
    allowed = SLACK * BYTES * graph.num_parameters / count
    return Try(f"{count} devices keep {state} bytes each", state / allowed - 1.0)
