"""Training runs stated by their degrees, drawn at random, on clusters that are made faster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster, Link
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

PRESETS = ("dgx-a100", "dgx-h100", "a100-800g", "h100-3200g", "p3.16xlarge")


def draw_setup(rng: random.Random) -> tuple[TrainingSetup, OperatorGraph, Cluster]:
    """A run of a small GPT on 16 or 32 devices."""
    cluster = Cluster.preset(rng.choice(PRESETS), num_nodes=rng.choice([2, 4]))
    tensor, pipeline = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
    data = cluster.num_devices // (tensor * pipeline)
    virtual = rng.choice([1, 2]) if pipeline > 1 else 1
    # One data-parallel way has nothing to shard over, and such a setup is refused.
    stages = [0, 1, 3] if pipeline == 1 else [0, 1] if data > 1 else [0]
    setup = TrainingSetup(
        microbatch=rng.choice([1, 2]),
        tensor=tensor,
        pipeline=pipeline,
        virtual_stages=virtual,
        zero=rng.choice(stages),
        recompute=rng.choice(["none", "full"]),
        overlap_gradients=rng.random() < 0.7,
    )
    batch = data * setup.microbatch * pipeline * rng.choice([1, 2])
    return setup, small_gpt(rng.choice([8, 16]), rng.choice([512, 1024, 2048]), batch), cluster


def small_gpt(num_layers: int, hidden: int, batch: int, sequence: int = 1024) -> OperatorGraph:
    """A GPT of heads of 64 features."""
    return gpt(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=hidden // 64,
        vocabulary=51200,
        sequence=sequence,
        batch=batch,
    )


def simulated(setup: TrainingSetup, graph: OperatorGraph, cluster: Cluster) -> Simulation:
    """What a run is predicted to do."""
    return simulate_plan(setup.plan(graph, cluster), graph, default_costs())


def with_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    """A cluster with other links."""
    return replace(
        cluster, intra_node=change(cluster.intra_node), inter_node=change(cluster.inter_node)
    )


def wider(link: Link, times: float) -> Link:
    """A link of so many times the bandwidth."""
    groups = [
        replace(each, bandwidth_gb_s=each.bandwidth_gb_s * times) for each in link.by_group_size
    ]
    return replace(link, bandwidth_gb_s=link.bandwidth_gb_s * times, by_group_size=tuple(groups))


def prompter(link: Link, times: float) -> Link:
    """A link whose messages take a part of their latency."""
    groups = [
        replace(each, latency_us=each.latency_us / times, piece_us=each.piece_us / times)
        for each in link.by_group_size
    ]
    return replace(link, latency_us=link.latency_us / times, by_group_size=tuple(groups))


def with_free_links(cluster: Cluster) -> Cluster:
    """A cluster on which communication takes next to no time, and nobody waits for it."""

    def free(link: Link) -> Link:
        return replace(link, bandwidth_gb_s=1e9, latency_us=0.0, by_group_size=())

    calibration = replace(cluster.calibration, stall_us=0.0)
    return replace(with_links(cluster, free), calibration=calibration, compute_slowdown=0.0)
