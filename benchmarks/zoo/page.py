"""A page of what was tried, made of the lines that the benchmark prints."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.examples import OWN
from benchmarks.zoo.runner import Line

_TITLES = {
    "texts": "Language models of transformers",
    "families": "More families of transformers",
    "beyond_text": "Models of transformers that see or hear",
    "vision": "torchvision",
    "timm_models": "timm",
    "diffusion": "diffusers",
    "adapters": "Adapters of peft",
    "plain": "Plain torch",
}

_HEADER = """\
# What was tried

Models of other libraries, small, with random weights and not changed for this, and some that are
written by hand. Each is captured, searched for two and for three devices, and makes a step by the
plans found and by plans drawn at random, with ranks as threads. The loss and every gradient are
compared with those of one process of torch. The lists are made by a benchmark, which takes files
of your own models too:

<!-- not run: it takes an hour and needs the libraries -->
```bash
pip install -e '.[dev,zoo,models]'
python -m benchmarks.zoo > docs/zoo.jsonl
python -m benchmarks.zoo --page docs/zoo.jsonl docs/zoo.md
```

*Equal* says that loss and gradients are, as near as float32 can tell, or in float64 where batch
norms of a handful of values leave float32 nothing to tell. *Generic* is the share of operations in
operators that have no rule of their own, which
[torch runs on shards](your-model.md#operators-without-a-rule). *Products* are operations of
products against those that `torch.utils.flop_counter` counts in a forward pass: it counts no
attention that runs fused on CPUs, and of experts slots count up to the last one that is taken.

Lines are as they were measured. What was mended since, and what was not tried, is left to the next
run.
"""


def write_page(lines: Path, page: Path) -> None:
    """Write the page of the lines in a file.

    Raises:
        OSError: they cannot be read, or it cannot be written.
    """
    page.write_text(page_of(lines.read_text()))


def page_of(text: str) -> str:
    """The page of some lines.

    Raises:
        ValueError: one is no JSON object.
    """
    lines: list[Line] = [json.loads(line) for line in text.splitlines()]
    said = _docstrings()
    parts = [_HEADER, _summary(lines)]
    groups = dict.fromkeys(each["model"].partition(".")[0] for each in lines)
    for group in groups:
        own = [each for each in lines if each["model"].partition(".")[0] == group]
        parts.append(f"## {_TITLES.get(group, group)}\n\n{_table(own, said)}")
    return "\n".join([*parts, _refusals(lines)]).rstrip() + "\n"


def _summary(lines: Sequence[Line]) -> str:
    counts = Counter(key for line in lines for key, value in line.items() if value is True)
    crashes = sum(line["error"].startswith("crash") for line in lines)
    return (
        f"Of {len(lines)} models {counts['captured']} are captured, {counts['searched']} searched "
        f"and {counts['executed_equal']} executed equal; {crashes} end in something else than an "
        "error that is worded for users.\n"
    )


def _table(lines: Sequence[Line], said: dict[str, str]) -> str:
    rows = ["| model | | equal | generic | products |", "|---|---|---|---:|---:|"]
    for line in lines:
        name = line["model"]
        equal = "yes" if line["executed_equal"] else "**no**"
        share = "" if line["generic"] is None else f"{100 * line['generic']:.1f} %"
        ratio = "" if line["flops_ratio"] is None else f"{line['flops_ratio']:.3g}"
        short = name.partition(".")[2].replace("_", " ")
        rows.append(f"| {short} | {said.get(name, '')} | {equal} | {share} | {ratio} |")
    return "\n".join(rows) + "\n"


def _refusals(lines: Sequence[Line]) -> str:
    missing = [line for line in lines if not line["executed_equal"]]
    if not missing:
        return ""
    told = "\n".join(f"- **{line['model']}**: {_escaped(line['error'])}" for line in missing)
    return f"## What is not equal or not taken\n\n{told}\n"


def _escaped(error: str) -> str:
    """The words of an error, none of which is a mark of the page."""
    return error.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _docstrings() -> dict[str, str]:
    """The first line of what is said of each of the project's own models."""
    found = {}
    for path in OWN:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                said = (ast.get_docstring(node) or "").partition("\n")[0]
                found[f"{path.stem}.{node.name}"] = said
    return found
