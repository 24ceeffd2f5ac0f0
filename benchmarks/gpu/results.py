"""Results as lines of JSON, one file a stage: of a case its last line counts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.setting import ALL, BAD, BEGUN, ENDED, SKIPPED, STAGES, Setting

Line = Mapping[str, object]


def file_of(setting: Setting, stage: str) -> Path:
    """Where the lines of a stage are."""
    return setting.out / f"{stage}.jsonl"


def add(setting: Setting, stage: str, case: str, state: str, **figures: object) -> None:
    """Write a line, whole and at once, as the machine may be gone the next moment."""
    line = {"stage": stage, "case": case, "state": state, "rehearsed": setting.rehearse, **figures}
    with file_of(setting, stage).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def written(setting: Setting, stage: str) -> list[Line]:
    """All lines of a stage; one that was cut off in the middle is as if it were not there.

    Raises:
        ValueError: when the folder has results of the other kind, of GPUs or of a rehearsal.
    """
    path = file_of(setting, stage)
    found: list[Line] = []
    for each in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(each)
        except json.JSONDecodeError:
            continue
        if line["rehearsed"] != setting.rehearse:
            there, ours = ("a rehearsal", "GPUs")[:: 1 if line["rehearsed"] else -1]
            raise ValueError(f"{setting.out} has results of {there}; name another for {ours}")
        found.append(line)
    return found


def lines_of(setting: Setting, stage: str) -> list[Line]:
    """The last line of every case of a stage, in the order in which they were first begun.

    Raises:
        ValueError: as `written` does.
    """
    return list({str(line["case"]): line for line in written(setting, stage)}.values())


def all_lines(setting: Setting, stages: Sequence[str] = STAGES) -> list[Line]:
    """What the cases of some stages showed."""
    lines = [line for stage in stages for line in lines_of(setting, stage)]
    return [line for line in lines if line["case"] != ALL]


def over(setting: Setting, stage: str, *, before: int, again: bool) -> list[str]:
    """The cases of a stage that are not to be run.

    Args:
        setting: where the lines are.
        stage: of the cases.
        before: lines that were there before this call of the command.
        again: whether what failed or was left out before is run once more.
    """
    lines = written(setting, stage)
    old = {str(line["case"]): line for line in lines[:before]}.values()
    states = ENDED - (BAD | {SKIPPED}) if again else ENDED
    found = [line for line in old if line["state"] in states]
    found += [line for line in lines[before:] if line["state"] in ENDED]
    return list(dict.fromkeys(str(line["case"]) for line in found))


def has_ended(setting: Setting, stage: str, done: Sequence[str]) -> bool:
    """Whether a stage has nothing left to run, given the cases that are not to be run."""
    return ALL in done and all(line["case"] in done for line in lines_of(setting, stage))


def begun(setting: Setting, stage: str) -> list[str]:
    """Cases whose process ended before they did."""
    return [str(line["case"]) for line in lines_of(setting, stage) if line["state"] == BEGUN]
