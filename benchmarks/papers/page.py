"""The page of claims, made of the lines that the benchmark prints."""

from __future__ import annotations

import json

from benchmarks.papers.claims import Line
from benchmarks.papers.systems import SYSTEMS
from benchmarks.tables import table

_HEADER = """\
# Papers

What founding papers of the field published, and what this library says of the same models on the
same clusters. Published figures are cited with their table or figure; clusters are
[presets](clusters.md#clusters-of-papers), plans are stated as papers state them, and step times
are simulated. Only `dgx-a100-superpod` and `p3.16xlarge` are calibrated on measured steps, so
ratios tell more than times. To renew the page:

<!-- not run: it takes five CPU minutes -->
```bash
python -m benchmarks.papers --out docs/papers.jsonl
python -m benchmarks.papers --page docs/papers.jsonl docs/papers.md
```

A claim *agrees* if all of its figures, ours over published, are in its *range*; *ratio* is where
they are farthest apart. Of times that this machine takes, which differ from run to run, and of
what papers give a least or a most of, the range is wide to the better side.
"""

_CLAIMS = {
    "paper": "paper",
    "claim": "claim",
    "source": "published in",
    "published": "published",
    "ours": "ours",
    "ratio": "ratio",
    "range": "range",
    "agrees": "agrees",
}

_SYSTEMS = {"system": "system", "does": "what it does", "where": "here", "lacks": "not here"}

_CELL = 3
"""Significant digits of a figure in the table."""


def page_of(text: str) -> str:
    """The page of some lines.

    Raises:
        ValueError: one is no JSON object.
    """
    lines: list[Line] = [json.loads(line) for line in text.splitlines()]
    agreeing = sum(line["agrees"] for line in lines)
    minutes = sum(line["seconds"] for line in lines) / 60
    parts = [
        _HEADER,
        f"Of {len(lines)} claims {agreeing} agree. All of them took {minutes:.0f} CPU minutes.\n",
        "## Claims\n",
        table([_cells(line) for line in lines], _CLAIMS) + "\n",
        "## What does not agree\n",
        "\n".join(_reasons(lines)) + "\n",
        "## Systems\n",
        "What each system does, and under which name it is found here: public names, *methods* "
        "that a search can be compared with (`baselines` of `sg.search`), *schedules* of "
        "pipelines.\n",
        table(
            [
                {
                    "system": each.name,
                    "does": each.does,
                    "where": each.where,
                    "lacks": each.lacks or "–",
                }
                for each in SYSTEMS
            ],
            _SYSTEMS,
        )
        + "\n",
    ]
    return "\n".join(parts)


def _cells(line: Line) -> Line:
    least, most = line["within"]
    return {
        **line,
        "published": _figures(line["published"], line["unit"]),
        "ours": _figures(line["ours"], line["unit"]),
        "range": f"{least:g} to {most:g}",
    }


def _figures(figures: dict[str, float], unit: str) -> str:
    """One figure alone, several with what each is of."""
    words = {name: f"{value:.{_digits(value)}g}" for name, value in figures.items()}
    if len(words) == 1:
        written = next(iter(words.values()))
    else:
        written = "; ".join(f"{name}: {value}" for name, value in words.items())
    return f"{written} {unit}".strip()


def _digits(value: float) -> int:
    """Whole numbers keep theirs."""
    return max(_CELL, len(str(int(abs(value)))))


def _reasons(lines: list[Line]) -> list[str]:
    return [
        f"- **{line['paper']}**, {line['claim']}: {line['reason']}."
        for line in lines
        if not line["agrees"]
    ]
