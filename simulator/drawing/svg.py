"""A drawing of boxes, lines and words that becomes the text of an SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
LETTER_WIDTH = 0.68
"""Of a wide letter, in sizes of the font: words shall end inside the picture."""

COLOURS = ("#4a8ac9", "#e8943a", "#4fa066", "#d0605c", "#9a80cc", "#3aa5a5", "#c2a02f", "#b0708f")
"""Of things that are told apart; told on white and on black alike."""

GREY = "#8a8a8a"


class Drawing:
    """Shapes on a canvas that grows with them; lengths in pixels.

    Example:
        >>> drawing = Drawing()
        >>> drawing.text(0, 12, "x < y")
        >>> "x &lt; y" in drawing.svg("an inequality")
        True
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.width = self.height = 0.0

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        colour: str = GREY,
        fill: float = 0.0,
        dashed: bool = False,
        tip: str = "",
    ) -> None:
        """A rounded box; `fill` from 0 (hollow) to 1, `tip` shown under the pointer."""
        self._grow(x + width, y + height)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        inside = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{colour}" fill-opacity="{fill:g}" stroke="{colour}"{dashes}>{inside}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        anchor: str = "start",
        bold: bool = False,
        faint: bool = False,
        tip: str = "",
    ) -> None:
        """Words whose baseline is at `y`; `anchor` is start, middle or end."""
        shift = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self._grow(x + shift * text_width(words, size), y + size / 3)
        weight = ' font-weight="600"' if bold else ""
        opacity = ' fill-opacity="0.65"' if faint else ""
        inside = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}'
            f'{opacity} fill="currentColor">{html.escape(words)}{inside}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], *, colour: str = GREY, dashed: bool = False
    ) -> None:
        """A line from point to point."""
        self._grow(max(x for x, _ in points), max(y for _, y in points))
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:.6g},{y:.6g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
        )

    def svg(self, label: str) -> str:
        """The text of the picture; `label` is what it is called for those who hear it."""
        width, height = self.width + 4, self.height + 4
        return (
            '<div style="overflow-x:auto">'
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(label)}"'
            f' width="{width:.0f}" height="{height:.0f}" viewBox="-2 -2 {width:.0f} {height:.0f}" '
            f'font-family="{FONT}">{"".join(self._parts)}</svg></div>'
        )

    def _grow(self, right: float, bottom: float) -> None:
        self.width, self.height = max(self.width, right), max(self.height, bottom)


def text_width(words: str, size: float = 12) -> float:
    """About how wide words are, in pixels."""
    return len(words) * LETTER_WIDTH * size


def shortened(words: str, most: int) -> str:
    """Words of at most so many letters, an ellipsis for the others.

    Example:
        >>> shortened("parameters", 6)
        'param…'
    """
    return words if len(words) <= most else words[: most - 1] + "…"
