"""The times of collectives in the timing cache: kept, found again, and held against new ones.

A link is fitted to dozens of times, which take half a minute to measure. `local_cluster` measures
a few of them, and goes by those that were kept where these are as before (`are_as_before`): what a
link is changes with the machine's load and with the speed of its cores, and shows in each.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import (
    IN_A_NODE,
    CollectiveKey,
    Measurement,
    later_key,
    meeting_key,
)
from stratagem.profiler.timing.collective_timing import (
    CUDA_SIZES,
    KINDS,
    LATER_SIZES,
    SIZES,
    CollectiveTiming,
    collective_cases,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.plan.provenance import Environment, ProcessBackend

LARGE_ALIKE, SMALL_ALIKE = 0.15, 0.5
"""How far the large ones, and the small ones, may be off on average for a link to be the same.

On an idle machine of two cores, one that is timed twice differs by 5 % where it is large and by
40 % where it is small: so much less can be told of latencies by a few.
"""


class LinkCases(NamedTuple):
    """What is timed of a link, as `time_collectives` takes it."""

    sizes: tuple[int, ...]
    kinds: tuple[Collective, ...]
    groups: tuple[int, ...]
    later: bool

    @property
    def cases(self) -> list[tuple[Collective, int, int]]:
        """(kind, bytes, ranks) of each but the sums that are needed later."""
        return collective_cases(self.sizes, self.kinds, self.groups)

    @classmethod
    def of_all(cls, count: int, backend: ProcessBackend) -> LinkCases:
        """All that a link between `count` ranks is fitted to: in groups of 2, 4, 8, … of them.

        Example:
            >>> LinkCases.of_all(6, "gloo").groups
            (2, 4, 6)
        """
        sizes = CUDA_SIZES if backend == "nccl" else SIZES
        powers = {2**k for k in range(1, count.bit_length()) if 2**k <= count}
        return cls(sizes, KINDS, tuple(sorted({count, *powers})), backend == "gloo")

    @classmethod
    def of_few(cls, count: int, backend: ProcessBackend) -> LinkCases:
        """What shows whether it still is that link: small and large ones of all ranks.

        Example:
            >>> LinkCases.of_few(6, "gloo").groups
            (6,)
        """
        sizes = LinkCases.of_all(count, backend).sizes
        kinds = Collective.ALL_REDUCE, Collective.ALL_GATHER  # The first computes, too.
        return cls((*sizes[:2], sizes[-1]), kinds, (count,), later=False)


def keep_collectives(
    cache: TimingCache,
    environment: Environment,
    timings: Sequence[CollectiveTiming],
    backend: str,
    *,
    link: str = IN_A_NODE,
    num_nodes: int = 1,
) -> None:
    """Keep the times of collectives in the cache, with their spread and repeats.

    Example:
        >>> found = time_collectives(communicator)  # doctest: +SKIP
        >>> keep_collectives(cache, describe_environment(), found, "gloo")  # doctest: +SKIP

    Args:
        cache: where they are kept, in place of earlier ones.
        environment: of every rank.
        timings: from `time_collectives`.
        backend: what carried them out: ``gloo`` or ``nccl``.
        link: class of the slowest link that the groups cross.
        num_nodes: over how many nodes each group is spread.
    """
    for timing in timings:
        what = timing.kind, timing.nbytes, timing.size
        key = CollectiveKey(environment, *what, backend, link, num_nodes)
        measured = Measurement(timing.seconds, timing.spread, timing.repeats)
        if timing.later:
            cache.put(later_key(key), measured)
        else:
            cache.put_collective(key, measured)
    waits = {timing.size: timing.wait for timing in timings if timing.kind is not Collective.SEND}
    for size, wait in waits.items():
        # A time cannot be 0 s, as a wait can.
        cache.put(meeting_key(environment, size, backend), Measurement(1.0 + wait, 0.0, 1))


def kept_collectives(
    cache: TimingCache,
    environment: Environment,
    asked: LinkCases,
    backend: ProcessBackend,
    *,
    link: str = IN_A_NODE,
) -> list[CollectiveTiming] | None:
    """What `time_collectives` found in a node, None where any of it is not kept.

    Example:
        >>> asked = LinkCases.of_all(2, "gloo")
        >>> kept_collectives(cache, describe_environment(), asked, "gloo")  # doctest: +SKIP

    Args:
        cache: where they may be kept.
        environment: of every rank.
        asked: what was timed.
        backend: what carried them out.
        link: the name of the link.
    """
    cases = [(each, False) for each in asked.cases]
    if asked.later:
        sums = itertools.product((Collective.ALL_REDUCE,), LATER_SIZES, asked.groups)
        cases += [(each, True) for each in sums]
    found: list[CollectiveTiming] = []
    for case, later in cases:
        key = CollectiveKey(environment, *case, backend, link)
        kept = cache.own(later_key(key)) if later else cache.get_collective(key)
        meeting = cache.own(meeting_key(environment, key.size, backend))
        if kept is None or kept.error or kept.origin or meeting is None:
            return None
        timing = CollectiveTiming(*case, kept.median_s, kept.spread, kept.repeats, later=later)
        waits = 0.0 if key.kind is Collective.SEND else meeting.median_s - 1.0
        found.append(replace(timing, wait=waits))
    return found


def are_as_before(kept: Sequence[CollectiveTiming], now: Sequence[CollectiveTiming]) -> bool:
    """Whether collectives take as long as those that were kept, the small ones and the large ones.

    Example:
        >>> timing = CollectiveTiming(Collective.ALL_REDUCE, 2**20, 2, 1e-3)
        >>> are_as_before([timing], [replace(timing, seconds=1.1e-3)])
        True
        >>> are_as_before([timing], [replace(timing, seconds=2e-3)])
        False

    Args:
        kept: with all cases of `now`.
        now: of the same group.
    """
    before = {(each.kind, each.nbytes, each.size): each.seconds for each in kept if not each.later}
    most = max(each.nbytes for each in now)
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for each in now:
        ratio = each.seconds / before[each.kind, each.nbytes, each.size]
        ratios[each.nbytes == most].append(math.log(ratio))
    return all(
        abs(statistics.fmean(found)) <= math.log1p(LARGE_ALIKE if are_large else SMALL_ALIKE)
        for are_large, found in ratios.items()
        if found
    )
