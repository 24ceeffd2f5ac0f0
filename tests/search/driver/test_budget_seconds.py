"""A budget of seconds is kept, by a clock that no other program disturbs: it counts calls."""

from __future__ import annotations

import sys
import time
from types import FrameType

import pytest

from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.processes.search_clock import OutOfTimeError, SearchClock
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from tests.support.plans import few

CALLS = 1e5
"""Calls of functions that are a second of the clock: a tenth of those in a second of a machine."""


class CallClock:
    """The calls of this thread, as a profiler sees them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"

    def seconds(self) -> float:
        return self.calls / CALLS


def spend(seconds: float | None) -> SearchResult:
    graph = gpt(num_layers=6, hidden=256, num_heads=4, vocabulary=4096, sequence=64, batch=32)
    return search(
        graph,
        Cluster.preset("dgx-a100", num_nodes=2),
        budget=Budget(evaluations=2000, seconds=seconds, threads=1),
        baselines=(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", few([20, 25, 60], 1))
def test_a_budget_of_seconds_is_kept(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of large meshes were priced to their end, whatever the clock said before."""
    spend(1e-3)  # compile what is compiled, and import
    clock, before = CallClock(), sys.getprofile()
    monkeypatch.setattr(time, "monotonic", clock.seconds)
    sys.setprofile(clock)
    try:
        result = spend(seconds)
    finally:
        sys.setprofile(before)
    assert result.stop_reason is StopReason.SECONDS
    assert 0.8 * seconds < clock.seconds() < 1.1 * seconds
    assert result.simulation.fits


def test_a_stopped_clock_lets_go_on_and_runs_again() -> None:
    clock = SearchClock(until=0.0)
    with clock.stopped():
        clock.check()
    with pytest.raises(OutOfTimeError):
        clock.check()
