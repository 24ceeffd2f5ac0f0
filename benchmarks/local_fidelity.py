"""How far is the predicted step time from the measured one, on the CPUs of this machine?

    python -m benchmarks.local_fidelity

Eight plans of three models (a small GPT, a perceptron, a ResNet-18) on two processes over gloo.
Operators, updates, the executor's dispatch and the link are measured here; nothing that is
measured of a plan's step goes into its prediction. All plans are alive in the same two processes
and take turns, among themselves and with the timing of operators and of collectives, so that
whatever else the machine does meets all of them alike: the speed of a shared machine drifts by
more than the errors in question. Of every operator the median of its turns counts. Prints one JSON
object a plan: predicted and measured milliseconds (the median of the turns' medians), error in
percent, the quartiles of the measured steps, what a device spends on each kind of task (predicted
and measured), and the load of the machine while it ran. The last line is the summary: the median
of the absolute errors and the rank correlation between predicted and measured times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

from stratagem.comparison import compare
from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.batches import Batches
from stratagem.executor.interpreter import Interpreter
from stratagem.executor.launch import run_ranks
from stratagem.executor.run import prepare
from stratagem.executor.training_loop import RunOptions, train
from stratagem.executor.where import Place
from stratagem.measuring import LOOPBACK, executor_dispatch, executor_update
from stratagem.profiler import (
    CollectiveTiming,
    Effort,
    MeasuredCosts,
    Measurement,
    TimingCache,
    TimingKey,
    describe_environment,
    fit_link,
    plan_operators,
    profile_dispatch,
    profile_operators,
    profile_updates,
    time_collectives,
)
from stratagem.search.partition import balanced_stages
from stratagem.search.strategies import Choices, data_parallel, tensor_parallel
from stratagem.simulator.cluster import Cluster, Link
from stratagem.simulator.files import decode, encode
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.kernel_costs import default_costs
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.models import gpt, mlp, resnet
from stratagem.simulator.plan import Plan, Stage
from stratagem.simulator.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline import Timeline
from stratagem.simulator.torch_ops.programs import torch_dtype
from stratagem.simulator.training import Training

MODELS: dict[str, Callable[[], OperatorGraph]] = {
    "gpt": lambda: gpt(
        num_layers=4, hidden=256, num_heads=8, vocabulary=4096, sequence=128, batch=8
    ),
    "mlp": lambda: mlp([1024, 2048, 2048, 1024], batch=512),
    "resnet18": lambda: resnet(18, batch=16, image=64, classes=100),
}
PLANS = (
    ("gpt", "data parallel"),
    ("gpt", "ZeRO-3"),
    ("gpt", "tensor parallel"),
    ("gpt", "1F1B pipeline"),
    ("mlp", "data parallel"),
    ("mlp", "tensor parallel"),
    ("resnet18", "data parallel"),
    ("resnet18", "1F1B pipeline"),
)
NUM_PROCESSES = 2
MICROBATCHES = 4
"""Of a pipeline."""
TURNS, STEPS = 15, 4
"""Every plan gets so many turns of so many steps, of which the first warms up."""
TURNS_A_LINK, LINK_REPEATS = 3, 4
"""After so many turns the collectives have one, with so many repeats a round."""
TURNS_A_PROFILE = 2
"""After so many turns the operators have one."""
EFFORT = Effort(seconds=0.0, max_drift=math.inf)
"""The fewest repeats in a turn: a machine's speed changes within seconds, so many short turns say
more than a long one. What the machine is slowed by slows the plans too, so it stays.
"""
PATIENCE = 1200.0
"""Seconds that the other rank may have to wait while operators are timed."""
CLASSES = {"gpt": 4096, "mlp": 1024, "resnet18": 100}
"""Ids and labels of a model are below this."""


@dataclass(frozen=True)
class Measured:
    """What the turns of one plan showed: seconds of all its steps, and the load meanwhile."""

    turns: tuple[tuple[float, ...], ...]
    timeline: Timeline
    load: float

    @property
    def step_time(self) -> float:
        """Seconds: the median of the turns' medians."""
        return statistics.median(statistics.median(turn) for turn in self.turns)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the seconds of all steps."""
        low, _, high = statistics.quantiles([s for turn in self.turns for s in turn], n=4)
        return low, high


@cache
def graph_of(model: str) -> OperatorGraph:
    """The operator graph of one of `MODELS`."""
    return MODELS[model]()


def plan_of(model: str, name: str, cluster: Cluster) -> Plan:
    """One of `PLANS` on a cluster of `NUM_PROCESSES` devices."""
    graph = graph_of(model)
    whole = DeviceMesh((MeshAxis("data", NUM_PROCESSES),), tuple(range(NUM_PROCESSES)))
    if name.endswith("pipeline"):
        stages, parts = _pipeline(graph, cluster), MICROBATCHES
    else:
        names = tuple(operator.name for operator in graph.operators)
        stages, parts = (Stage(names, whole, _strategy(graph, name)),), 1
    return Plan(
        name=f"{model}, {name}",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        training=Training(),
        stages=stages,
        num_microbatches=parts,
    )


def _strategy(graph: OperatorGraph, name: str) -> Choices:
    if name == "tensor parallel":
        return tensor_parallel(graph, (NUM_PROCESSES,), 0)
    return data_parallel(graph, (NUM_PROCESSES,), zero=3 if name == "ZeRO-3" else 0)


def _pipeline(graph: OperatorGraph, cluster: Cluster) -> tuple[Stage, ...]:
    """A stage on each process."""
    choices = data_parallel(graph, (1,))
    return tuple(
        Stage(
            names,
            DeviceMesh((MeshAxis("data", 1),), (device,)),
            {name: choices[name] for name in names},
        )
        for device, names in enumerate(balanced_stages(graph, cluster, NUM_PROCESSES))
    )


def state_of(graph: OperatorGraph) -> dict[str, Tensor]:
    """Parameters as models begin: small random matrices, gains of one, no bias."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    for parameter in graph.parameters:
        if len(parameter.shape) > 1:
            state[parameter.name] = 0.02 * torch.randn(parameter.shape, generator=generator)
        else:
            is_gain = parameter.name.endswith(("weight", "running_var"))
            state[parameter.name] = torch.full(parameter.shape, float(is_gain))
    return state


