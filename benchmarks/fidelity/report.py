"""The page on accuracy: scores, pictures of predicted against measured, rows that are far off."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.fidelity.predict import Outcome
from benchmarks.fidelity.reasons import FAR, far_off

Assessed = Mapping[str, tuple[Sequence[Outcome], Mapping[str, Any]]]
"""By file: the outcomes of its runs, and its line."""

COLUMNS = {
    "file": "set",
    "rows": "rows",
    "scored": "scored",
    "mape": "mean error",
    "median": "median",
    "p90": "90th percentile",
    "bias": "bias",
    "spearman": "rank correlation",
    "regret_mean": "regret",
    "memory_mape": "memory error",
    "fit_false_alarm": "false alarms",
    "fit_recall": "recall",
}
MOST_LISTED = 12
HEADER = """# Accuracy

How far are predicted training steps from steps that others measured on their clusters? Every run
is stated as a model, a cluster and a training setup, made into a plan and played by the simulator
that the search uses. Constants come from timings of single kernels, and at most five per cluster
from its own runs (`python -m benchmarks.fit_clusters`). This page is written by

    python -m benchmarks.fidelity --data DIR --report docs/accuracy.md

Errors are per cent of the measured value. *Regret*: choosing among the measured plans of a model
and number of devices the one that is predicted to be fastest of those that leave a tenth of the
memory free, how much slower it was than the fastest. *False alarms*: runs that ran although they
were predicted not to fit. *Recall*: runs that did not run and were predicted not to fit.
"""


def write_report(assessed: Assessed, page: Path) -> None:
    """Write the page and its pictures, which lie beside it in a folder of its name."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    _plot_times(assessed, folder / "steps.png")
    _plot_memory(assessed, folder / "memory.png")
    parts = [
        HEADER,
        _score_table([line for _, line in assessed.values()]),
        f"![Predicted against measured step times]({folder.name}/steps.png)\n",
        f"![Predicted against measured peak memory]({folder.name}/memory.png)\n"
        if (folder / "memory.png").exists()
        else "",
        f"## Rows that are more than {FAR:.0%} off\n",
        *(_far_table(name, outcomes) for name, (outcomes, _) in assessed.items()),
        "## Rows that are not scored\n",
        *(_left_out(name, line) for name, (_, line) in assessed.items()),
    ]
    page.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _score_table(lines: Sequence[Mapping[str, Any]]) -> str:
    head = "| " + " | ".join(COLUMNS.values()) + " |"
    rule = "|" + "---|" * len(COLUMNS)
    rows = ["| " + " | ".join(_cell(line[key]) for key in COLUMNS) + " |" for line in lines]
    return "\n".join([head, rule, *rows]) + "\n"


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _far_table(name: str, outcomes: Sequence[Outcome]) -> str:
    far = far_off(outcomes)
    if not far:
        return ""
    counts = Counter(re.sub(r"\d+ runs", "other runs", reason) for _, reason in far)
    lines = [f"### {name}: {len(far)}\n"]
    lines += ["| row | run | predicted s | measured s | error % | most likely reason |"]
    lines += ["|---|---|---|---|---|---|"]
    for outcome, reason in far[:MOST_LISTED]:
        run = outcome.run
        lines.append(
            f"| {run.row} | {run.label} | {outcome.seconds:.3g} | {run.seconds:.3g} | "
            f"{100 * outcome.error:+.0f} | {reason} |"
        )
    if len(far) > MOST_LISTED:
        rest = "\n".join(f"* {n}: {reason}" for reason, n in counts.most_common())
        lines.append(f"\nAll {len(far)}, by reason:\n\n{rest}")
    return "\n".join(lines) + "\n"


def _left_out(name: str, line: Mapping[str, Any]) -> str:
    if not line["left_out"]:
        return ""
    return f"* {name}: " + "; ".join(f"{n} × {why}" for why, n in line["left_out"].items())


def _plot_times(assessed: Assessed, path: Path) -> None:
    panels = {
        name: [(o.run.seconds, o.seconds, o.run.group[0]) for o in outcomes if o.run.seconds]
        for name, (outcomes, _) in assessed.items()
    }
    _plot(panels, "step time, s", 0.1, path)


def _plot_memory(assessed: Assessed, path: Path) -> None:
    panels = {
        name: [
            (o.run.peak_bytes / 1e9, o.peak_bytes / 1e9, o.run.group[0])
            for o in outcomes
            if o.run.peak_bytes
        ]
        for name, (outcomes, _) in assessed.items()
    }
    _plot(panels, "peak memory, GB", 0.1, path)


def _plot(
    panels: Mapping[str, Sequence[tuple[float, float, str]]], what: str, band: float, path: Path
) -> None:
    """A panel a set: predicted over measured, with the diagonal and a band around it."""
    filled = {name: points for name, points in panels.items() if points}
    if not filled:
        return
    columns = min(3, len(filled))
    rows = -(-len(filled) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 4.0 * rows), squeeze=False, layout="constrained"
    )
    for axis, (name, points) in zip(axes.flat, filled.items(), strict=False):
        _panel(axis, name.removesuffix(".csv"), points, what, band)
    for axis in list(axes.flat)[len(filled) :]:
        axis.set_axis_off()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(
    axis: Axes, name: str, points: Sequence[tuple[float, float, str]], what: str, band: float
) -> None:
    measured, predicted = np.array([p[:2] for p in points]).T
    low = min(measured.min(), predicted.min()) / 1.15
    high = max(measured.max(), predicted.max()) * 1.15
    line = np.array([low, high])
    axis.fill_between(line, line * (1 - band), line * (1 + band), color="0.9", zorder=0)
    axis.plot(line, line, color="0.6", linewidth=0.8, zorder=1)
    kinds = sorted({kind.split()[0] for *_, kind in points})
    for number, kind in enumerate(kinds):
        chosen = [i for i, (*_, k) in enumerate(points) if k.split()[0] == kind]
        axis.scatter(
            measured[chosen],
            predicted[chosen],
            s=11,
            alpha=0.75,
            linewidths=0,
            color=plt.get_cmap("tab10")(number % 10),
            label=kind if len(kinds) <= 10 else None,
        )
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    marks = (1.0, 2.0, 5.0) if high > 5 * low else (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(subs=marks))
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        side.set_minor_formatter(NullFormatter())
    axis.set_title(f"{name} ({len(points)})", fontsize=10)
    axis.set_xlabel(f"measured {what}")
    axis.set_ylabel(f"predicted {what}")
    if 1 < len(kinds) <= 10:
        axis.legend(fontsize=7, loc="upper left", frameon=False)
