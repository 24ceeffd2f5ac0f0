"""How many examples hypothesis draws: a share of them in `make test`, all in `make test-all`."""

from __future__ import annotations

SHARE = 0.1
"""What a run without long tests draws; each run draws others."""

FEWEST = 5
"""Where there are fewer, all are drawn; a test whose examples are whole searches says less."""

_draws_all = [True]


def begin(marks: str) -> None:
    """Draw as many as tests with these marks ask for, the expression that pytest was given."""
    _draws_all[0] = "not long" not in marks or "long or not long" in marks


def are_all_drawn() -> bool:
    """Whether long tests run too, and with them all cases of what else has a few."""
    return _draws_all[0]


def examples(count: int, few: int = FEWEST) -> int:
    """For `max_examples`: `count` where long tests run too, or a share of it, but `few` at least.

    Example:
        >>> begin("not long")
        >>> examples(60), examples(25), examples(5, few=2)
        (6, 5, 2)
    """
    return count if _draws_all[0] else max(min(count, few), round(SHARE * count))
