"""The α and β that explain times of collectives: of each kind, and of a link for all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from stratagem.profiler.timing.collective_timing import CollectiveTiming
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.hardware.cluster import GroupFigures, Link
from stratagem.simulator.hardware.collective_kinds import Collective, KindFigures
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink, axis_link

LEAST_LATENCY, LEAST_SECONDS_PER_BYTE = 1e-12, 1e-16
"""Of a fit: far below what any link shows."""
ERROR_DIGITS = 4
"""Of the error of a fit and of a factor: what is behind is rounding."""
MOST_LATER = 10.0
"""The largest factor on latencies of what is needed later."""
LEAST_SIZES = 3
"""Of messages of a kind that goes by figures of its own."""


@dataclass(frozen=True)
class CollectiveFit:
    """The α–β model of a kind of collective in groups of `size`.

    `error` is the root mean square of ln(model / measured) over the `num_sizes` timed messages.
    """

    kind: Collective
    size: int
    latency_us: float
    bandwidth_gb_s: float
    num_sizes: int
    error: float


def fit_collectives(timings: Sequence[CollectiveTiming]) -> list[CollectiveFit]:
    """The α and β that explain each kind in each group size best.

    Example:
        >>> sizes = (10**4, 10**6, 10**7)
        >>> timings = [CollectiveTiming(Collective.SEND, n, 2, 1e-5 + n * 1e-9) for n in sizes]
        >>> (fitted,) = fit_collectives(timings)
        >>> round(fitted.latency_us, 3), round(fitted.bandwidth_gb_s, 3)
        (10.0, 1.0)

    Raises:
        ValueError: as `fit_link` does.
    """
    cases: dict[tuple[Collective, int], list[CollectiveTiming]] = {}
    for timing in timings:
        if timing.later:
            continue
        cases.setdefault((timing.kind, timing.size), []).append(timing)
    fits: list[CollectiveFit] = []
    for (kind, size), found in cases.items():
        latency, per_byte, error = _alpha_beta(found, f"{kind.value} of {size} ranks")
        fits.append(CollectiveFit(kind, size, latency * 1e6, 1e-9 / per_byte, len(found), error))
    return fits


def fit_link(
    timings: Sequence[CollectiveTiming], name: str, *, shares_compute: bool = False
) -> Link:
    """The link whose model explains `timings` best: least squares of logarithms.

    Messages between two ranks give its latency and bandwidth, collectives those of groups of their
    size (`Link.by_group_size`), all kinds together and each by itself; where there are only
    messages or only collectives, they give both. Errors are root mean squares of logarithms.

    Example:
        >>> small = CollectiveTiming(Collective.SEND, 10**4, 2, 2e-5)
        >>> large = CollectiveTiming(Collective.SEND, 10**7, 2, 1.001e-2)
        >>> fitted = fit_link([small, large], "wire")
        >>> round(fitted.latency_us, 3), round(fitted.bandwidth_gb_s, 3)
        (10.0, 1.0)

    Args:
        timings: of at least two sizes.
        name: what to call the link.
        shares_compute: whether a transfer keeps the device's cores busy, as between CPU processes.

    Raises:
        ValueError: when there are too few timings, or they do not grow with the number of bytes.
    """
    later = [timing for timing in timings if timing.later]
    timings = sorted(
        (timing for timing in timings if not timing.later),
        key=lambda timing: (timing.kind.value, timing.nbytes),
    )
    messages = [timing for timing in timings if timing.kind is Collective.SEND]
    groups: list[GroupFigures] = []
    for size in sorted({timing.size for timing in timings if timing.kind is not Collective.SEND}):
        found = [t for t in timings if t.size == size and t.kind is not Collective.SEND]
        sums = [timing for timing in later if timing.size == size]
        groups.append(_group(name, size, found, sums))
    latency, per_byte, error = _alpha_beta(messages or timings, f"link {name!r}")
    return Link(
        name,
        1e-9 / per_byte,
        latency * 1e6,
        shares_compute,
        by_group_size=tuple(groups),
        relative_error=round(error, ERROR_DIGITS),
    )


def _group(
    name: str,
    size: int,
    found: Sequence[CollectiveTiming],
    sums: Sequence[CollectiveTiming],
) -> GroupFigures:
    """What groups of a size show: all kinds, each kind, and `sums` that add to computing."""
    latency, per_byte, error = _alpha_beta(found, f"link {name!r}, groups of {size}")
    kinds = sorted({timing.kind for timing in found}, key=lambda kind: kind.value)
    fits: dict[Collective, tuple[float, float, float]] = {}
    for kind in kinds if len(kinds) > 1 else ():
        of_kind = [timing for timing in found if timing.kind is kind]
        enough = len({timing.nbytes for timing in of_kind}) >= LEAST_SIZES
        if enough and _grows((fit := _fitted(of_kind))[1]):
            fits[kind] = fit
    off = [fits[kind][2] if kind in fits else error for kind in kinds]
    figures = GroupFigures(
        size,
        1e-9 / per_byte,
        latency * 1e6,
        wait=statistics.fmean(timing.wait for timing in found),
        by_kind=tuple(
            KindFigures(kind, latency * 1e6, 1e-9 / per_byte)
            for kind, (latency, per_byte, _) in fits.items()
        ),
        relative_error=round(math.sqrt(statistics.fmean(x**2 for x in off)), ERROR_DIGITS),
    )
    return replace(figures, later=_later(sums, figures)) if sums else figures


def _later(sums: Sequence[CollectiveTiming], figures: GroupFigures) -> float:
    """The factor on latencies with which what sums add to computing is right on average."""
    link = axis_link(Link("", 1.0, 0.0, by_group_size=(figures,)), False, 1, figures.size)

    def off(factor: float) -> float:
        seen = replace(link, later_factor=factor).later
        return statistics.fmean(
            math.log(collective_time(each.kind, each.nbytes, each.size, seen) / each.seconds)
            for each in sums
        )

    if off(0.0) >= 0:
        return 0.0
    if off(MOST_LATER) <= 0:
        return MOST_LATER
    return round(float(scipy.optimize.brentq(off, 0.0, MOST_LATER)), ERROR_DIGITS)


def _alpha_beta(timings: Sequence[CollectiveTiming], what: str) -> tuple[float, float, float]:
    """What `_fitted` gives, of timings that can tell latency from bandwidth."""
    rows = np.array([_model_row(timing) for timing in timings]).reshape(-1, 2)
    if np.linalg.matrix_rank(rows) < 2:
        raise ValueError(
            f"{what}: {len(timings)} timings cannot tell latency from bandwidth; time a small and "
            "a large message"
        )
    found = _fitted(timings)
    if not _grows(found[1]):
        largest = max(timing.nbytes for timing in timings)
        raise ValueError(
            f"{what}: times do not grow with size up to {largest} bytes, so its bandwidth cannot "
            "be seen; time larger messages"
        )
    return found


def _grows(per_byte: float) -> bool:
    """Whether times grow with size: those that do not end at the lower bound of a byte."""
    return per_byte >= 2 * LEAST_SECONDS_PER_BYTE


def _fitted(timings: Sequence[CollectiveTiming]) -> tuple[float, float, float]:
    """Seconds a message and a byte, and the root mean square of the logarithmic errors."""
    rows = np.array([_model_row(timing) for timing in timings])
    seconds = np.array([timing.seconds for timing in timings])
    relative = rows / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    start, _ = scipy.optimize.nnls(relative / scale, np.ones(len(timings)))

    def off(logarithms: Floats) -> Floats:
        link = _plain_link(*np.exp(logarithms).tolist())
        said = [collective_time(each.kind, each.nbytes, each.size, link) for each in timings]
        return np.asarray(np.log(said / seconds))

    # Times that do not grow end at the lower bound of a byte, those without latency at that of it.
    smallest = np.log([LEAST_LATENCY, LEAST_SECONDS_PER_BYTE])
    first = np.maximum(np.log(np.maximum(start / scale, 1e-300)), smallest + 1e-6)
    found = scipy.optimize.least_squares(
        off, first, bounds=(smallest, np.inf), ftol=1e-12, gtol=1e-12
    )
    latency, per_byte = (float(value) for value in np.exp(found.x))
    return latency, per_byte, float(np.sqrt(np.mean(np.square(found.fun))))


def _model_row(timing: CollectiveTiming) -> tuple[float, float]:
    """How often the model counts the latency, and how many bytes it counts."""
    kind, nbytes, size = timing.kind, timing.nbytes, timing.size
    return (
        collective_time(kind, nbytes, size, _plain_link(1.0, 0.0)),
        collective_time(kind, nbytes, size, _plain_link(0.0, 1.0)),
    )


def _plain_link(latency: float, seconds_per_byte: float) -> AxisLink:
    return AxisLink(latency, seconds_per_byte, crosses_nodes=False, shares_compute=False)
