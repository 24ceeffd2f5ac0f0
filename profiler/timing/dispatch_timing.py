"""What the executor does around an operator: the time of an instruction beyond that of its kernel.

Looking up values, the tape, views, letting go of what is not needed any more: the same for every
operator, and a good part of a step of small ones. On a CPU it adds to the kernel; a GPU goes on
with its queue meanwhile, and waits only where launches take longer than kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import (
    Launched,
    Measurement,
    TimingKey,
    dispatch_key,
    launched_key,
)
from stratagem.profiler.machine.device_clocks import describe_environment, num_threads
from stratagem.profiler.timing.core_paces import timed_at_one_pace
from stratagem.simulator.hardware.core_pace import OF_PRODUCTS
from stratagem.simulator.kernel_times.cost_model import Direction

Part = TypeVar("Part")

MeasureDispatch = Callable[[], dict[Direction, Measurement]]
"""Seconds that a pass of an operator takes beyond its kernel on a CPU, by direction."""


def profile_dispatch(
    cache: TimingCache,
    measure: MeasureDispatch,
    *,
    threads: int = 1,
    load: int = 0,
) -> dict[Direction, Measurement]:
    """Measure the dispatch once and keep it in `cache`; what is there is not measured again.

    Example:
        >>> found = profile_dispatch(cache, executor_dispatch)  # doctest: +SKIP
        >>> found[Direction.FORWARD].median_s  # doctest: +SKIP
        4.5e-05

    Args:
        cache: where it is kept, at the pace of the other times: an interpreter works in the caches
            of its core, as products do.
        measure: what runs, such as
            `stratagem.calibration.executor_measurements.executor_dispatch`.
        threads: of one kernel on a CPU.
        load: part of the key only, so that `MeasuredCosts` finds it beside its operators.
    """
    environment = describe_environment(threads=threads, load=load)
    keys = {direction: dispatch_key(environment, direction) for direction in Direction}
    at_one_pace = partial(timed_at_one_pace, cache, environment, OF_PRODUCTS, measure)
    with num_threads(threads):
        return _once(cache, keys, at_one_pace)


MeasureLaunches = Callable[[], dict[Launched, Measurement]]
"""Seconds that the host of a GPU takes to launch all passes of a small step, in both ways."""


def profile_launches(
    cache: TimingCache, measure: MeasureLaunches, *, device: torch.device | str = "cuda"
) -> dict[Launched, Measurement]:
    """Measure once what launches take in a step of the executor, and keep it in `cache`.

    Launched one after the other passes take the host less than alone: its caches are warm, and a
    segment of operators goes back in one call. By how much is one ratio of a machine, which times
    of single launches are scaled by.

    Example:
        >>> found = profile_launches(cache, executor_launches)  # doctest: +SKIP
        >>> {how.value: each.median_s for how, each in found.items()}  # doctest: +SKIP
        {'by the executor': 0.0106, 'alone': 0.0221}

    Args:
        cache: where it is kept; what is there is not measured again.
        measure: what runs, such as
            `stratagem.calibration.executor_measurements.executor_launches`.
        device: the CUDA device.
    """
    environment = describe_environment(device)
    return _once(cache, {how: launched_key(environment, how) for how in Launched}, measure)


def _once(
    cache: TimingCache,
    keys: Mapping[Part, TimingKey],
    measure: Callable[[], dict[Part, Measurement]],
) -> dict[Part, Measurement]:
    """What the cache has under all keys, else what is measured now and kept there."""
    found = {part: cache.own(key) for part, key in keys.items()}
    known = {part: each for part, each in found.items() if each is not None}
    if len(known) == len(keys):
        return known
    measured = measure()
    for part, key in keys.items():
        cache.put(key, measured[part])
    return measured
