"""Make the page of measured figures from the JSON lines that the benchmarks print.

    python -m benchmarks.delta > docs/performance/delta.jsonl
    python -m benchmarks.tables docs/performance docs/performance.md

A section is made for each file that is there. Numbers are those of the lines; nothing else is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADER = """\
# Performance

Figures of this library against itself: what an idea saves against doing without it, and whether
the answer stays the same. Each table is made from the lines that a benchmark prints
(`docs/performance/*.jsonl`). To renew one:

<!-- not run: it measures for minutes -->
```bash
python -m benchmarks.delta > docs/performance/delta.jsonl
python -m benchmarks.tables docs/performance docs/performance.md
```

The machine had two CPU cores and other work to do, so times scatter by a factor of two or three.
Ratios are taken within one run and scatter less. What is said to be equal is equal to the
nanosecond.
"""


@dataclass(frozen=True)
class Section:
    """How the lines of one benchmark become a table.

    Attributes:
        title: of the section.
        text: what the table shows.
        columns: heading by field; lines that lack one of the fields are left out.
    """

    title: str
    text: str
    columns: Mapping[str, str]


SECTIONS = {
    "optimality": Section(
        "The search against all plans",
        "Small random models on small random clusters, with few enough plans to score every one. "
        "How many there were, on how many the search found the best plan, by how much the worst "
        "plan found was slower, how often a bound was above the best plan (it must never be), "
        "what bounds leave open, over all plans and over those on the skeletons listed, "
        "how many had no plan that fits, and how many plans were scored.",
        {
            "graphs": "models",
            "found": "best plan found",
            "worst_gap": "slowest, relative",
            "bound_violations": "bounds violated",
            "bound_gap": "mean gap of bounds",
            "listed_gap": "of those listed",
            "infeasible": "fit nowhere",
            "plans": "plans scored",
        },
    ),
    "delta": Section(
        "Delta re-simulation",
        "Random changes of task graphs: how many tasks there are, how many were played again for "
        "a change on average, how many times faster that was than playing all, and how many "
        "changes were compared with a full simulation, of how many all times were equal.",
        {
            "case": "graph",
            "tasks": "tasks",
            "replayed": "played again",
            "speedup_full": "times faster",
            "checked": "compared",
            "equal": "equal",
        },
    ),
    "indices": Section(
        "Indices that count from the front",
        "How many times as fast kernels are that do not look whether an index is below 0: the "
        "proposals that a chain decides, of single operators and of classes, and plans scored in "
        "full. What delta re-simulation saves is less since, because a full simulation gained "
        "more.",
        {
            "case": "model",
            "one_core": "single moves",
            "class_moves": "class moves",
            "full": "in full",
        },
    ),
    "folding": Section(
        "Devices played as one",
        "The last backward block of a 24-layer GPT, tensor-parallel in the node and data-parallel "
        "between nodes, with all devices as one and with a task a device.",
        {
            "devices": "devices",
            "tasks_folded": "tasks as one",
            "tasks_unfolded": "tasks apart",
            "ratio_play": "times faster",
            "equal": "all times equal",
        },
    ),
    "schedules": Section(
        "Bubbles against their formulas",
        "The idle share of a balanced pipeline as simulated and as its paper says, compared as "
        "exact fractions.",
        {
            "case": "schedule",
            "simulated": "simulated",
            "formula": "formula",
            "equal": "equal",
        },
    ),
    "first_use": Section(
        "A first use, and the next",
        "Seconds that whole processes take with nothing compiled or timed (cold), and again "
        "(warm); of searches until a plan was known that takes at most 2 % more than the one that "
        "was found, and until the end, cold and warm; the plan found, and how far from the best "
        "it can be. All defaults, two cores.",
        {
            "case": "case",
            "cold_s": "cold",
            "warm_s": "warm",
            "cold_good_s": "good plan, cold",
            "first_good_s": "good plan, warm",
            "cold_search_s": "search, cold",
            "search_s": "search, warm",
            "plan_ms": "plan, ms",
            "gap": "gap",
        },
    ),
    "timeline": Section(
        "Drawing a timeline",
        "Against matplotlib's `barh` for a figure of the same size.",
        {"case": "plan", "tasks": "tasks", "lanes": "lanes", "ratio_barh": "times faster"},
    ),
    "scale": Section(
        "A whole step of GPT-3",
        "From priced tables to step time and memory, for GPT-3 175B as Megatron-LM runs it and "
        "other sizes of it: tasks played, milliseconds for all, those for the playing alone, how "
        "many times longer its tasks and tensors take where no layer is extrapolated from others, "
        "and the memory that a simulation holds in 10⁶ bytes.",
        {
            "case": "model and cluster",
            "tasks": "tasks",
            "ms": "ms",
            "play_ms": "of it playing",
            "extrapolating": "times faster",
            "mb": "MB",
        },
    ),
}


def table(lines: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of Markdown: the given fields of the lines that have all of them.

    Example:
        >>> print(table([{"case": "a", "ms": 0.5}, {"case": "b"}], {"case": "what", "ms": "ms"}))
        | what | ms |
        |---|---:|
        | a | 0.5 |
    """
    rows = [[line[name] for name in columns] for line in lines if columns.keys() <= line.keys()]
    aligned = [
        "---:" if all(_is_number(row[i]) for row in rows) else "---" for i in range(len(columns))
    ]
    written = [[_cell(value) for value in row] for row in rows]
    return "\n".join(
        "|" + "|".join(cells) + "|"
        for cells in (
            [f" {name} " for name in columns.values()],
            aligned,
            *([f" {cell} " for cell in row] for row in written),
        )
    )


def page(folder: Path) -> str:
    """The page of all files of a folder.

    Raises:
        ValueError: a file is not of a known benchmark, or a line of it is no JSON object.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    for name in files.keys() - SECTIONS.keys():
        raise ValueError(f"{files[name]}: no section for it; there are {', '.join(SECTIONS)}")
    parts = [HEADER]
    for name, section in SECTIONS.items():
        if name in files:
            made = table(read_lines(files[name]), section.columns)
            command = f"`python -m benchmarks.{name}`"
            parts.append(f"\n## {section.title}\n\n{section.text} {command}\n\n{made}\n")
    return "".join(parts)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line.

    Raises:
        ValueError: names the file and the line that is not one.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: {line[:40]} is no JSON object")
        found.append(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return str(value)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("folder", type=Path, help="of the JSON lines")
    parser.add_argument("out", type=Path, help="page to write")
    arguments = parser.parse_args()
    arguments.out.write_text(page(arguments.folder), encoding="utf-8")


if __name__ == "__main__":
    main()
