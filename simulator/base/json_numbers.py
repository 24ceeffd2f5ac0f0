"""Numbers that JSON has no name for: infinities and what is no number."""

from __future__ import annotations

import math
from typing import Any

_NUMBER = "number"


def marked(value: Any) -> Any:
    """A value for JSON, in which ``-inf`` becomes ``{"number": "-inf"}``.

    Example:
        >>> marked([1.0, float("inf")])
        [1.0, {'number': 'inf'}]
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if isinstance(value, dict):
        return {key: marked(each) for key, each in value.items()}
    return [marked(each) for each in value] if isinstance(value, list) else value


def unmarked(value: Any) -> Any:
    """The value that `marked` was given."""
    if isinstance(value, dict) and set(value) == {_NUMBER}:
        return float(value[_NUMBER])
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items()}
    return [unmarked(each) for each in value] if isinstance(value, list) else value
