"""Properties of predicted memory."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

from benchmarks.properties.drawn import draw_plan, draw_shape, kinds
from benchmarks.properties.setups import simulated, wider, with_links
from benchmarks.properties.tries import Try
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.operators.operator import Operator, factor_sizes
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose

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


def waiting_gradients(rng: random.Random) -> Iterator[Try]:
    """However late links are, one gradient of each parameter waits, and one more is being made."""
    row = list(Purpose).index(Purpose.UNSUMMED)
    while True:
        for kind in kinds():
            plan, graph = draw_plan(rng, draw_shape(rng, kind))
            times = 10.0 ** -rng.randrange(5)
            slow = with_links(plan.cluster, partial(wider, times=times))
            simulation = simulate_plan(replace(plan, cluster=slow), graph, RooflineCosts())
            for r in range(len(simulation.memory)):
                seen = int(simulation.memory_timeline(r).nbytes[row].max())
                held = [
                    _gradient_bytes(each)
                    for each in graph.operators
                    if r in _ranks_of(plan.rank_of, plan.stage_of[each.name], plan.is_mirrored)
                ]
                what = f"{plan.name}, links {times} times as fast: {seen} bytes on rank {r}"
                yield Try(what, seen / (sum(held) + max(held) or 1) - 1.0)


def _ranks_of(rank_of: tuple[int, ...], stage: int, is_mirrored: bool) -> tuple[int, ...]:
    """The ranks on which a stage is."""
    return (rank_of[stage], rank_of[-1 - stage]) if is_mirrored else (rank_of[stage],)


def _gradient_bytes(operator: Operator) -> int:
    """Bytes of the gradients of an operator's weights, in float32."""
    sizes = (factor_sizes(weight.layout, operator.sizes) for weight in operator.weights)
    return 4 * sum(map(math.prod, sizes))
