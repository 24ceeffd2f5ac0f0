"""How long does somebody wait who uses this for the first time, and who has used it before?

    python -m benchmarks.first_use [--case NAME]

simulate gpt2         one prediction for GPT-2 of 12 layers, ZeRO-1 on 16 A100s
gpt2 16 a100          a search with all defaults for the same, as the demo does it first
llama3-8b 32 h100     the same for Llama 3 8B (batch 256 of 8,192 tokens)
gpt3-175b 1024 a100   for GPT-3 as Megatron-LM trained it (batch 1,536)
mixtral 32 h100       for Mixtral 8x7B of transformers (half a million tokens); needs that package
demo                  the whole `examples.demo`, which times operators of this machine, too

Each case runs twice in processes of its own that find the package set up: with an empty folder of
compiled kernels and nothing timed (cold), and again with what the first has left (warm).

Prints one JSON object a case, null where something is no part of it: `cold_s` and `warm_s`,
seconds of the whole process; `import_s` of them until there is a graph; of searches `cold_good_s`
and `first_good_s`, from there until a plan was known that takes at most 2 % more than the one
found in the end, cold and warm; `cold_search_s` and `search_s`, the whole search, cold and warm;
`plan_ms`, `gap` (a share of the step), `stop` and `fits`; `mb` that the process took at most, 10⁶
bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GOOD = 1.02
"""A plan is good from so many times the step of the plan found in the end."""
DEMO = "demo"
MIXTRAL = "mixtral 32 h100"


def _gpt2() -> tuple[Any, Any]:
    import stratagem as sg
    from examples import gpt2

    model, batch = gpt2.build()
    return sg.capture(model, kwargs=batch), sg.Cluster.preset("dgx-a100", num_nodes=2)


def _llama() -> tuple[Any, Any]:
    import stratagem as sg

    graph = sg.models.llama(num_kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192, batch=256)
    return graph, sg.Cluster.preset("dgx-h100", num_nodes=4)


def _gpt3() -> tuple[Any, Any]:
    import stratagem as sg

    graph = sg.models.gpt(
        num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048, batch=1536
    )
    return graph, sg.Cluster.preset("dgx-a100", num_nodes=128)


def _mixtral() -> tuple[Any, Any]:
    import stratagem as sg
    from examples import mixtral

    model, batch = mixtral.build()
    return sg.capture(model, kwargs=batch), sg.Cluster.preset("dgx-h100", num_nodes=4)


SEARCHES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gpt2 16 a100": _gpt2,
    "llama3-8b 32 h100": _llama,
    "gpt3-175b 1024 a100": _gpt3,
    MIXTRAL: _mixtral,
}
TOLD = ("import_s", "first_good_s", "search_s", "plan_ms", "gap", "stop", "fits", "mb")
SIMULATE = "simulate gpt2"
CASES = (SIMULATE, *SEARCHES, DEMO)


def simulated(begun: float) -> dict[str, object]:
    """One prediction, in this process."""
    import stratagem as sg

    graph, cluster = _gpt2()
    ready = time.time()
    plan = sg.TrainingSetup(zero=1).plan(graph, cluster)
    step = sg.simulate(plan, graph).step_time
    return {
        "import_s": round(ready - begun, 1),
        "search_s": round(time.time() - ready, 1),
        "plan_ms": round(1e3 * step, 3),
    }


def searched(case: str, begun: float) -> dict[str, object]:
    """One search with all defaults, in this process."""
    import stratagem as sg

    graph, cluster = SEARCHES[case]()
    ready, seen = time.time(), [(0.0, float("inf"))]

    def note(progress: Any) -> None:
        if progress.best < seen[-1][1]:
            seen.append((time.time() - ready, progress.best))

    result = sg.search(graph, cluster, training=sg.Training("bfloat16"), progress=note)
    whole, step = time.time() - ready, result.simulation.step_time
    good = next((at for at, best in seen if best <= GOOD * step), whole)
    return {
        "import_s": round(ready - begun, 1),
        "first_good_s": round(good, 1),
        "search_s": round(whole, 1),
        "plan_ms": round(1e3 * step, 3),
        "gap": None if result.gap is None else round(result.gap, 4),
        "stop": result.stop_reason.name.lower(),
        "fits": result.simulation.fits,
    }


def inside(case: str, begun: float) -> dict[str, object]:
    """A case in this process, which began at `begun` (seconds since the epoch)."""
    found = simulated(begun) if case == SIMULATE else searched(case, begun)
    most = max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {**found, "mb": round(1024 * most / 10**6)}


def measure(case: str, folder: Path) -> dict[str, object]:
    """A case in a process of its own, which keeps what it compiles and times under `folder`."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(folder / "kernels"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    begun = time.time()
    command = [sys.executable, "-m", "benchmarks.first_use", "--case", case, "--begun", str(begun)]
    if case == DEMO:
        command = [sys.executable, "-m", "examples.demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told = {} if case == DEMO else json.loads(done.stdout.splitlines()[-1])
    return {"seconds": round(time.time() - begun, 1), **told}


def both(case: str) -> dict[str, object]:
    """A case cold and warm."""
    if case == MIXTRAL and find_spec("transformers") is None:
        return {"case": case, "left_out": "transformers is not installed: pip install '.[zoo]'"}
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (measure(case, Path(folder)) for _ in range(2))
    names = {"seconds": "cold_s", "first_good_s": "cold_good_s", "search_s": "cold_search_s"}
    of_cold = {names[name]: cold.get(name) for name in names}
    seconds = warm.pop("seconds")
    return {"case": case, **of_cold, "warm_s": seconds, **{name: warm.get(name) for name in TOLD}}


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="this one only")
    parser.add_argument("--begun", type=float, help="measure it in this process, begun then")
    asked = parser.parse_args()
    if asked.begun is not None:
        print(json.dumps(inside(asked.case, asked.begun)))
        return
    for case in [asked.case] if asked.case else CASES:
        print(json.dumps(both(case)), flush=True)


if __name__ == "__main__":
    main()
