"""Processes that do parts of a search: they change nothing but the time that it takes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.costs.measured_costs import MeasuredCosts
from stratagem.profiler.machine.device_clocks import describe_environment
from stratagem.searcher.driver.budget import Budget, StopReason
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.processes import worker_processes as workers_module
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.searcher.processes.worker_processes import Workers, worker_count
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from tests.search.search_words import in_records

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


class Shelf:
    """A state: numbers, and the process that it is in."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def add(self, other: int) -> tuple[int, int]:
        return sum(self.numbers) + other, os.getpid()

    def slowly(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def fail(self, what: str) -> None:
        raise ValueError(f"no {what} on the shelf in process {os.getpid()}")

    def die(self) -> None:
        if self.numbers == (1, 2):
            os._exit(1)


def shelf(*numbers: int) -> Workers[Shelf]:
    return Workers(Shelf(*numbers), Shelf, (1, 2), count=1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [-1, 0, 1, 2])
def test_parts_give_the_same_whoever_does_them(count: int) -> None:
    with Workers(Shelf(1, 2), Shelf, (1, 2), count) as workers:
        assert workers.is_alone == (count <= 0)
        parts = [workers.part(Shelf.add, number) for number in range(20)]
        assert [part.result()[0] for part in parts] == list(range(3, 23))
        assert not workers.failure


def test_processes_are_as_many_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_memory_bytes", lambda: 10**12)
    assert [worker_count(cores) for cores in (-1, 0, 1, 2, 8, 99)] == [0, 0, 0, 1, 7, 7]
    monkeypatch.setattr(workers_module, "_memory_bytes", lambda: 24 * 10**9)
    assert [worker_count(cores) for cores in (1, 2, 8, 99)] == [0, 1, 5, 5]
    monkeypatch.setattr(workers_module, "_memory_bytes", lambda: 3 * 10**9)
    assert worker_count(99) == 0


@pytest.mark.slow
def test_others_work_at_the_same_time_and_are_gone_at_the_end() -> None:
    with shelf(1, 2) as workers:
        parts = [workers.part(Shelf.slowly, 0.3) for _ in range(20)]
        found = {part.result() for part in parts}
    assert len(found) == 2
    assert os.getpid() in found
    (other,) = found - {os.getpid()}
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_whoever_asks_for_a_part_gets_its_error() -> None:
    for count in (0, 1):
        with Workers(Shelf(1, 2), Shelf, (1, 2), count) as workers:
            parts = [workers.part(Shelf.fail, what) for what in ("tea", "milk")]
            assert workers.part(Shelf.add, 1).result()[0] == 4
            for part, what in zip(parts, ("tea", "milk"), strict=True):
                with pytest.raises(ValueError, match=f"no {what} on the shelf"):
                    part.result()
            assert not workers.failure


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_done_here() -> None:
    with shelf(3) as workers:
        here = {os.getpid()}
        while {p.result() for p in [workers.part(Shelf.slowly, 0.1) for _ in range(2)]} == here:
            pass
        parts = [workers.part(Shelf.die), *(workers.part(Shelf.add, n) for n in range(3))]
        time.sleep(1.0)
        assert parts[0].result() is None
        assert [part.result() for part in parts[1:]] == [(3 + n, os.getpid()) for n in range(3)]
        assert "EOF" in workers.failure
        assert workers.is_alone


def test_a_state_that_cannot_be_sent_stays_here() -> None:
    lock = threading.Lock()
    with Workers(lock, lambda: lock, (), 1) as workers:
        assert not workers.part(lambda state: state.locked()).result()
        assert workers.is_alone
        assert "pickle" in workers.failure


def test_a_part_that_is_dropped_is_not_done() -> None:
    with Workers(Shelf(1), Shelf, (1,), 0) as workers:
        part = workers.part(Shelf.add, 1)
        workers.drop()
        assert part.future.cancelled()


SHARED = SearchEffort(shared_operators=1)
"""Of a search that shares its work with other processes however small the model is."""


def found_by(threads: int, **changed: object) -> SearchResult:
    graph = gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    wishes = {
        "budget": Budget(200),
        "skeletons": 2,
        "bounded": 4,
        "seed": 3,
        "threads": threads,
        **changed,
    }
    return search(graph, CLUSTER, **in_records(wishes))


@functools.cache
def found_alone() -> SearchResult:
    """By one process, with as few operators as are not shared out in any case."""
    return found_by(1)


def same(result: SearchResult) -> tuple[object, ...]:
    return (
        result.plan.to_json(),
        result.bound,
        result.space,
        result.notes,
        {name: each.step_time for name, each in result.baselines.items()},
    )


@pytest.mark.slow
def test_a_search_gives_the_same_on_any_number_of_processes() -> None:
    alone = same(found_alone())
    assert same(found_by(3, effort=SHARED)) == alone


@pytest.mark.slow
def test_measured_costs_and_constraints_are_sent_to_other_processes(tmp_path: Path) -> None:
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        costs = MeasuredCosts(cache, {"A100": describe_environment()}, RooflineCosts())
    forbidden = Space(zero_stages=(0,), require=(("vocab", "device"),))
    wishes = {"costs": costs, "space": forbidden, "baselines": ()}
    alone = same(found_by(1, **wishes))
    result = found_by(2, effort=SHARED, **wishes)
    assert "other processes" not in result.notes
    assert same(result) == alone


@pytest.mark.slow
def test_a_search_goes_on_without_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = found_alone()

    def refused(workers: Workers[object]) -> None:
        raise PermissionError("no processes here")

    monkeypatch.setattr(Workers, "_started", refused)
    result = found_by(2, effort=SHARED)
    why = result.notes.pop("other processes")
    assert why == "not used: PermissionError: no processes here"
    assert same(result) == same(alone)


SCRIPT = """
import sys, time
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.processes.search_effort import SearchEffort
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.graph.models import gpt

class Mine(RooflineCosts):
    factor = staticmethod(lambda: 2)

def show(progress):
    print(progress.phase, flush=True)

graph = gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
effort = SearchEffort(shared_operators=1)
budget = Budget(int(sys.argv[1]), skeletons=1, bounded=1, threads=2, effort=effort)
result = search(graph, cluster, costs=Mine(), budget=budget, baselines=(), progress=show)
print(result.stop_reason.name, result.notes.get("other processes", "well"), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_script_needs_no_guard_and_ctrl_c_ends_it(tmp_path: Path, interrupted: bool) -> None:
    """Processes that import the main script again would search in it, without end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(3 * 10**6 if interrupted else 200)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        lines: list[str] = []
        for line in running.stdout:
            lines.append(line.strip())
            if interrupted and line.startswith("searching"):
                os.killpg(running.pid, signal.SIGINT)
                interrupted = False
                lines = [""]
    assert running.returncode == 0
    reasons = [reason.name for reason in StopReason if lines[-1].startswith(reason.name)]
    assert reasons
    assert lines[-1].endswith("well")
    assert (reasons == ["INTERRUPTED"]) == (lines[0] == "")
    assert lines.count("simulating baselines") <= 1
