"""What the executor spends beside its kernels, and what costs make of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.local_fidelity import keep_typical
from benchmarks.local_plans import one_device
from stratagem.calibration.executor_measurements import _one_rank_plan, _state, executor_dispatch
from stratagem.executor.backends.threads import run_local
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.profiler import (
    MeasuredCosts,
    Measurement,
    TimingCache,
    TimingKey,
    describe_environment,
    profile_dispatch,
)
from stratagem.simulator.graph.models import mlp, resnet
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import CostSource, Direction, RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import few

CLUSTER = Cluster.preset("local-cpu")
DEVICE = CLUSTER.device_type(0)
COSTS = RooflineCosts()
FAULTS = """
import resource, sys, threading, torch
from stratagem.basics.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def train():
    for step in range(12):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(2**20) for _ in range(24)]
        del kept
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
if sys.argv[2] == "rank":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
"""


@pytest.fixture
def cache(tmp_path):
    with TimingCache(tmp_path / "timings.sqlite") as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an option of glibc")
@pytest.mark.parametrize("where", few(["rank", "process"], 1))
def test_freed_memory_is_kept(where: str) -> None:
    """Ten steps of 96 MiB each: 245,000 page faults, or those of a few tensors at most.

    A heap of a thread holds 64 MiB and is given back when it is empty: steps of ranks in threads
    took a tenth longer for that.

    Left alone, glibc learns from the pieces that are freed which to keep, and at times keeps all:
    a threshold that is set is one that it does not move.
    """
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    faults = {}
    for how in ("keep", "give back"):
        command = [sys.executable, "-c", FAULTS, how, where]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=settings)
        faults[how] = int(ran.stdout)
    assert faults["keep"] < 0.05 * faults["give back"]


class TestDispatch:
    def test_every_pass_takes_some(self) -> None:
        found = executor_dispatch()
        assert found.keys() == set(Direction)
        assert all(each.median_s > 0 and each.repeats > 5 for each in found.values())

    def test_it_is_measured_once(self, cache) -> None:
        asked = []

        def measure() -> dict[Direction, Measurement]:
            asked.append(len(asked))
            return {direction: Measurement(1e-4, 0.1, 12) for direction in Direction}

        first = profile_dispatch(cache, measure, load=1)
        assert profile_dispatch(cache, measure, load=1) == first
        assert asked == [0]
        profile_dispatch(cache, measure)
        assert len(asked) == 2

    def test_it_comes_on_top_of_measured_and_fitted_costs(self, cache) -> None:
        environment = describe_environment()
        graph = mlp([8, 16, 4], batch=4)
        one, other = graph.operator("layers.0"), graph.operator("layers.1")
        cache.put(
            TimingKey(environment, one, "float32", Direction.FORWARD), Measurement(2e-3, 0.0, 9)
        )
        plain = MeasuredCosts(cache, {"cpu": environment}, RooflineCosts())
        spent = {Direction.FORWARD: 3e-3, Direction.BACKWARD: 5e-3}
        profile_dispatch(cache, lambda: {d: Measurement(s, 0.0, 9) for d, s in spent.items()})
        costs = MeasuredCosts(cache, {"cpu": environment}, RooflineCosts())
        for operator in (one, other):
            for direction in Direction:
                asked = (operator, operator.sizes, direction, Training(), DEVICE)
                expected = plain.operator_cost(*asked).seconds + spent[direction]
                assert costs.operator_cost(*asked).seconds == pytest.approx(expected)
        table = costs.explain(DEVICE, Training())
        assert table.column("operators") == ["linear"]

    def test_it_is_no_time_of_a_learned_operator(self, cache) -> None:
        """Learning compares kernels with the device model, not what is around them."""
        environment = describe_environment()
        operator = mlp([8, 16], batch=4).operator("layers.0")
        asked = (operator, operator.sizes, Direction.FORWARD, Training(), DEVICE)
        seconds = 2 * RooflineCosts().operator_cost(*asked).seconds
        profile_dispatch(cache, lambda: dict.fromkeys(Direction, Measurement(1.0, 0.0, 9)))
        key = TimingKey(environment, operator, "float32", Direction.FORWARD)
        cache.put(key, Measurement(seconds, 0.0, 9))
        costs = MeasuredCosts(cache, {"cpu": environment}, RooflineCosts())
        larger = {**operator.sizes, "in": 32}
        cost = costs.operator_cost(operator, larger, *asked[2:])
        plain = RooflineCosts().operator_cost(operator, larger, *asked[2:])
        assert cost.source is CostSource.CORRECTED
        assert cost.seconds == pytest.approx(1.0 + 2 * plain.seconds)


def test_between_runs_before_every_instruction_and_does_not_count() -> None:
    graph = mlp([8, 16, 4], batch=4)
    program = prepare(_one_rank_plan(graph), graph)
    batch = {"x": torch.ones(4, 8), "target": torch.zeros(4, dtype=torch.int64)}
    calls = []

    def run(comm):
        interpreter = Interpreter(program, comm, _state(graph))
        quiet = interpreter.step(batch)
        return quiet, interpreter.step(batch, between=lambda: calls.append(len(calls)))

    quiet, record = run_local(1, run)[0]
    assert len(calls) == len(record.spans) == len(quiet.spans)
    ends = [end for _, end in record.spans]
    starts = [start for start, _ in record.spans]
    assert all(start > end for start, end in zip(starts[1:], ends[:-1], strict=True))
    assert [start for start, _ in quiet.spans[1:]] == [end for _, end in quiet.spans[:-1]]


@pytest.mark.parametrize(
    ("graph", "first", "share"),
    [
        (mlp([64, 64, 64, 64], batch=32), "layers.0", 0.5),
        (mlp([64, 64, 64, 64], batch=32), "layers.1", 1.0),
        (resnet(18, batch=2, image=32), "conv1", 0.5),
        (resnet(18, batch=2, image=32), "bn1", 1.0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_first_layer_makes_no_gradient_of_its_input(graph, first: str, share: float) -> None:
    mesh = DeviceMesh((MeshAxis("one", 1),), (0,))
    builder = TableBuilder(graph, mesh, CLUSTER, Training(), RooflineCosts())
    operator = graph.operator(first)
    choices = {i: (Choice((REPLICATE,)),) for i in range(len(graph.operators))}
    row = builder.build(range(len(choices)), choices).row(graph.index[first])
    whole = RooflineCosts().operator_cost(
        operator, operator.sizes, Direction.BACKWARD, Training(), DEVICE
    )
    assert row.backward.ns[0] == pytest.approx(share * whole.seconds * 1e9, rel=1e-4)


def test_turns_of_an_operator_are_averaged(tmp_path):
    """Keys are objects of their own: times of one operator were once kept as if of several."""
    operator = next(op for op in mlp([8, 8], batch=4).operators if op.kind == "linear")
    sources = [tmp_path / f"{turn}.sqlite" for turn in range(3)]
    for source, seconds in zip(sources, (1.0, 4.0, 1.0), strict=True):
        with TimingCache(source) as timings:
            key = TimingKey(describe_environment(), operator, "float32", Direction.FORWARD)
            timings.put(key, Measurement(seconds, 0.1, 5))
    keep_typical(sources, tmp_path / "kept.sqlite")
    with TimingCache(tmp_path / "kept.sqlite") as kept:
        (entry,) = kept.entries()
    assert entry.measurement.median_s == 2.0


@pytest.mark.parametrize(("preset", "device"), [("local-cpu", "cpu"), ("dgx-h200", "cuda")])
def test_plans_of_one_device_can_be_run_and_priced(preset, device):
    setting = one_device(preset)
    assert (setting.device, setting.load, len(setting.plans)) == (device, 0, 8)
    seconds = {}
    for plan, (model, name) in zip(setting.all_plans(), setting.plans, strict=True):
        assert prepare(plan, setting.graph(model)).world_size == 1
        seconds[model, name] = simulate_plan(plan, setting.graph(model), COSTS).step_time
    assert seconds["gpt", "recompute"] > seconds["gpt", "whole"]
    assert seconds["gpt", "microbatches, recompute"] > seconds["gpt", "microbatches"]
