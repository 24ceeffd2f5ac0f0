"""ZeRO: what a device holds of parameters, gradients and the states of Adam."""

from __future__ import annotations

import stratagem as sg
from benchmarks.papers.claims import Claim, Outcome

STATES = {0: "none", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


def _states() -> Outcome:
    graph = sg.models.gpt(
        num_layers=36, hidden=4096, num_heads=32, sequence=1024, vocabulary=51200, batch=64
    )
    cluster = sg.Cluster.preset("dgx-2", num_nodes=4)
    found = {}
    for zero, name in STATES.items():
        setup = sg.TrainingSetup(microbatch=1, zero=zero, training=sg.Training("float16"))
        found[name] = sg.simulate(setup.plan(graph, cluster), graph).memory[0].state / 1e9
    return Outcome(found)


CLAIMS = (
    Claim(
        "zero-states",
        "ZeRO",
        "arXiv 1910.02054, figure 1",
        "what 7.5 billion parameters and their states take on each of 64 devices",
        "GB",
        {"none": 120.0, "ZeRO-1": 31.4, "ZeRO-2": 16.6, "ZeRO-3": 1.9},
        (0.95, 1.05),
        _states,
    ),
)
