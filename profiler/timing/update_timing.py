"""Timing the optimizer: how long an update of so many scalars takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import Measurement, summarise, update_key
from stratagem.profiler.machine.background_load import BackgroundLoad
from stratagem.profiler.machine.device_clocks import clock_of, describe_environment, num_threads
from stratagem.profiler.timing.core_paces import timed_at_one_pace
from stratagem.profiler.timing.operator_timing import Effort, evictor, repeat, timed
from stratagem.simulator.hardware.core_pace import OF_OTHERS
from stratagem.simulator.kernel_times.training import Training

UPDATE_SIZES = (10**4, 10**6, 10**7)
"""Numbers of scalars that are timed unless told."""

MakeUpdate = Callable[[int, Training, torch.device], Callable[[], object]]
"""Makes an update of so many scalars, ready to run again and again; a function of a module."""


def profile_updates(
    training: Training,
    cache: TimingCache,
    make_update: MakeUpdate,
    *,
    device: torch.device | str = "cpu",
    threads: int = 1,
    load: int = 0,
    sizes: Sequence[int] = UPDATE_SIZES,
    effort: Effort | None = None,
) -> list[Measurement]:
    """Time updates of `sizes` scalars each and keep them in `cache`; what is there is not timed.

    Example:
        >>> sgd = Training(optimizer="sgd")
        >>> profile_updates(sgd, cache, executor_update)[0].median_s  # doctest: +SKIP
        6.1e-06

    Args:
        training: optimizer and precision.
        cache: where times are kept.
        make_update: what is timed, such as
            `stratagem.calibration.executor_measurements.executor_update`.
        device: a CPU or a CUDA device.
        threads: of one kernel on a CPU.
        load: how many other processes do the same meanwhile (CPU only).
        sizes: numbers of scalars.
        effort: how long to go on with each size.

    Returns:
        One measurement for each of `sizes`.
    """
    environment = describe_environment(device, threads=threads, load=load)
    keys = [update_key(size, training, environment) for size in sizes]
    missing = [size for size, key in zip(sizes, keys, strict=True) if cache.own(key) is None]
    given = torch.device(device)
    with BackgroundLoad(load if missing else 0, threads=threads) as others, num_threads(threads):
        for size in missing:
            make_work = partial(make_update, size, training, given)
            others.run(make_work)
            measure = partial(_timed, size, make_work, given, effort or Effort())
            if given.type == "cpu":
                measured = timed_at_one_pace(cache, environment, OF_OTHERS, measure)
            else:
                measured = measure()
            cache.put(update_key(size, training, environment), measured[size])
    return [found for key in keys if (found := cache.get(key)) is not None]


def _timed(
    size: int, make_work: Callable[[], Callable[[], object]], device: torch.device, effort: Effort
) -> dict[int, Measurement]:
    """An update with its code warm and its tensors cold, as behind the updates of others."""
    clock, evict, update = clock_of(device), evictor(device, effort), make_work()
    other = make_work() if device.type == "cpu" and effort.warm_code else None

    def before() -> None:
        evict()
        if other is not None:
            other()

    (seconds,) = repeat(lambda: (timed(update, clock, before)[0],), effort)
    return {size: summarise(seconds)}
