"""Drawings of memory over a step: what each device holds, and how much it could."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.base.units import readable_unit
from stratagem.simulator.simulation.device_memory import MemoryTimeline
from stratagem.simulator.stage.tensor_lifetimes import Purpose

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Purpose.PARAMETERS: "#2f6aa3",
    Purpose.GRADIENTS: "#cf4f4a",
    Purpose.UNSUMMED: "#e79a96",
    Purpose.OPTIMIZER: "#58a55c",
    Purpose.ACTIVATIONS: "#7fb2dd",
    Purpose.RECOMPUTED: "#9a86c6",
    Purpose.TENSORS: "#f2a23a",
    Purpose.BUFFERS: "#a5a5a5",
    Purpose.STASHED: "#173a5e",
    Purpose.RESULTS: "#3f9c96",
}

GIB = 2**30
WIDTH_INCHES, PANEL_INCHES = 12.0, 2.1
MAX_POINTS = 4000
"""Points of a curve; of more, those with the most bytes in each stretch are drawn."""

CAPACITY_SHOWN = 1.6
"""The capacity is a line in the panel where it is less than this times the peak, else words."""


def plot_memory(timelines: Sequence[MemoryTimeline], path: str | Path | None = None) -> Figure:
    """Draw the memory of some ranks one below the other, by what it is for.

    Example:
        >>> curves = [simulation.memory_timeline(rank) for rank in range(4)]  # doctest: +SKIP
        >>> plot_memory(curves, "memory.png")  # doctest: +SKIP

    Args:
        timelines: one a rank.
        path: where to save it too; the suffix is the format. It appears whole or not at all.

    Raises:
        ValueError: if there is no timeline.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    if not timelines:
        raise ValueError("0 memory timelines: give at least one to draw")
    count = len(timelines)
    figure = plt.figure(
        figsize=(WIDTH_INCHES, PANEL_INCHES * count + 0.7), dpi=120, layout="constrained"
    )
    plt.close(figure)
    panels = figure.subplots(count, sharex=True, sharey=True, squeeze=False)[:, 0].tolist()
    longest = max(int(timeline.times[-1]) for timeline in timelines)
    unit, length = readable_unit(longest * 1e-9)
    top = max(_top(timeline) for timeline in timelines)
    for panel, timeline in zip(panels, timelines, strict=True):
        _draw(panel, timeline, 1e-9 / length)
        panel.set_ylim(0, top / GIB)
        panel.set_xlim(0, longest * 1e-9 / length)
    panels[-1].set_xlabel(f"time in {unit}")
    used = [use for row, use in enumerate(Purpose) if any(t.nbytes[row].any() for t in timelines)]
    handles = [Patch(color=COLOURS[use]) for use in used]
    names = [use.value for use in used]
    figure.legend(handles, names, loc="outside upper center", ncols=len(used), frameon=False)
    if path is not None:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=Path(path).suffix.lstrip(".") or "png")
    return figure


def _top(timeline: MemoryTimeline) -> float:
    if timeline.capacity < CAPACITY_SHOWN * timeline.peak:
        return max(timeline.capacity, timeline.peak) * 1.12
    return timeline.peak * 1.25


def _draw(panel: Axes, timeline: MemoryTimeline, per_ns: float) -> None:
    chosen = drawn_points(timeline)
    times = timeline.times[chosen] * per_ns
    layers = [(use, timeline.nbytes[row][chosen] / GIB) for row, use in enumerate(Purpose)]
    below = np.zeros(times.size)
    for use, height in layers:
        if height.any():
            above = below + height
            panel.fill_between(times, below, above, step="post", color=COLOURS[use], linewidth=0)
            below = above
    at = int(timeline.total.argmax())
    peak, capacity = timeline.peak / GIB, timeline.capacity / GIB
    when = float(timeline.times[at] * per_ns)
    panel.plot([when], [peak], marker="v", color="black", markersize=5, clip_on=False)
    over = f", {peak - capacity:.2f} GiB too much" if peak > capacity else ""
    panel.set_title(
        f"{timeline.label}: peak {peak:.2f} of {capacity:.0f} GiB{over}",
        loc="left",
        fontsize=9,
        color="#b3261e" if over else "black",
    )
    panel.axhline(capacity, color="#b3261e", linewidth=1.2, linestyle="--")
    panel.set_ylabel("GiB")
    panel.spines[["top", "right"]].set_visible(False)


def drawn_points(timeline: MemoryTimeline) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which points of a curve to draw: all, or of equal stretches the last and the fullest."""
    size = timeline.times.size
    if size <= MAX_POINTS:
        return np.arange(size)
    edges = np.linspace(0, size, MAX_POINTS // 2 + 1).astype(np.int64)
    total = timeline.total
    fullest = [low + int(total[low:high].argmax()) for low, high in pairwise(edges)]
    return np.unique(np.concatenate([fullest, edges[1:] - 1]))
