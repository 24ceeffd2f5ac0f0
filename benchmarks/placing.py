"""How much faster is a place of operators played on cells than its plan is simulated?

    python -m benchmarks.placing            # how fast
    python -m benchmarks.placing --gains    # what it is good for: searches with it and without

Random moves of single operators and branches to parts of sixteen devices and back, from data
parallelism. Prints one JSON object a model: operators, places, seconds until all places are
priced, milliseconds a play and a simulation (medians of the same moves), how many times faster a
play is, and of how many moves both say the same time, to the nanosecond. Of gains: milliseconds a
step of the plans found without pins and with, the ratio, and how many operators are on parts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.placement.operator_placement import PlacesPlayed, parts_of
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.kernel_times.fitted_kernels import default_costs

MOVES, SEED = 60, 0


class Recommender(nn.Module):
    """Tables of categories and a perceptron of numbers, joined (Naumov et al. 2019, DLRM)."""

    def __init__(self, tables: int = 8, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, width))
        joined = (tables + 1) * width
        self.top = nn.Sequential(nn.Linear(joined, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """The mean score of a batch."""
        found = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        score: Tensor = self.top(torch.cat([self.dense(numbers), *found], dim=1)).mean()
        return score


def dlrm(batch: int) -> sg.OperatorGraph:
    """`Recommender` on shapes only."""
    with torch.device("meta"):
        inputs = torch.empty(batch, 16), torch.zeros(batch, 8, dtype=torch.int64)
        return sg.capture(Recommender(), inputs)


MODELS: dict[str, Callable[[], sg.OperatorGraph]] = {
    "a perceptron": lambda: sg.models.mlp([1024] * 8, batch=512),
    "DLRM": lambda: dlrm(512),
    "Inception v3": lambda: sg.models.inception_v3(batch=64),
    "NMT": lambda: sg.models.nmt(batch=64),
}


def measure(name: str) -> dict[str, object]:
    """The figures of one model."""
    graph, cluster = MODELS[name](), sg.Cluster.preset("p100-100g").with_devices(16)
    situation = Situation(graph, cluster, sg.Training(), default_costs())
    start = situation.simulate(sg.TrainingSetup(training=sg.Training()).plan(graph, cluster))
    begin = time.perf_counter()
    player = PlacesPlayed(Trials(situation, lambda _: True, lambda each: each, 10 * MOVES), start)
    priced, rng, now = time.perf_counter() - begin, random.Random(SEED), player.start.placed
    player.play(now)
    plays: list[float] = []
    simulations, equal = list[float](), 0
    units = parts_of(graph)
    while len(plays) < MOVES:
        moved = now.moved(rng.choice(units), rng.choice([None, *now.places]))
        if moved is None:
            continue
        begin = time.perf_counter()
        played = player.play(moved)
        middle = time.perf_counter()
        simulated = situation.simulate(moved.plan)
        plays.append(middle - begin)
        simulations.append(time.perf_counter() - middle)
        equal += played is not None and played.seconds == simulated.step_time
        now = moved
    play, simulation = statistics.median(plays), statistics.median(simulations)
    return {
        "model": name,
        "operators": len(graph.operators),
        "places": len(now.places),
        "priced_s": round(priced, 2),
        "play_ms": round(1e3 * play, 2),
        "simulate_ms": round(1e3 * simulation, 1),
        "ratio": round(simulation / play, 1),
        "equal": f"{equal} of {MOVES}",
    }


def gain(name: str) -> dict[str, object]:
    """What placing operators gains in a search of one stage."""
    graph, cluster = MODELS[name](), sg.Cluster.preset("p100-100g").with_devices(16)
    budget = sg.Budget(2_000, skeletons=2, bounded=0)
    without, with_parts = (
        sg.search(
            graph,
            cluster,
            space=sg.Space(max_pipeline=1, place=place, bucket_bytes=0),
            budget=budget,
            baselines=["OptCNN"],
            draws=0,
            progress=False,
            prefer="fastest",
        )
        for place in (False, True)
    )
    steps = [1e3 * found.simulation.step_time for found in (without, with_parts)]
    choices = [c for stage in with_parts.plan.stages for c in stage.choices.values()]
    return {
        "model": name,
        "without_ms": round(steps[0], 3),
        "with_ms": round(steps[1], 3),
        "gain": round(steps[0] / steps[1], 3),
        "on_parts": sum(choice.is_pinned for choice in choices),
        "gap": None if with_parts.gap is None else round(with_parts.gap, 3),
    }


def main() -> None:
    """Print one line a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gains", action="store_true")
    figures = gain if parser.parse_args().gains else measure
    for name in MODELS:
        print(json.dumps(figures(name)), flush=True)


if __name__ == "__main__":
    main()
