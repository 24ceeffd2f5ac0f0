"""How much memory should a plan leave free, going by runs that ran and runs that did not?

    python -m benchmarks.headroom --data DIR [--only NAME]

Reads the measured sets under DIR that tell of runs that did not run, simulates each run, and
prints for every share of the memory how many runs are predicted wrongly if so much has to stay
free: with nothing beside it, and with NCCL's communicators (`headroom.COMMUNICATOR_BYTES`) beside
it. One JSON object a line; the last one names the share of each that is wrong on the fewest runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fidelity.predict import Predictor
from benchmarks.fidelity.sets import read_runs, set_of
from stratagem.searcher.space.situation import rank
from stratagem.simulator.hardware.headroom import Headroom, measured_headroom

SHARES = [percent / 100 for percent in range(31)]
"""Shares of the memory that are tried."""


@dataclass(frozen=True)
class Fullness:
    """Of a run: the predicted peak, the capacity and the fixed headroom (bytes); if it ran."""

    peak: int
    capacity: int
    fixed_bytes: int
    ran: bool


@dataclass(frozen=True)
class Wrong:
    """Runs that ran and were predicted not to fit, and those the other way round."""

    false_alarms: int
    misses: int


def wrong(runs: Sequence[Fullness], share: float, *, communicators: bool) -> Wrong:
    """How many runs are predicted wrongly where so much has to stay free.

    Example:
        >>> runs = [Fullness(85, 100, 0, True), Fullness(95, 100, 0, False)]
        >>> wrong(runs, 0.1, communicators=False), wrong(runs, 0.2, communicators=False)
        (Wrong(false_alarms=0, misses=0), Wrong(false_alarms=1, misses=0))
    """
    fits = [
        run.peak <= Headroom(share, run.fixed_bytes * communicators).usable(run.capacity)
        for run in runs
    ]
    told = list(zip(runs, fits, strict=True))
    return Wrong(
        sum(run.ran and not fit for run, fit in told),
        sum(fit and not run.ran for run, fit in told),
    )


def best_share(runs: Sequence[Fullness], *, communicators: bool) -> float:
    """The share that is wrong on the fewest runs; the least of equal ones."""
    found = [wrong(runs, share, communicators=communicators) for share in SHARES]
    return SHARES[min(range(len(SHARES)), key=lambda k: found[k].false_alarms + found[k].misses)]


def fullness_of(path: Path, predictor: Predictor) -> Iterator[Fullness]:
    """The runs of a file of which it is known whether they ran; others are left out."""
    measured = set_of(path)
    runs = [] if measured is None else read_runs(path, measured).runs
    if all(run.ran is not False for run in runs):
        return
    for run in runs:
        if run.ran is None:
            continue
        try:
            _, best = min(predictor.simulations(run), key=lambda pair: rank(pair[1]))
        except ValueError as error:
            print(json.dumps({"file": path.name, "row": run.row, "left_out": str(error)}))
            continue
        fullest = max(best.memory, key=lambda memory: memory.peak / memory.capacity)
        fixed = measured_headroom(run.cluster).fixed_bytes
        yield Fullness(fullest.peak, fullest.capacity, fixed, run.ran)


def main() -> None:
    """Print how many runs each share is wrong on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of measured sets")
    parser.add_argument("--only", default="", help="part of the names of the files to read")
    arguments = parser.parse_args()
    predictor = Predictor()
    runs = [
        run
        for path in sorted(arguments.data.rglob("*.csv"))
        if arguments.only in path.name
        for run in fullness_of(path, predictor)
    ]
    if not runs:
        raise SystemExit(f"no file under {arguments.data} tells of runs that did not run")
    for share in SHARES:
        alone = wrong(runs, share, communicators=False)
        beside = wrong(runs, share, communicators=True)
        print(json.dumps({"share": share, "alone": vars(alone), "beside": vars(beside)}))
    best = {name: best_share(runs, communicators=name == "beside") for name in ("alone", "beside")}
    print(json.dumps({"runs": len(runs), "ran": sum(run.ran for run in runs), "best": best}))


if __name__ == "__main__":
    main()
