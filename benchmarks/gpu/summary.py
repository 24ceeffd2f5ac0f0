"""What all stages showed, as a page and in a few lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.results import Line, all_lines
from benchmarks.gpu.setting import BAD, LEFT, SKIPPED, STAGES, Setting
from stratagem.simulator.base.files import write_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu-results.md"
HEADING = "## Figures\n"
OWN = ("stage", "case", "state", "rehearsed", "seconds", "why", "agrees")
"""What every line may have, beside its figures."""
MOST = 160
"""Characters of a figure that a table shows."""


def summary(lines: Sequence[Line]) -> str:
    """How many cases of each stage ended how, and why those that are not done are not.

    Example:
        >>> summary([{"stage": "nccl", "case": "1f1b", "state": "skipped", "why": "2 GPUs"}])
        'nccl: 1 skipped\\n  1f1b: skipped: 2 GPUs'
    """
    told = []
    for stage in STAGES:
        own = [line for line in lines if line["stage"] == stage]
        if own:
            counts = Counter(str(line["state"]) for line in own)
            told.append(f"{stage}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for line in own:
            if line["state"] in BAD | {SKIPPED, LEFT}:
                why = _short(line.get("why", f"see {stage}.jsonl"))
                alike[f"{line['state']}: {why}"].append(str(line["case"]))
        told += [f"  {_short(cases)}: {why}" for why, cases in alike.items()]
    return "\n".join(told)


def page(lines: Sequence[Line]) -> str:
    """The section of figures: a table a stage."""
    parts = [HEADING, "Made by `python -m benchmarks.gpu --out DIR --write` from its lines.\n"]
    for stage in STAGES:
        own = [line for line in lines if line["stage"] == stage]
        if own:
            rows = [f"| {line['case']} | {line['state']} | {_figures(line)} |" for line in own]
            head = ["| case | state | figures |", "|---|---|---|"]
            parts.append("\n".join([f"### `{stage}`\n", *head, *rows]))
            parts[-1] += "\n"
    return "\n".join(parts)


def write_summary(setting: Setting, path: Path) -> None:
    """Put the figures of a folder in the place of those that a page has.

    Raises:
        ValueError: when there are none, they are of rehearsals, or the page has no such section.
    """
    lines = all_lines(setting)
    if not lines:
        raise ValueError(f"{setting.out} has no results; run it without --write first")
    text = path.read_text("utf-8")
    before, heading, rest = text.partition(HEADING)
    if not heading:
        raise ValueError(f"{path} has no section {HEADING.strip()!r} to put the figures in")
    _, mark, after = rest.partition("\n## ")
    write_text(path, before + page(lines) + mark + after)


def _figures(line: Line) -> str:
    if line["state"] != "done" and "why" in line:
        return _short(line["why"])
    told = {name: each for name, each in line.items() if name not in OWN and each != []}
    return "; ".join(f"{name} {_short(each)}" for name, each in told.items())


def _short(value: object) -> str:
    """A figure as a cell of a table has it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(_short(each) for each in value.values() if not isinstance(each, Mapping))
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    text = " ".join(str(value).replace("|", "/").split())
    return text if len(text) <= MOST else f"…{text[-MOST:]}"
