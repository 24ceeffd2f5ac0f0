"""Drawings of timelines: a row a lane, a colour a kind, predicted over measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_duration, readable_unit
from stratagem.simulator.timeline.timeline import SEPARATOR, Timeline, lane_group, shift

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from stratagem.simulator.timeline.step_critical_path import StepPath

    Reals = NDArray[np.floating[Any]]

COLOURS = {
    TaskKind.FORWARD: "#7fb2dd",
    TaskKind.BACKWARD: "#2f6aa3",
    TaskKind.RECOMPUTE: "#9a86c6",
    TaskKind.UPDATE: "#58a55c",
    TaskKind.COMMUNICATION: "#f2a23a",
    TaskKind.GRADIENT_SYNC: "#cf4f4a",
    TaskKind.OTHER: "#a5a5a5",
}
"""Blue computes, orange and red communicate; forward and backward differ in lightness."""

DARK = (TaskKind.BACKWARD, TaskKind.GRADIENT_SYNC)
"""Kinds on whose colour white letters are read best."""

IDLE_COLOUR = "#f3f3f3"

BAR_HEIGHT = 0.84
GROUP_GAP = 0.45
"""Both in lanes."""

LANE_INCHES = 0.27
MAX_INCHES = 24.0
WIDTH_INCHES = 14.0
LABEL_POINTS = 8
NAME_POINTS = 6.5
LETTER_WIDTH = 0.62
"""Of a typical letter, in heights of the font."""

MIN_OUTLINED_PIXELS = 5.0
"""Narrower tasks get no outline: it would be all there is to see of them."""

PATH_COLOUR = "#8e24aa"
PATH_LABEL = "critical path"


def plot_timeline(
    timeline: Timeline, ax: Axes | None = None, *, critical_path: StepPath | None = None
) -> Figure:
    """Draw one timeline, from its first start to its last end.

    Example:
        >>> figure = plot_timeline(predicted)  # doctest: +SKIP

    Args:
        timeline: a task gets its name written into it where that fits.
        ax: where to draw; without it, in a figure of its own, as high as the lanes need. The
            legend stands on its right: make the figure with ``layout="constrained"``.
        critical_path: drawn as a line under the tasks on it and between their lanes.

    Raises:
        ValueError: if the critical path runs on lanes that the timeline has not.
    """
    if ax is None:
        return plot_timelines([timeline], critical_path=critical_path)
    _draw([timeline], [ax], critical_path, [""])
    return ax.figure.canvas.figure


def plot_timelines(
    timelines: Sequence[Timeline],
    path: str | Path | None = None,
    *,
    critical_path: StepPath | None = None,
    remarks: Sequence[str] = (),
) -> Figure:
    """Draw timelines one below the other, on one time axis.

    Example:
        >>> plot_timelines([predicted, measured], "step.png")  # doctest: +SKIP

    Args:
        timelines: each is drawn from its own first start; titles compare the makespans with the
            first one's.
        path: where to save it too; the suffix is the format. It appears whole or not at all.
        critical_path: of the first timeline, drawn as a line under its tasks and between lanes.
        remarks: what the title of each timeline ends with; none without.

    Raises:
        ValueError: if there is no timeline, or the critical path runs on other lanes.
    """
    from matplotlib import pyplot as plt

    if not timelines:
        raise ValueError("0 timelines: give at least one to draw")
    heights = [_DrawnRows.of(timeline).height for timeline in timelines]
    inches = min(sum(max(height, 4) * LANE_INCHES + 0.75 for height in heights), MAX_INCHES)
    figure = plt.figure(figsize=(WIDTH_INCHES, inches), dpi=120, layout="constrained")
    # Notebooks show a figure that is returned; one that stays open as well they show twice.
    plt.close(figure)
    axes = figure.subplots(
        len(timelines),
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": [max(height, 4) for height in heights]},
    )
    _draw(timelines, axes[:, 0].tolist(), critical_path, remarks or [""] * len(timelines))
    if path is not None:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=Path(path).suffix.lstrip(".") or "png")
    return figure


@dataclass(frozen=True)
class _DrawnRows:
    """Where the lanes are, from top to bottom; the lanes of a group together.

    Attributes:
        position: [L], the middle of each lane.
        labels: [L], with the group's name on its first lane only.
        height: of all lanes.
    """

    position: Reals
    labels: tuple[str, ...]
    height: float

    @classmethod
    def of(cls, timeline: Timeline) -> _DrawnRows:
        groups: dict[str, list[int]] = {}
        for lane, name in enumerate(timeline.lanes):
            groups.setdefault(lane_group(name), []).append(lane)
        position = np.zeros(len(timeline.lanes))
        labels = list(timeline.lanes)
        top = 0.0
        for lanes in groups.values():
            for order, lane in enumerate(lanes):
                position[lane] = top + order + 0.5
                if order:
                    labels[lane] = labels[lane].partition(SEPARATOR)[2]
            top += len(lanes) + GROUP_GAP
        return cls(position, tuple(labels), max(top - GROUP_GAP, 1.0))


def _draw(
    timelines: Sequence[Timeline],
    axes: Sequence[Axes],
    critical_path: StepPath | None,
    remarks: Sequence[str],
) -> None:
    longest = max(timeline.duration for timeline in timelines)
    unit, length = readable_unit(longest)
    for timeline, ax, remark in zip(timelines, axes, remarks, strict=True):
        _draw_frame(timeline, ax, longest / length or 1.0)
        title = ", ".join(filter(None, (_title(timeline, timelines[0]), remark)))
        ax.set_title(title, loc="left", fontsize=10)
        ax.axvline(
            timeline.duration / length, color="#444444", linewidth=0.8, linestyle=(0, (4, 3))
        )
    axes[-1].set_xlabel(f"time ({unit})", fontsize=9)
    if critical_path is not None:
        _draw_path(timelines[0], critical_path, axes[0], length)
    _draw_legend(timelines, axes[0], critical_path is not None)
    # Only now the sizes are known, in pixels, that decide on outlines and names.
    axes[0].figure.canvas.figure.draw_without_rendering()
    for timeline, ax in zip(timelines, axes, strict=True):
        _draw_tasks(shift(timeline, -timeline.begin_ns), ax, length)


def _title(timeline: Timeline, first: Timeline) -> str:
    title = f"{timeline.label}: {format_duration(timeline.duration)}"
    if timeline is first or not first.duration:
        return title
    return f"{title}  ({timeline.duration / first.duration - 1:+.1%})"


def _draw_frame(timeline: Timeline, ax: Axes, longest: float) -> None:
    rows = _DrawnRows.of(timeline)
    ax.set_xlim(0, longest * 1.004)
    ax.set_ylim(rows.height + 0.15, -0.15)
    # Of very many lanes as many get a label as have room for one.
    lane_points = ax.bbox.height / rows.height * 72 / ax.figure.dpi
    step = math.ceil(LABEL_POINTS * 1.1 / lane_points)
    labels = rows.labels if step == 1 else timeline.lanes[::step]
    ax.set_yticks(rows.position[::step], labels, fontsize=LABEL_POINTS)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=LABEL_POINTS, color="#888888")
    ax.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.spines["bottom"].set_color("#888888")


def _draw_legend(timelines: Sequence[Timeline], ax: Axes, has_path: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {kind for timeline in timelines for kind in timeline.kinds}
    kinds = [Patch(color=COLOURS[kind], label=kind.value) for kind in COLOURS if kind in used]
    path = [Line2D([], [], color=PATH_COLOUR, linewidth=2, label=PATH_LABEL)] if has_path else []
    ax.legend(
        handles=[*kinds, *path],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=LABEL_POINTS,
    )


def _draw_tasks(timeline: Timeline, ax: Axes, length: float) -> None:
    left, right = timeline.start * 1e-9 / length, timeline.end * 1e-9 / length
    position = _DrawnRows.of(timeline).position
    middle = position[timeline.lane]
    whole = np.full_like(position, timeline.duration / length)
    _draw_bars(ax, 0 * whole, whole, position, facecolors=IDLE_COLOUR, zorder=0.1)
    pixels = (right - left) * ax.bbox.width / np.ptp(ax.get_xlim())
    kinds = np.array([kind.value for kind in timeline.kinds], dtype=str)
    for kind, colour in COLOURS.items():
        chosen = (kinds == kind.value) & (timeline.end > timeline.start)
        wide = np.flatnonzero(chosen & (pixels > MIN_OUTLINED_PIXELS))
        style: dict[str, Any] = {"facecolors": colour, "zorder": 2}
        _draw_bars(
            *(ax, left[wide], right[wide], middle[wide]),
            **(style | {"edgecolors": "white", "linewidths": 0.5}),
        )
        first, last = _runs(timeline, np.flatnonzero(chosen & (pixels <= MIN_OUTLINED_PIXELS)))
        # Narrow tasks are blended, not moved to whole pixels: a lane looks as full as it is.
        _draw_bars(
            *(ax, left[first], right[last], middle[first]),
            **(style | {"linewidths": 0.0, "snap": False}),
        )
    _draw_names(timeline, ax, pixels, (left + right) / 2, middle)


def _runs(timeline: Timeline, rows: Ints) -> tuple[Ints, Ints]:
    """Find the first and last rows of runs in which each starts when the one before it ends.

    Drawn one by one, their blended edges would look like gaps.
    """
    rows = rows[np.lexsort((timeline.start[rows], timeline.lane[rows]))]
    joined = (timeline.lane[rows[1:]] == timeline.lane[rows[:-1]]) & (
        timeline.start[rows[1:]] == timeline.end[rows[:-1]]
    )
    ends = np.ones(min(rows.size, 1), dtype=bool)
    return rows[np.concatenate([ends, ~joined])], rows[np.concatenate([~joined, ends])]


def _draw_path(timeline: Timeline, path: StepPath, ax: Axes, length: float) -> None:
    """A thick line under the tasks on the path, a thin one from lane to lane."""
    missing = {task.lane for task in path.tasks} - set(timeline.lanes)
    if missing:
        raise ValueError(
            f"the critical path runs on lane {min(missing)!r}, which timeline {timeline.label!r} "
            "has not: give the path of that timeline's simulation"
        )
    numbers = {lane: number for number, lane in enumerate(timeline.lanes)}
    lane = np.array([numbers[task.lane] for task in path.tasks], dtype=np.int64)
    if not lane.size:
        return
    bottom = _DrawnRows.of(timeline).position[lane] + BAR_HEIGHT / 2
    moves = np.flatnonzero(np.diff(lane))
    first, last = np.append(0, moves + 1), np.append(moves, lane.size - 1)
    begin = np.array([task.start for task in path.tasks]) * 1e-9 / length
    end = np.array([task.end for task in path.tasks]) * 1e-9 / length
    ax.hlines(bottom[first], begin[first], end[last], color=PATH_COLOUR, linewidth=2.0, zorder=4)
    ax.vlines(
        *(end[moves], bottom[moves], bottom[moves + 1]),
        color=PATH_COLOUR,
        linewidth=0.5,
        alpha=0.6,
        zorder=3.5,
    )


def _draw_bars(ax: Axes, left: Reals, right: Reals, middle: Reals, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    top, bottom = middle - BAR_HEIGHT / 2, middle + BAR_HEIGHT / 2
    corners = np.stack([left, top, left, bottom, right, bottom, right, top], axis=1)
    bars: Any = corners.reshape(-1, 4, 2)  # an array is drawn faster than the list it is typed as
    ax.add_collection(PolyCollection(bars, **style), autolim=False)


def _draw_names(timeline: Timeline, ax: Axes, pixels: Reals, centre: Reals, middle: Reals) -> None:
    letter_height = NAME_POINTS * ax.figure.dpi / 72
    letter = LETTER_WIDTH * letter_height
    lane_pixels = ax.bbox.height / np.ptp(ax.get_ylim())
    if lane_pixels * BAR_HEIGHT < 1.2 * letter_height:
        return
    lengths = np.array([len(name) for name in timeline.names])
    for row in np.flatnonzero((pixels > letter * (lengths + 0.8)) & (lengths > 0)):
        name = ax.text(
            centre[row],
            middle[row],
            timeline.names[row],
            fontsize=NAME_POINTS,
            color="white" if timeline.kinds[row] in DARK else "#1c1c1c",
            horizontalalignment="center",
            verticalalignment="center_baseline",
            clip_on=True,
            zorder=3,
        )
        name.set_in_layout(False)
