"""The process of a stage: runs its cases one after the other, and writes a line of each.

Started by the runner, which starts it again where it ends early. A case that takes too long ends
the process with a trace of all its threads, however it hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.results import add, lines_of
from benchmarks.gpu.setting import (
    ALL,
    BEGUN,
    DONE,
    FAILED,
    SKIPPED,
    STAGES,
    WRONG,
    Case,
    Figures,
    Setting,
    SkippedError,
)

MODULES = "modules"
"""The case that says that a stage cannot be imported."""

EXACT = ("one_rank", "streams", "nccl")
"""Stages that compare with a CPU, whose float32 is float32: torch lets convolutions round more."""

SICK = 3
"""Exit code of a process whose device does not answer any more after a failure."""


def cases_of(setting: Setting, stage: str) -> list[Case] | None:
    """The cases of a stage; None, and a line, where a module that it needs is not installed."""
    told = any(line["case"] == MODULES for line in lines_of(setting, stage))
    try:
        module = import_module(f"benchmarks.gpu.stages.{stage}")
    except ModuleNotFoundError as error:
        add(setting, stage, MODULES, SKIPPED, why=f"{error.name} is not installed")
        return None
    if told:
        add(setting, stage, MODULES, DONE)
    found: list[Case] = module.cases(setting)
    return found


def run_case(setting: Setting, stage: str, case: Case) -> bool:
    """Run a case and write its line; whether the process can go on."""
    add(setting, stage, case.name, BEGUN)
    start = time.monotonic()
    state, figures = DONE, Figures()
    faulthandler.dump_traceback_later(case.seconds, exit=True)
    try:
        figures = case.run()
        state = WRONG if figures.get("agrees") is False else DONE
    except SkippedError as error:
        state, figures = SKIPPED, {"why": str(error)}
    except ModuleNotFoundError as error:
        state, figures = SKIPPED, {"why": f"{error.name} is not installed"}
    except Exception as error:
        traceback.print_exc()
        state, figures = FAILED, {"why": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        faulthandler.cancel_dump_traceback_later()
    add(setting, stage, case.name, state, seconds=round(time.monotonic() - start, 2), **figures)
    return answers(setting)


def answers(setting: Setting) -> bool:
    """Whether the device still works: an illegal access ends it for the whole process.

    Memory that no case has any more is given back: streams share none of what torch keeps.
    """
    gc.collect()
    try:
        if not setting.rehearse:
            torch.cuda.empty_cache()
        return bool(torch.ones(2, device=setting.device).sum().item() == 2)
    except Exception:
        traceback.print_exc()
        return False


def main() -> int:
    """Run the cases of a stage that are left."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worker")
    made.add_argument("stage", choices=STAGES)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--until", type=float, required=True, help="no case begins behind this time")
    made.add_argument("--rehearse", action="store_true")
    made.add_argument("--done", nargs="*", default=[], help="cases that are not to be run")
    arguments = made.parse_args()
    setting, parent = Setting(arguments.out, arguments.rehearse), os.getppid()
    torch.set_num_threads(1 if setting.rehearse else max(1, torch.get_num_threads() // 2))
    torch.backends.cudnn.allow_tf32 = arguments.stage not in EXACT
    faulthandler.enable()
    cases = cases_of(setting, arguments.stage)
    if cases is None:
        return 0
    for case in cases:
        if case.name in arguments.done:
            continue
        if time.time() > arguments.until or os.getppid() != parent:
            return 0
        if not run_case(setting, arguments.stage, case):
            return SICK
    add(setting, arguments.stage, ALL, DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
