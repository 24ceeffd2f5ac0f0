"""How good, how fast and how certain the solver of `stratagem.searcher.ilp` is on contest files.

    python -m benchmarks.iopddl FILE… [--seconds 60] [--seed 0]

prints one JSON line per file: objective, lower bound and gap, seconds to solve (the file is read
and the kernels are loaded before), and, where it is known, the best published value of the
ASPLOS 2025 contest's public instances with ours over it. Choices are scored on the file as read.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from stratagem.searcher.ilp.files.iopddl import read_iopddl
from stratagem.searcher.ilp.problem.instance import CostEdge, Device, Instance, MemoryUse
from stratagem.searcher.ilp.solve import solve

PUBLISHED = {
    "G": 217_039,
    "V": 1_617_084,
    "C": 84_102_445_260,
    "K": 2_274_276_676,
    "P": 651_833_115_436,
}
"""Best known values: of twenty teams, of XLA's solver, or proved by a general MIP solver."""


def main() -> None:
    """Solve every file named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit per file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    solve(warm_up())
    for path in arguments.files:
        print(json.dumps(measure(path, arguments.seconds, arguments.seed)), flush=True)


def warm_up() -> Instance:
    """An instance that calls every kernel, so that compiling them is not timed."""
    rng = np.random.default_rng(0)
    nodes = tuple(rng.integers(1, 9, 4).astype(float) for _ in range(12))
    edges = tuple(
        CostEdge(one, other, rng.integers(0, 9, (4, 4)).astype(float))
        for one in range(12)
        for other in range(one)
        if (one * other) % 3 != 1
    )
    uses = tuple(MemoryUse(node, node // 2, node + 2, rng.integers(0, 9, 4)) for node in range(12))
    return Instance(nodes, edges, uses, (Device("device", 24),))


def measure(path: Path, seconds: float, seed: int) -> dict[str, object]:
    """The line of one file."""
    instance = read_iopddl(path)
    started = time.perf_counter()
    solution = solve(instance, seconds=seconds, seed=seed)
    name = path.name.partition(".")[0]
    line: dict[str, object] = {
        "instance": name,
        "status": solution.status.value,
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "seconds": round(time.perf_counter() - started, 2),
        "fractional": solution.num_fractional,
        "parts": solution.num_parts,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if solution.choice is not None:
        assert instance.excess(solution.choice) == 0
        assert instance.objective(solution.choice) == solution.objective
    if name in PUBLISHED:
        line["published"] = PUBLISHED[name]
        line["over_published"] = solution.objective / PUBLISHED[name]
    return line


if __name__ == "__main__":
    main()