def batch_of(model: str) -> dict[str, Tensor]:
    """Random inputs."""
    generator = torch.Generator().manual_seed(1)
    return {
        given.name: torch.randint(CLASSES[model], given.shape, generator=generator)
        if torch_dtype(given.dtype) is torch.int64
        else torch.randn(given.shape, generator=generator)
        for given in graph_of(model).inputs
    }


def measure(plans: Sequence[Plan], cache_file: Path) -> tuple[list[Measured], Link]:
    """Run all plans in turns, in as many processes as they have devices, and time their link.

    Times of operators come into the cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            plan.save(Path(folder, f"{number}.json"))
        run_ranks(["benchmarks.local_fidelity", "--rank", folder], NUM_PROCESSES, timeout=1800)
        text = Path(folder, "measured.json").read_text()
        timings = decode(Path(folder, "timings.json").read_text(), LinkTimings, "link timings")
        keep_typical(sorted(Path(folder).glob("*.sqlite")), cache_file)
    found = [
        Measured(
            tuple(tuple(turn) for turn in each["turns"]),
            Timeline.from_dict(each["timeline"]),
            each["load"],
        )
        for each in json.loads(text)
    ]
    typical = [
        replace(same[0], seconds=statistics.median(timing.seconds for timing in same))
        for same in zip(*timings, strict=True)
    ]
    return found, fit_link(typical, LOOPBACK, shares_compute=True)


LinkTimings = list[list[CollectiveTiming]]
"""Every time that the collectives had a turn, the same ones."""


def run_rank(folder: Path) -> None:
    """One process of `measure`; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    plans = [Plan.load(folder / f"{number}.json") for number in range(len(PLANS))]
    with GlooCommunicator(timeout=PATIENCE) as comm:
        runners = [
            (Interpreter(prepare(plan, graph_of(model)), comm, state_of(graph_of(model))), model)
            for (model, _), plan in zip(PLANS, plans, strict=True)
        ]
        turns: list[list[Turn]] = [[] for _ in runners]
        timings: LinkTimings = []
        for turn in range(TURNS):
            if turn % TURNS_A_PROFILE == 0:
                if comm.rank == 0:
                    profile(plans, folder / f"{turn}.sqlite")
                comm.barrier()
            if turn % TURNS_A_LINK == 0:
                timings.append(time_collectives(comm, repeats=LINK_REPEATS))
            for (interpreter, model), done in zip(runners, turns, strict=True):
                batches = Batches(batch_of(model), graph_of(model))
                result = train(interpreter, batches, RunOptions(steps=STEPS), place=Place())
                done.append((result.step_times[1:], result.timeline, os.getloadavg()[0]))
        if comm.rank == 0:
            written = [_summary(done) for done in turns]
            (folder / "measured.json").write_text(json.dumps(written))
            (folder / "timings.json").write_text(encode(timings))


