"""What the executor does around an operator: the time of an instruction beyond that of its kernel.

Looking up values, the tape, views, letting go of what is not needed any more: the same for every
operator, and a good part of a step of small ones. On a CPU it adds to the kernel; a GPU goes on
with its queue meanwhile, and waits only where launches take longer than kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import Measurement, dispatch_key
from stratagem.profiler.machine.device_clocks import describe_environment, num_threads
from stratagem.simulator.kernel_times.cost_model import Direction

MeasureDispatch = Callable[[], dict[Direction, Measurement]]
"""Seconds that a pass of an operator takes beyond its kernel on a CPU, by direction."""


def profile_dispatch(
    cache: TimingCache,
    measure: MeasureDispatch,
    *,
    device: torch.device | str = "cpu",
    threads: int = 1,
    load: int = 0,
) -> dict[Direction, Measurement]:
    """Measure the dispatch once and keep it in `cache`; what is there is not measured again.

    Example:
        >>> found = profile_dispatch(cache, executor_dispatch)  # doctest: +SKIP
        >>> found[Direction.FORWARD].median_s  # doctest: +SKIP
        4.5e-05

    Args:
        cache: where it is kept.
        measure: what runs: of `stratagem.calibration.executor_measurements` the function
            `executor_dispatch`, on a GPU `executor_launches`.
        device: a CPU or a CUDA device.
        threads: of one kernel on a CPU.
        load: part of the key only, so that `MeasuredCosts` finds it beside its operators.
    """
    environment = describe_environment(device, threads=threads, load=load)
    keys = {direction: dispatch_key(environment, direction) for direction in Direction}
    found = {direction: cache.own(key) for direction, key in keys.items()}
    if any(measurement is None for measurement in found.values()):
        with num_threads(threads):
            measured = measure()
        for direction, key in keys.items():
            cache.put(key, measured[direction])
        return measured
    return {direction: m for direction, m in found.items() if m is not None}
