"""How much faster is a place of operators played on cells than its plan is simulated?

    python -m benchmarks.placing

Random moves of single operators and branches to parts of sixteen devices and back, from data
parallelism. Prints one JSON object a model: operators, places, seconds until all places are
priced, milliseconds a play and a simulation (medians of the same moves), how many times faster a
play is, and of how many moves both say the same time, to the nanosecond.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

import stratagem as sg
from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.placement.operator_placement import PlacesPlayed, parts_of
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.kernel_times.fitted_kernels import default_costs

MOVES, SEED = 60, 0
MODELS: dict[str, Callable[[], sg.OperatorGraph]] = {
    "a perceptron": lambda: sg.models.mlp([1024] * 8, batch=512),
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


def main() -> None:
    """Print one line a model."""
    for name in MODELS:
        print(json.dumps(measure(name)), flush=True)


if __name__ == "__main__":
    main()
