"""How a collective or a transfer ends: when, and after waiting how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ending:
    """When a collective was over by `time.perf_counter_ns`; 0 while nobody knows.

    It holds none of the collective's memory, so that it may be kept until the step is over.
    """

    ns: int = 0
