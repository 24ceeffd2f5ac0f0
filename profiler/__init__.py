"""Measured costs: times of operators, updates and links, taken once and kept."""

from stratagem.profiler.cache import CACHE_VARIABLE, TimingCache, cache_path
from stratagem.profiler.clock import describe_environment
from stratagem.profiler.costs import MeasuredCosts
from stratagem.profiler.dispatch import profile_dispatch
from stratagem.profiler.feedback import learn
from stratagem.profiler.keys import (
    CollectiveEntry,
    CollectiveKey,
    Measurement,
    TimingEntry,
    TimingKey,
)
from stratagem.profiler.links import (
    CollectiveFit,
    CollectiveTiming,
    fit_collectives,
    fit_link,
    keep_collectives,
    time_collectives,
)
from stratagem.profiler.merging import MergeReport
from stratagem.profiler.profile import local_operators, plan_operators, profile_operators
from stratagem.profiler.session import ProfileReport, Progress
from stratagem.profiler.timing import Effort, Timing, time_operator
from stratagem.profiler.update import profile_updates
from stratagem.simulator.plan.provenance import Environment

__all__ = [
    "CACHE_VARIABLE",
    "CollectiveEntry",
    "CollectiveFit",
    "CollectiveKey",
    "CollectiveTiming",
    "Effort",
    "Environment",
    "MeasuredCosts",
    "Measurement",
    "MergeReport",
    "ProfileReport",
    "Progress",
    "Timing",
    "TimingCache",
    "TimingEntry",
    "TimingKey",
    "cache_path",
    "describe_environment",
    "fit_collectives",
    "fit_link",
    "keep_collectives",
    "learn",
    "local_operators",
    "plan_operators",
    "profile_dispatch",
    "profile_operators",
    "profile_updates",
    "time_collectives",
    "time_operator",
]
