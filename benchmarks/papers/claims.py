"""A claim of a paper: what was published, how it is measured here, and whether the two agree."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, float]
"""Numbers by what they are of, such as the number of devices."""

DIGITS = 4
"""Significant digits of what is recorded."""


@dataclass(frozen=True)
class Outcome:
    """What was measured of a claim.

    Attributes:
        ours: figures of the same names as those published.
        reason: what else was measured that tells why they differ, if they do.
    """

    ours: Figures
    reason: str = ""


@dataclass(frozen=True)
class Claim:
    """Figures of a paper, and how this library comes to the same ones.

    Attributes:
        name: by which the command line knows it.
        paper: the system.
        source: the paper's identifier, and the table, figure or section in it.
        claim: what the figures are.
        unit: of the figures; empty for ratios.
        published: the figures, by what each is of.
        within: the least and the most that ours may be, as shares of the published ones.
        measure: comes to ours.
        is_timed: whether figures are times that this machine takes, which differ from run to run.
    """

    name: str
    paper: str
    source: str
    claim: str
    unit: str
    published: Figures
    within: tuple[float, float]
    measure: Callable[[], Outcome]
    is_timed: bool = False


Line = dict[str, Any]
"""What is recorded of a claim."""


def line_of(claim: Claim) -> Line:
    """Measure a claim, and set what comes of it beside what was published.

    `ratio` is that of ours to the published figure where they are farthest apart; the claim
    agrees if every one is in the range. `seconds` are those of all cores, of processes
    that it starts, too.

    Raises:
        ValueError: other figures were measured than were published, or they do not agree and
            nothing measured tells why.
    """
    began = cpu_seconds()
    found = claim.measure()
    seconds = cpu_seconds() - began
    if found.ours.keys() != claim.published.keys():
        raise ValueError(
            f"claim {claim.name!r}: {', '.join(found.ours)} were measured, but "
            f"{', '.join(claim.published)} were published; measure those"
        )
    ratios = [found.ours[each] / claim.published[each] for each in claim.published]
    least, most = claim.within
    agrees = all(least <= ratio <= most for ratio in ratios)
    if not agrees and not found.reason:
        raise ValueError(
            f"claim {claim.name!r}: ours are {min(ratios):.3g} to {max(ratios):.3g} of what was "
            f"published, outside {least} to {most}, and no reason was measured; measure one"
        )
    return {
        "name": claim.name,
        "paper": claim.paper,
        "source": claim.source,
        "claim": claim.claim,
        "unit": claim.unit,
        "published": {each: rounded(value) for each, value in claim.published.items()},
        "ours": {each: rounded(value) for each, value in found.ours.items()},
        "ratio": rounded(max(ratios, key=lambda ratio: abs(math.log(ratio)))),
        "within": list(claim.within),
        "agrees": agrees,
        "reason": "" if agrees else found.reason,
        "seconds": round(seconds, 1),
    }


def rounded(value: float) -> float:
    """A figure with the digits that are recorded.

    Example:
        >>> rounded(123.456), rounded(0.00123456)
        (123.5, 0.001235)
    """
    return float(f"{value:.{DIGITS}g}")


def cpu_seconds() -> float:
    """What this process and those that it waited for have computed so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
