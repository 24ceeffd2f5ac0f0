"""How a search got to its plan: the best step time after so many evaluations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stratagem.simulator.base.units import format_duration
from stratagem.simulator.drawing.svg import COLOURS, Drawing

WIDTH, HEIGHT, LEFT = 520.0, 150.0, 76.0


def convergence_curve(points: Sequence[tuple[int, float]], bound: float | None) -> str:
    """The HTML of the picture; nothing where fewer than two plans were met.

    Example:
        >>> "lower bound" in convergence_curve([(0, 0.031), (500, 0.029)], 0.028)
        True

    Args:
        points: evaluations so far, and the best step time by then in seconds.
        bound: seconds under which no plan is, drawn as a dashed line.
    """
    known = [(x, y) for x, y in points if math.isfinite(y)]
    if len(known) < 2:
        return ""
    low = min(y for _, y in known) if bound is None else min(bound, *(y for _, y in known))
    high = max(y for _, y in known)
    span, most = (high - low) or 1.0, max(x for x, _ in known) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most * WIDTH, 26 + (high - y) / span * HEIGHT

    drawing = Drawing()
    drawing.text(0, 12, "best step found, by plans evaluated", bold=True)
    corners: list[tuple[float, float]] = []
    for (x, y), (_, before) in zip(known, [known[0], *known], strict=False):
        corners += [at(x, before), at(x, y)]
    drawing.line([*corners], colour=COLOURS[0])
    drawing.line([(LEFT, 26), (LEFT, 26 + HEIGHT), (LEFT + WIDTH, 26 + HEIGHT)])
    labels = {at(0, high)[1]: format_duration(high)}
    labels[at(0, known[-1][1])[1]] = format_duration(known[-1][1])
    if bound is not None:
        y = at(0, bound)[1]
        drawing.line([(LEFT, y), (LEFT + WIDTH, y)], colour=COLOURS[3], dashed=True)
        text = f"lower bound {format_duration(bound)}"
        drawing.text(LEFT + WIDTH - 4, y - 5, text, size=11, anchor="end")
    for height, label in labels.items():
        drawing.text(LEFT - 6, height + 4, label, size=11, anchor="end")
    drawing.text(LEFT, 42 + HEIGHT, "0", size=11, faint=True)
    drawing.text(LEFT + WIDTH, 42 + HEIGHT, f"{most:,}", size=11, anchor="end", faint=True)
    return drawing.svg("best step time by plans evaluated")
