"""All that a machine with a GPU has to show of the CUDA part, in stages, in one command.

    python -m benchmarks.gpu --out results                  all stages, for nine minutes
    python -m benchmarks.gpu --out results                  again: goes on where it ended
    python -m benchmarks.gpu --out results --again          what failed or was left out, once more
    python -m benchmarks.gpu --out results --stage kernels  one stage
    python -m benchmarks.gpu --out results --write          then docs/gpu-results.md has figures
    python -m benchmarks.gpu --out rehearsed --rehearse     small, on stand-ins, without a GPU

A stage is a process with a time limit, a case of it a line of JSON in ``OUT/STAGE.jsonl`` that is
written at once. What fails, hangs or crashes is one case: the next one follows in a new process.
What a stage printed is in ``OUT/STAGE.log``, pictures beside it. Without a GPU ``--write`` runs
nothing, as results may have been brought from elsewhere.

A call that is asked to end (SIGTERM) ends what it has begun too.
Exit codes: 0 all is done, 1 a case failed, 2 wrong input, 3 the time was too short for the rest.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

from benchmarks.gpu.results import all_lines
from benchmarks.gpu.runner import run_stages
from benchmarks.gpu.setting import BAD, LEFT, STAGES, Setting
from benchmarks.gpu.summary import PAGE, summary, write_summary

ROOM_MINUTES = 0.5
"""At the end of the minutes that are given, in which no case is begun."""


def parser() -> argparse.ArgumentParser:
    """The options; see the module."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument("--minutes", type=float, default=9.0, help="for this call in all")
    made.add_argument("--stage", choices=STAGES, help="this one only")
    made.add_argument("--again", action="store_true", help="what failed or was left out too")
    made.add_argument("--rehearse", action="store_true", help="on stand-ins for a GPU, small")
    made.add_argument(
        "--write", action="store_true", help=f"then put what is there into {PAGE.name}"
    )
    return made


def main() -> int:
    """Run the stages that are left, or write down what they showed."""
    options = parser()
    arguments = options.parse_args()
    if arguments.minutes <= ROOM_MINUTES:
        options.error(f"--minutes {arguments.minutes:g}: more than {ROOM_MINUTES:g} are needed")
    setting = Setting(arguments.out.resolve(), rehearse=arguments.rehearse)
    if arguments.rehearse and arguments.write:
        options.error("--write with --rehearse: a rehearsal shows nothing of a GPU")
    can_run = arguments.rehearse or torch.cuda.is_available()
    if not (can_run or arguments.write):
        options.error("torch finds no CUDA device here; --rehearse runs all on stand-ins")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    stages = (arguments.stage,) if arguments.stage else STAGES
    seconds = 60 * (arguments.minutes - ROOM_MINUTES)
    try:
        if can_run:
            run_stages(setting, stages, seconds, again=arguments.again)
        if arguments.write:
            write_summary(setting, PAGE)
        lines = all_lines(setting, stages)
    except ValueError as error:
        options.error(str(error))
    print(summary(lines))
    states = {str(line["state"]) for line in lines}
    return 1 if states & BAD else 3 if LEFT in states else 0


if __name__ == "__main__":
    sys.exit(main())
