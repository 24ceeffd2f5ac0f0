"""Does a search give the same plan file in another process, and on one core or two?

    python -m benchmarks.determinism [--evaluations 20000] [--case NAME]

Each case is searched in fresh processes: twice with all cores, then with numba, the search and the
process itself confined to 1 core and to 2. Plans are compared as the bytes of their files, with
what they predict in them. Prints one JSON object a case: `case`, `runs`, `plans`, how many
different files there were, `step_ms`, `identical`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.simulator.graph.models import gpt, inception_v3, mlp, moe, nmt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.training import Training

CASES: dict[str, Callable[[], OperatorGraph]] = {
    "small mlp": lambda: mlp([64, 256, 10], batch=16),
    "mlp": lambda: mlp([512, 2048, 512, 10], batch=64),
    "gpt": lambda: gpt(num_layers=4, hidden=512, num_heads=8, sequence=256, batch=64),
    "moe": lambda: moe(num_layers=4, hidden=256, num_heads=4, sequence=128, batch=32),
    "inception": lambda: inception_v3(batch=64),
    "nmt": lambda: nmt(sequence=5, batch=64),
}
"""Models, each searched on two nodes of four V100s, the small one on two nodes of two."""

RUNS = (None, None, 1, 2)
"""Cores of each run; None for all there are."""


def plan_bytes(case: str, evaluations: int, cores: int | None) -> bytes:
    """The plan file that a search of a case gives."""
    devices = 2 if case == "small mlp" else 4
    cluster = Cluster.preset("p3.16xlarge", num_nodes=2, devices_per_node=devices)
    result = search(
        CASES[case](),
        cluster,
        training=Training("float16"),
        budget=Budget(evaluations, seed=3, threads=cores),
    )
    return result.plan.to_json().encode()


def run_apart(case: str, evaluations: int, cores: int | None) -> dict[str, object]:
    """What `--inside` prints in a process of its own that may use `cores` cores."""
    command = [sys.executable, "-m", "benchmarks.determinism", "--inside", "--case", case]
    command += ["--evaluations", str(evaluations)]
    environment = dict(os.environ)
    if cores is not None:
        command += ["--cores", str(cores)]
        environment["NUMBA_NUM_THREADS"] = str(cores)
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    told: dict[str, object] = json.loads(done.stdout)
    return told


def confine(cores: int) -> None:
    """Let this process use `cores` of its cores only, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, mine[:cores])


def measure(case: str, evaluations: int, runs: Sequence[int | None] = RUNS) -> dict[str, object]:
    """All runs of a case, each on so many cores."""
    told = [run_apart(case, evaluations, cores) for cores in runs]
    plans = {str(each["sha256"]) for each in told}
    return {
        "case": case,
        "runs": len(told),
        "plans": len(plans),
        "step_ms": told[0]["step_ms"],
        "identical": len(plans) == 1,
    }


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), help="this one only")
    parser.add_argument("--evaluations", type=int, default=20_000)
    parser.add_argument("--inside", action="store_true", help="one search in this very process")
    parser.add_argument("--cores", type=int, help="how many that search may use")
    given = parser.parse_args()
    if not given.inside:
        for case in [given.case] if given.case else CASES:
            print(json.dumps(measure(case, given.evaluations)), flush=True)
        return
    if given.cores is not None:
        confine(given.cores)
    plan = plan_bytes(given.case, given.evaluations, given.cores)
    step = json.loads(plan)["prediction"]["step_time"]
    told = {"sha256": hashlib.sha256(plan).hexdigest(), "step_ms": round(1e3 * step, 6)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
