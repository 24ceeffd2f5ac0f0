"""How far are predicted training steps from measured ones on real clusters?

    python -m benchmarks.fidelity --data DIR [--rows] [--only NAME] [--report PAGE]

Reads every CSV file of a known kind under DIR (recognised by its columns), states each row as a
model, a cluster and a training setup, simulates it, and prints one JSON object a file (see
`score`). `--rows` prints every row as well.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from benchmarks.fidelity.predict import Outcome, Predictor
from benchmarks.fidelity.report import write_report
from benchmarks.fidelity.score import reasons, score
from benchmarks.fidelity.sets import MeasuredSet, read_runs, set_of


def main() -> None:
    """Print the scores of all files."""
    arguments = _arguments()
    predictor = Predictor()
    assessed = {}
    for path in sorted(arguments.data.rglob("*.csv")):
        measured = set_of(path)
        if measured is not None and (not arguments.only or arguments.only in path.name):
            outcomes, line = assess(path, measured, predictor)
            if arguments.rows:
                for outcome in outcomes:
                    print(json.dumps(row_line(path, outcome)), flush=True)
            print(json.dumps(line), flush=True)
            assessed[path.name] = outcomes, line
    if arguments.report:
        write_report(assessed, arguments.report)


def assess(
    path: Path, measured: MeasuredSet, predictor: Predictor
) -> tuple[list[Outcome], dict[str, object]]:
    """The outcomes of a file and its line."""
    reading = read_runs(path, measured)
    left_out = Counter(reading.left_out)
    outcomes: list[Outcome] = []
    for found in predictor.outcomes(reading.runs):
        if isinstance(found, Outcome):
            outcomes.append(found)
        else:
            left_out[found[1]] += 1
    rows = len(reading.runs) + sum(reading.left_out.values())
    line = {"file": path.name, "rows": rows, **score(outcomes), "left_out": reasons(left_out)}
    return outcomes, line


def row_line(path: Path, outcome: Outcome) -> dict[str, object]:
    """One row, for a person to look for what the model misses."""
    run = outcome.run
    return {
        "file": path.name,
        "row": run.row,
        "label": run.label,
        "predicted_s": round(outcome.seconds, 6),
        "measured_s": run.seconds and round(run.seconds, 6),
        "error": run.seconds and round(100 * outcome.error, 1),
        "predicted_gb": round(outcome.peak_bytes / 1e9, 2),
        "measured_gb": run.peak_bytes and round(run.peak_bytes / 1e9, 2),
        "fits": outcome.fits,
        "ran": run.ran,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of measured sets")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--report", type=Path, help="Markdown page to write, pictures beside it")
    parser.add_argument("--only", default="", help="part of the names of the files to read")
    return parser.parse_args()


if __name__ == "__main__":
    main()
