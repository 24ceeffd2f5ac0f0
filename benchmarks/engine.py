"""How fast does the event simulator play random graphs, and how much faster than SimPy?

    python -m benchmarks.engine

Prints one JSON object a line: the case, its number of tasks, tasks per second of the engine (best
of several repeats, workspace allocated once), and the ratio to SimPy on the same graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stratagem.simulator._kernels import simulate_tasks
from stratagem.simulator.engine import allocate
from stratagem.simulator.oracle import simulate_simpy
from stratagem.simulator.taskgraph import TaskGraph, build_task_graph


@dataclass(frozen=True)
class Case:
    """A random layered graph: every task waits for two of the layer before."""

    name: str
    num_tasks: int
    width: int
    num_resources: int = 16


CASES = [
    Case("1k tasks, 8 wide", 1_000, 8),
    Case("1k tasks, 64 wide", 1_000, 64),
    Case("10k tasks, 8 wide", 10_000, 8),
    Case("10k tasks, 64 wide", 10_000, 64),
    Case("100k tasks, 64 wide", 100_000, 64),
]


def layered_graph(case: Case, seed: int = 0) -> TaskGraph:
    """Draw a graph: durations of 1 to 1000 µs, one resource a task, a gang of two in ten."""
    rng = np.random.default_rng(seed)
    tasks = np.arange(case.width, case.num_tasks)
    layer_before = (tasks // case.width - 1) * case.width
    before = np.concatenate([layer_before + rng.integers(0, case.width, tasks.size) for _ in "ab"])
    first = rng.integers(0, case.num_resources, case.num_tasks)
    second = (first + 1) % case.num_resources
    is_gang = rng.random(case.num_tasks) < 0.1
    return build_task_graph(
        rng.integers(1_000, 1_000_000, case.num_tasks),
        np.stack([before, np.tile(tasks, 2)], axis=1),
        resource_sets=[
            (a, b) if gang else (a,)
            for a, b, gang in zip(first.tolist(), second.tolist(), is_gang.tolist(), strict=True)
        ],
        num_resources=case.num_resources,
    )


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Time the fastest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def measure(case: Case) -> dict[str, object]:
    """Play one case with both simulators, and check that they agree."""
    graph = layered_graph(case)
    space = allocate(graph)
    makespan = simulate_tasks(*graph.arrays(), *space.arrays())  # compiles, and warms up
    ours = seconds(lambda: simulate_tasks(*graph.arrays(), *space.arrays()), repeats=50)
    begin = time.perf_counter()
    reference = simulate_simpy(graph)
    simpys = time.perf_counter() - begin
    assert makespan == reference.makespan
    return {
        "case": case.name,
        "tasks": case.num_tasks,
        "tasks_per_s": round(case.num_tasks / ours),
        "ratio_simpy": round(simpys / ours, 1),
    }


def main() -> None:
    """Print one line a case."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for case in CASES:
        print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
