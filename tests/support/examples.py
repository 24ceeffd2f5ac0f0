"""How many examples hypothesis draws: a share of them in `make test`, all in `make test-all`."""

from __future__ import annotations

SHARE = 0.4
"""What a run without long tests draws; each run draws others."""

FEWEST = 20
"""Where there are fewer, all are drawn."""

_draws_all = [True]


def begin(marks: str) -> None:
    """Draw as many as tests with these marks ask for, the expression that pytest was given."""
    _draws_all[0] = "not long" not in marks or "long or not long" in marks


def examples(count: int) -> int:
    """For `max_examples`: `count` where long tests run too, or a share of it.

    Example:
        >>> begin("not long")
        >>> examples(60), examples(10)
        (24, 10)
    """
    return count if _draws_all[0] else max(min(count, FEWEST), round(SHARE * count))
