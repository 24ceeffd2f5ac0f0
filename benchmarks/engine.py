"""How fast does the event simulator play random graphs, and how much faster than SimPy?

    python -m benchmarks.engine

Prints one JSON object a line: the case, its number of tasks, tasks per second of the engine (best
of several repeats, workspace allocated once), the ratio of SimPy's time to it on the same graph,
and `ratio_cpp`: its time over that of the same algorithm in C++ (engine.cpp, compiled here with
`g++ -O3`). Where there is no g++ that field is left out, and a note on stderr says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stratagem.simulator.engine._event_queue import simulate_tasks
from stratagem.simulator.engine.event_engine import allocate
from stratagem.simulator.engine.reference_engines import simulate_simpy
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph


@dataclass(frozen=True)
class Case:
    """A random layered graph: every task waits for two of the layer before."""

    name: str
    num_tasks: int
    width: int
    num_resources: int = 16
    slowdown: int = 0


CASES = [
    Case("1k tasks, 8 wide", 1_000, 8),
    Case("1k tasks, 64 wide", 1_000, 64),
    Case("10k tasks, 8 wide", 10_000, 8),
    Case("10k tasks, 64 wide", 10_000, 64),
    Case("100k tasks, 64 wide", 100_000, 64),
    Case("10k tasks, 64 wide, contention", 10_000, 64, slowdown=130),
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
        rivals=[(r, r + 1) for r in range(0, case.num_resources, 2)],
        slowdown=case.slowdown,
    )


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Time the fastest of several calls."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def compile_cpp(folder: Path) -> Path | None:
    """Compile the engine in C++ into a folder; None where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        print("no g++ here, so there is no ratio_cpp: install it to compare", file=sys.stderr)
        return None
    source, program = Path(__file__).with_name("engine.cpp"), folder / "engine"
    command = [compiler, "-O3", "-march=native", "-o", str(program), str(source)]
    subprocess.run(command, check=True)
    return program


def play_cpp(program: Path, graph: TaskGraph, repeats: int) -> tuple[int, float]:
    """Play a graph in C++; return the makespan in ns and the seconds of the fastest play."""
    edges, sets = graph.successors.size, graph.set_offsets.size - 1
    members, rivals = graph.set_resources.size, graph.contention.size
    sizes = [graph.num_tasks, edges, sets, members, graph.num_resources, rivals]
    path = program.with_name("graph")
    path.write_bytes(np.concatenate([sizes, *graph.arrays()]).astype("<i8").tobytes())
    command = [str(program), str(path), str(repeats)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    makespan, nanoseconds = map(int, printed.split())
    return makespan, nanoseconds * 1e-9


def measure(case: Case, program: Path | None) -> dict[str, object]:
    """Play one case with all simulators, and check that they agree."""
    graph = layered_graph(case)
    space = allocate(graph)
    makespan = simulate_tasks(graph.arrays(), space)  # compiles, and warms up
    best, cpps = float("inf"), float("inf")
    for _ in range(5):  # take turns, so that both see the same moods of the machine
        ours = seconds(lambda: simulate_tasks(graph.arrays(), space), repeats=20)
        best = min(best, ours)
        if program is not None:
            cpp_makespan, cpp = play_cpp(program, graph, repeats=20)
            cpps = min(cpps, cpp)
            assert cpp_makespan == makespan
    begin = time.perf_counter()
    reference = simulate_simpy(graph)
    simpys = time.perf_counter() - begin
    assert makespan == reference.makespan
    line: dict[str, object] = {
        "case": case.name,
        "tasks": case.num_tasks,
        "tasks_per_s": round(case.num_tasks / best),
        "ratio_simpy": round(simpys / best, 1),
    }
    if program is not None:
        line["ratio_cpp"] = round(best / cpps, 2)
    return line


def main() -> None:
    """Print one line a case."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = compile_cpp(Path(folder))
        for case in CASES:
            print(json.dumps(measure(case, program)), flush=True)


if __name__ == "__main__":
    main()
