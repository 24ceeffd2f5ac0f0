"""Drawing of a forecast: when possible runs end, and where their time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.forecast.hazards import DAY, HOUR
from stratagem.simulator.forecast.run_forecast import HIGH, LOW, RunForecast
from stratagem.simulator.forecast.training_run import Spent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Spent.USEFUL: "#58a55c",
    Spent.LOST: "#cf4f4a",
    Spent.SLOWED: "#f2a23a",
    Spent.STALLED: "#f7d08a",
    Spent.CHECKPOINTS: "#2f6aa3",
    Spent.RESTARTS: "#9a86c6",
    Spent.NODES: "#a5a5a5",
}


def plot_forecast(forecast: RunForecast, path: str | Path | None = None) -> Figure:
    """Draw when the possible runs end, and what their seconds are spent on.

    Example:
        >>> forecast = sg.forecasts.forecast_run(simulation, steps=500_000)  # doctest: +SKIP
        >>> plot_forecast(forecast, "run.png")  # doctest: +SKIP

    Args:
        forecast: its runs.
        path: where to save it too; the suffix is the format. It appears whole or not at all.
    """
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(9.0, 4.6), dpi=120, layout="constrained")
    plt.close(figure)
    above, below = figure.subplots(2, 1, height_ratios=(2.2, 1.0))
    _draw_ends(above, forecast)
    _draw_shares(below, forecast)
    if path is not None:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=Path(path).suffix.lstrip(".") or "png")
    return figure


def _draw_ends(panel: Axes, forecast: RunForecast) -> None:
    unit, length = ("days", DAY) if forecast.seconds.max() > 2 * DAY else ("hours", HOUR)
    ends = np.sort(forecast.seconds) / length
    low, high = (each / length for each in forecast.interval)
    panel.axvspan(low, high, color="#2f6aa3", alpha=0.12, linewidth=0)
    shares = np.arange(1, ends.size + 1) / ends.size
    panel.step(ends, 100 * shares, where="post", color="#2f6aa3", linewidth=1.8)
    middle = float(np.median(ends))
    panel.plot([middle], [50], marker="o", color="#2f6aa3", markersize=6)
    panel.annotate(f" {middle:,.1f} {unit}", (middle, 50), va="top", fontsize=9)
    panel.set_ylim(0, 100)
    panel.set_ylabel("% of runs at their end")
    panel.set_xlabel(unit)
    panel.set_title(
        f"{ends.size} possible runs; {100 * (HIGH - LOW):.0f} % end in the shaded time",
        loc="left",
        fontsize=10,
    )
    panel.spines[["top", "right"]].set_visible(False)


def _draw_shares(panel: Axes, forecast: RunForecast) -> None:
    means = 100 * (forecast.spent / forecast.seconds[:, None]).mean(axis=0)
    left = 0.0
    for k, kind in enumerate(Spent):
        if means[k] > 0:
            label = f"{kind.value}, {means[k]:.1f} %"
            panel.barh([0], [means[k]], left=left, color=COLOURS[kind], label=label)
            left += float(means[k])
    panel.set_xlim(0, 100)
    panel.set_yticks([])
    panel.set_xlabel("% of the time, in the mean")
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=3, frameon=False, fontsize=9
    )
