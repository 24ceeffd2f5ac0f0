"""Timing other work than operators at one pace of the cores (see `cache.kept_paces`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from stratagem.basics.reference_kernel import ReferenceKernel
from stratagem.profiler.cache.kept_paces import brought, keep_pace
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import Measurement
from stratagem.simulator.plan.provenance import Environment

Part = TypeVar("Part")


def timed_at_one_pace(
    cache: TimingCache,
    environment: Environment,
    elasticity: float,
    measure: Callable[[], Mapping[Part, Measurement]],
) -> dict[Part, Measurement]:
    """What a CPU takes for some work, brought to the pace of its environment's other times.

    Args:
        cache: where the pace is kept.
        environment: of the times.
        elasticity: how they go with the pace.
        measure: times the work, now.
    """
    reference = ReferenceKernel(torch.device("cpu"))
    before = reference.seconds()
    measured = measure()
    looks = before, reference.seconds()
    pace = keep_pace(cache, environment, looks)
    around = statistics.fmean(looks)
    return {part: brought(each, around, pace, elasticity) for part, each in measured.items()}
