"""Measured costs: times of operators, updates and links, taken once and kept."""

from stratagem.profiler.cache.merge_order import MergeReport
from stratagem.profiler.cache.timing_cache import CACHE_VARIABLE, TimingCache, cache_path
from stratagem.profiler.cache.timing_keys import (
    CollectiveEntry,
    CollectiveKey,
    Measurement,
    TimingEntry,
    TimingKey,
)
from stratagem.profiler.costs.learn_from_runs import learn
from stratagem.profiler.costs.measured_costs import MeasuredCosts
from stratagem.profiler.machine.device_clocks import describe_environment
from stratagem.profiler.timing.collective_fits import CollectiveFit, fit_collectives, fit_link
from stratagem.profiler.timing.collective_timing import CollectiveTiming, time_collectives
from stratagem.profiler.timing.dispatch_timing import profile_dispatch, profile_launches
from stratagem.profiler.timing.kept_collectives import keep_collectives
from stratagem.profiler.timing.operator_timing import Effort, Timing, time_operator
from stratagem.profiler.timing.profile_operators import (
    local_operators,
    plan_operators,
    profile_operators,
)
from stratagem.profiler.timing.session import ProfileProgress, ProfileReport
from stratagem.profiler.timing.update_timing import profile_updates
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
    "ProfileProgress",
    "ProfileReport",
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
    "profile_launches",
    "profile_operators",
    "profile_updates",
    "time_collectives",
    "time_operator",
]
