"""Which models of others can be captured, searched and trained as torch trains them?

    python -m benchmarks.zoo [--models FILE] [--only PART] [--seconds 300] [--jobs 1]
    python -m benchmarks.zoo --page docs/zoo.jsonl docs/zoo.md

FILE is Python: each function in it that takes nothing returns `(model, args, kwargs, loss,
targets)`, with `None` for a loss and targets where the model returns its loss. Without it all
models of `benchmarks/zoo/models` are tried, which need the extra `models`.

Prints a JSON object a model: `captured`; `generic`, the share of operations in operators without
a rule; `parameters`, whether what is trained is what torch trains, scalar for scalar;
`flops_ratio`, operations of products against those that `torch.utils.flop_counter` counts;
`searched`, for two and for three devices; `executed_equal`, whether a step by the plans found, and
by plans drawn at random, has the loss and all gradients of one process of torch; `seconds`; and
`error`, empty where all went well. Every model has a process of its own and `--seconds` to end in:
what ends otherwise, or with an error that is not worded for users, is called a crash. The last
line, on the standard error, counts them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from benchmarks.zoo.examples import OWN, names_in
from benchmarks.zoo.page import write_page
from benchmarks.zoo.runner import lines


def main() -> None:
    """Try all models, or make a page of what was tried."""
    arguments = _arguments()
    if arguments.page:
        write_page(*arguments.page)
        return
    paths = [arguments.models] if arguments.models else OWN
    models = [(path, name) for path in paths for name in names_in(path)]
    chosen = [each for each in models if arguments.only in f"{each[0].stem}.{each[1]}"]
    counted: Counter[str] = Counter()
    for line in lines(chosen, arguments.seconds, arguments.jobs):
        print(json.dumps(line), flush=True)
        counted["models"] += 1
        counted.update(key for key in ("captured", "searched", "executed_equal") if line[key])
        counted["crashes"] += line["error"].startswith("crash")
    print(json.dumps(counted), file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, help="file of functions that make models")
    parser.add_argument("--only", default="", help="part of the names of the models to try")
    parser.add_argument("--seconds", type=float, default=300.0, help="a model may take")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--page", nargs=2, type=Path, metavar=("LINES", "PAGE"), help="make a page of lines"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