Turn = tuple[tuple[float, ...], Timeline, float]
"""Seconds of the steps, the timeline of the median one, the load of the machine."""


def _summary(turns: Sequence[Turn]) -> dict[str, object]:
    middle = sorted(turns, key=lambda turn: statistics.median(turn[0]))[len(turns) // 2]
    return {
        "turns": [seconds for seconds, _, _ in turns],
        "timeline": middle[1].to_dict(),
        "load": statistics.fmean(load for _, _, load in turns),
    }


def line(plan: Plan, predicted: Simulation, measured: Measured) -> dict[str, object]:
    """What is printed of one plan."""
    parts = compare(predicted, measured).rows[1:]
    return {
        "plan": plan.name,
        "predicted_ms": round(predicted.step_time * 1e3, 2),
        "measured_ms": round(measured.step_time * 1e3, 2),
        "error": round(100 * (predicted.step_time / measured.step_time - 1), 1),
        "quartiles_ms": [round(q * 1e3, 2) for q in measured.quartiles],
        "parts": {
            p.what: [round(1e3 * p.predicted, 2), round(1e3 * p.measured, 2)] for p in parts
        },
        "load": round(measured.load, 2),
    }


def figures(latency_us: float, bandwidth_gb_s: float) -> dict[str, float]:
    """A link in the units of cluster files."""
    return {"latency_us": round(latency_us, 1), "bandwidth_gb_s": round(bandwidth_gb_s, 3)}


def profile(plans: Sequence[Plan], cache_file: Path) -> None:
    """Time all that the plans run; the other processes' cores run the same meanwhile."""
    load = NUM_PROCESSES - 1
    with TimingCache(cache_file) as timings:
        operators = [
            each
            for (model, _), plan in zip(PLANS, plans, strict=True)
            for each in plan_operators(graph_of(model), plan)
        ]
        profile_operators(operators, Training(), timings, load=load, effort=EFFORT)
        profile_updates(Training(), timings, executor_update, load=load, effort=EFFORT)
        profile_dispatch(timings, executor_dispatch, load=load)


def keep_typical(sources: Sequence[Path], target: Path) -> None:
    """Per key the median of what the caches have."""
    found: dict[TimingKey, list[Measurement]] = {}
    for source in sources:
        with TimingCache(source) as timings:
            for entry in timings.entries():
                found.setdefault(entry.key, []).append(entry.measurement)
    with TimingCache(target) as kept:
        for key, measured in found.items():
            middle = statistics.median(each.median_s for each in measured)
            kept.put(key, replace(measured[0], median_s=middle))


def main() -> None:
    """Print one line a plan, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank)
        return
    cluster = Cluster.preset("local-cpu", devices_per_node=NUM_PROCESSES)
    plans = [plan_of(model, name, cluster) for model, name in PLANS]
    with tempfile.TemporaryDirectory() as folder:
        cache_file = Path(folder, "timings.sqlite")
        measured, link = measure(plans, cache_file)
        with TimingCache(cache_file) as timings:
            here = describe_environment(load=NUM_PROCESSES - 1)
            costs = MeasuredCosts(timings, {"cpu": here}, default_costs())
    plans = [
        replace(plan, cluster=replace(cluster, intra_node=link, inter_node=link)) for plan in plans
    ]
    lines = [
        line(plan, simulate_plan(plan, graph_of(model), costs), found)
        for (model, _), plan, found in zip(PLANS, plans, measured, strict=True)
    ]
    for each in lines:
        print(json.dumps(each), flush=True)
    ranks = spearmanr([x["predicted_ms"] for x in lines], [x["measured_ms"] for x in lines])
    summary = {
        "plans": len(lines),
        "median_error": round(statistics.median(abs(float(str(x["error"]))) for x in lines), 1),
        "spearman": round(float(ranks.statistic), 3),
        "message": figures(link.latency_us, link.bandwidth_gb_s),
        "collectives": [figures(g.latency_us, g.bandwidth_gb_s) for g in link.by_group_size],
        "load": [round(x, 2) for x in os.getloadavg()],
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
