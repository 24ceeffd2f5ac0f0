"""The pace of an environment's times, and what its cores took on average (see `core_pace`).

The speed of a core drifts, so operators timed one after the other are timed at unlike paces. All
times of an environment are brought to one, that of its first profile; what the cores took on
average, over all profiles and runs that were learned from, is kept beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import Measurement, PaceOf, pace_key
from stratagem.simulator.hardware.core_pace import at_pace
from stratagem.simulator.plan.provenance import Environment

MOST_LOOKS = 2000
"""What older looks count together beside new ones."""


def keep_pace(cache: TimingCache, environment: Environment, looks: Sequence[float]) -> float:
    """Keep what the reference kernel took in a profile, and say to which pace times are brought.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     keep_pace(cache, describe_environment(load=1), [4.1e-5, 5.0e-5, 3.9e-5])
        4.33e-05

    Args:
        cache: where it is kept.
        environment: of the times.
        looks: seconds of the reference kernel, seconds apart.

    Returns:
        Seconds of the reference kernel.
    """
    key = pace_key(environment, PaceOf.CORES)
    found = _together(cache.own(key), looks)
    cache.put(key, found)
    whole = pace_key(environment, PaceOf.TIMES)
    kept = cache.own(whole)
    if kept is None:
        cache.put(whole, found)
        return found.median_s
    return kept.median_s


def brought(measured: Measurement, before: float, after: float, elasticity: float) -> Measurement:
    """A time at another pace.

    Example:
        >>> brought(Measurement(1.0, 0.1, 5), 1e-5, 2e-5, 1.0).median_s
        2.0
    """
    if measured.error:
        return measured
    return replace(measured, median_s=at_pace(measured.median_s, before, after, elasticity))


def _together(kept: Measurement | None, looks: Sequence[float]) -> Measurement:
    """Mean and spread of old looks and new ones."""
    mean = statistics.fmean(looks)
    square = statistics.fmean(each**2 for each in looks)
    count = len(looks)
    if kept is not None:
        old = min(kept.repeats, MOST_LOOKS)
        share = count / (old + count)
        before = kept.median_s
        square = share * square + (1 - share) * before**2 * (1 + kept.spread**2)
        mean, count = share * mean + (1 - share) * before, old + count
    return Measurement(mean, math.sqrt(max(square / mean**2 - 1, 0.0)), count)
