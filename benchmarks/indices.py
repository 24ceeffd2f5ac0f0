"""How much faster are kernels whose indices count from the front only?

    python -m benchmarks.indices

Compiles the kernels of the simulator and of the search twice, as they are and as numba compiles
them, which looks whether an index is below 0 (see `base.compiling`). Prints one JSON object
a case of `benchmarks.anneal`: how many times as many proposals a chain decides so, single moves
and class moves, and how many times as fast plans are scored in full. Each is the median of the
ratios of turns; both ways take turns in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SIGNED, UNSIGNED = "signed", "unsigned"
RATES = ("one_core", "class_moves", "full")
TURNS = 3
CASES = ("GPT-2 124M on 16", "GPT-3 175B on 1,024, one stage", "ResNet-152 on 16")


def rates(case: str, indices: str) -> dict[str, float]:
    """Proposals and full scores a second, in this process."""
    from stratagem.simulator.base.compiling import CountFromFront

    if indices == SIGNED:
        CountFromFront.run_pass = lambda self, state: False  # type: ignore[method-assign]
    from benchmarks import anneal

    found = anneal.measure(case, dict(anneal.cases())[case])
    assert found["checked"]
    full = found["one_core"] / found["ratio_full"]  # type: ignore[operator]
    return {**{name: found[name] for name in RATES[:2]}, "full": full}


def rates_apart(case: str, indices: str, folder: Path) -> dict[str, float]:
    """The same in a process of its own, which keeps what it compiles under `folder`."""
    command = [sys.executable, "-m", "benchmarks.indices", "--case", case, "--indices", indices]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / indices)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="measure this one in this process")
    parser.add_argument("--indices", choices=(SIGNED, UNSIGNED), default=UNSIGNED)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(rates(asked.case, asked.indices)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            turns = [
                {way: rates_apart(case, way, Path(folder)) for way in (SIGNED, UNSIGNED)}
                for _ in range(TURNS)
            ]
            ratios = {
                name: statistics.median(t[UNSIGNED][name] / t[SIGNED][name] for t in turns)
                for name in RATES
            }
            print(json.dumps({"case": case, **{k: round(v, 2) for k, v in ratios.items()}}))


if __name__ == "__main__":
    main()
