"""Readers of one tensor share what it is converted to."""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.properties.setups import simulated
from benchmarks.properties.tries import Try
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.models import llama
from stratagem.simulator.hardware.cluster import Cluster

SLACK = 1e-6
"""Of communication in seconds: times are whole nanoseconds."""


def shared_readers(rng: random.Random) -> Iterator[Try]:
    """Separate projections of queries, keys and values communicate as long as one of all three."""
    while True:
        heads, layers = rng.choice([8, 16]), rng.choice([2, 4])
        setup = TrainingSetup(
            microbatch=rng.choice([1, 2]),
            tensor=rng.choice([2, 4, 8]),
            recompute=rng.choice(["none", "full"]),
            sequence_parallel=rng.random() < 0.5,
        )
        cluster = Cluster.preset(rng.choice(["dgx-a100", "dgx-h100"]), num_nodes=1)
        spent = []
        for fused in (False, True):
            graph = llama(
                num_layers=layers,
                hidden=64 * heads,
                num_heads=heads,
                ffn=128 * heads,
                vocabulary=4096,
                sequence=512,
                batch=8,
                fused=fused,
            )
            timeline = simulated(setup, graph, cluster).timeline
            rows = zip(timeline.names, timeline.kinds, timeline.end - timeline.start, strict=True)
            spent.append(
                sum(
                    int(length)
                    for name, kind, length in rows
                    if kind is TaskKind.COMMUNICATION and (" → " in name or " ← " in name)
                )
            )
        what = f"{setup.describe()}: {layers} layers of {heads} heads on {cluster.name}"
        yield Try(what, spent[0] / spent[1] - 1.0 - SLACK)
