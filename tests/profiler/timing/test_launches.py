"""What passes take the host of a GPU: timed beside the kernels, and heeded by a simulation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stratagem.calibration import executor_measurements
from stratagem.calibration.executor_measurements import _passes, _tiny, executor_launches
from stratagem.profiler import (
    Effort,
    MeasuredCosts,
    Measurement,
    TimingCache,
    TimingKey,
    plan_operators,
    profile_launches,
    profile_operators,
)
from stratagem.profiler.cache.timing_keys import PACE_KIND, Launched, launch_key, launched_key
from stratagem.profiler.machine.device_clocks import CpuClock
from stratagem.profiler.timing import operator_timing
from stratagem.profiler.timing.operator_timing import time_operator
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.plan.provenance import Environment
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

GPU = Environment("NVIDIA H200", "2.11", driver="580", cuda="13.0")
PRESET = Cluster.preset("dgx-h200", num_nodes=1, devices_per_node=1)
CLUSTER = replace(PRESET, calibration=replace(PRESET.calibration, launch_us=10.0))
SLOW = 3e-3
"""Seconds that the host of `HostClock` waits in a pass, which noise does not reach."""


class HostClock(CpuClock):
    """A device that works beside its host: what its host does takes it no time."""

    @contextmanager
    def ahead(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.host_seconds = time.perf_counter() - begun


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(operator_timing, "clock_of", lambda device: HostClock())
    operator_timing._calls_of_nothing.cache_clear()
    yield
    operator_timing._calls_of_nothing.cache_clear()


def one_device(graph: OperatorGraph) -> Plan:
    choices = {operator.name: Choice((REPLICATE,)) for operator in graph.operators}
    stage = Stage(tuple(choices), DeviceMesh((MeshAxis("one", 1),), (0,)), choices)
    return Plan("one", graph.name, graph.fingerprint, CLUSTER, Training(), (stage,))


def simulated(graph: OperatorGraph, costs: MeasuredCosts) -> Simulation:
    return simulate_plan(one_device(graph), graph, costs)


def host_ns(simulation: Simulation) -> int:
    """What the host's lane is busy for."""
    timeline = simulation.timeline
    return sum(
        int(end - start)
        for lane, start, end in zip(timeline.lane, timeline.start, timeline.end, strict=True)
        if "host" in timeline.lanes[lane]
    )


def test_a_pass_is_timed_with_what_it_takes_the_host(
    beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = mlp([16, 24, 16], batch=8).operator("layers.0")
    forward = operator_timing.OperatorTrial.forward

    def slow(trial: operator_timing.OperatorTrial) -> tuple[torch.Tensor, ...]:
        time.sleep(SLOW)
        return forward(trial)

    monkeypatch.setattr(operator_timing.OperatorTrial, "forward", slow)
    timing = time_operator(operator, Training(), effort=Effort(seconds=0.0))
    ahead, back = timing.launches
    assert ahead.median_s >= 0.9 * SLOW > back.median_s > 0


def test_on_a_cpu_there_is_no_host_beside() -> None:
    operator = mlp([16, 24, 16], batch=8).operator("layers.0")
    assert time_operator(operator, Training(), effort=Effort(seconds=0.0)).launches == ()


def test_a_profile_keeps_launches(beside: None, tmp_path: Path) -> None:
    graph = mlp([16, 24, 16], batch=8)
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        operators = plan_operators(graph, one_device(graph))
        profile_operators(operators, Training(), cache, effort=Effort(seconds=0.0))
        kinds = [each.key.operator.kind for each in cache.entries()]
        kinds = [kind for kind in kinds if kind != PACE_KIND]
    assert kinds.count("launch") == len(kinds) / 2 > 0


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_simulation_launches_as_was_measured(tmp_path: Path, share: float) -> None:
    """Launches of a ResNet took twice what those of a GPT's kernels took, kernel by kernel."""
    graph = mlp([64, 64, 64], batch=4)
    found = {}
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        for how, seconds in ((Launched.BY_EXECUTOR, share * 1e-2), (Launched.ALONE, 1e-2)):
            cache.put(launched_key(GPU, how), Measurement(seconds, 0.01, 9))
        for number, (operator, direction) in enumerate(_passes(graph)):
            key = TimingKey(GPU, operator, "float32", direction)
            cache.put(key, Measurement(1e-6, 0.01, 9))
            found.setdefault(launch_key(key).digest, 2e-6 * (number + 1))
            cache.put(launch_key(key), Measurement(found[launch_key(key).digest], 0.01, 9))
        costs = MeasuredCosts(cache, {"H200": GPU}, RooflineCosts())
        plain = MeasuredCosts(cache, {}, RooflineCosts())
    keys = [launch_key(TimingKey(GPU, o, "float32", d)).digest for o, d in _passes(graph)]
    expected = share * sum(found[key] for key in keys)
    assert host_ns(simulated(graph, costs)) == pytest.approx(expected * 1e9, abs=len(keys))
    assert host_ns(simulated(graph, plain)) > 10_000 * len(keys)
    for operator, direction in _passes(graph):  # Kernels are as long as was measured.
        cost = costs.operator_cost(
            operator, operator.sizes, direction, Training(), CLUSTER.device_type(0)
        )
        assert cost.seconds == 1e-6


def test_what_is_not_known_of_a_pass_is_counted_by_kernels(tmp_path: Path) -> None:
    graph = mlp([64, 64, 64], batch=4)
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        for how in Launched:
            cache.put(launched_key(GPU, how), Measurement(1e-2, 0.01, 9))
        costs = MeasuredCosts(cache, {"H200": GPU}, RooflineCosts())
        plain = MeasuredCosts(cache, {}, RooflineCosts())
    assert host_ns(simulated(graph, costs)) == host_ns(simulated(graph, plain)) > 0


def test_both_ways_to_launch_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_measurements, "_host_seconds", lambda graph, device: [0.5] * 5)
    launch = Measurement(1e-3, 0.1, 5)
    timing = operator_timing.Timing(launch, launch, 0, (launch, launch))
    monkeypatch.setattr(executor_measurements, "time_operator", lambda *_, **__: timing)
    asked = []

    def measure() -> dict[Launched, Measurement]:
        asked.append(True)
        return executor_launches("cpu")

    with TimingCache(tmp_path / "timings.sqlite") as cache:
        found = [profile_launches(cache, measure, device="cpu") for _ in range(2)]
    assert found[0] == found[1]
    assert len(asked) == 1
    assert found[0][Launched.BY_EXECUTOR].median_s == 0.5
    alone = found[0][Launched.ALONE]
    assert alone.median_s == pytest.approx(1e-3 * len(_passes(_tiny())))
    assert (alone.spread, alone.repeats) == (0.1, 5)
