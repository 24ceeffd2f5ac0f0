"""How far is the predicted step time from the measured one, on this machine?

    python -m benchmarks.local_fidelity
    python -m benchmarks.local_fidelity --one-device dgx-h200

Plans of four models (two small transformers, a perceptron, a ResNet-18) on two processes over
gloo: data and tensor parallelism, ZeRO, recompute, pipelines under all synchronous schedules; or,
on one device of a bundled cluster, eight plans that differ in microbatches and recompute:
larger models on the GPU of this machine, in bfloat16 and by steps whose instructions are not
timed, the small ones on one of its cores (``local-cpu``). Operators, updates, the executor's
dispatch or launches and the link are measured here; nothing that is measured of a plan's step
goes into its prediction. All plans are alive in the same processes and
take turns, among themselves and with the timing of operators and of collectives, so that
whatever else the machine does meets all of them alike: the speed of a shared machine drifts by
more than the errors in question. Of every operator the mean of its turns counts. Prints one JSON
object a plan: predicted and measured milliseconds (the median of the turns' medians), error in
percent, the stated error (one standard deviation), the quartiles of the measured steps, how many
of the turns lie within the 80 % interval of the prediction, the error of single turns with the
pace that the cores had in each taken into account, what a device spends on each kind of task
(predicted and measured), and the load of the machine while it ran. The last line is the summary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.local_plans import (
    TURNS,
    Setting,
    batch_of,
    one_device,
    state_of,
    two_processes,
)
from stratagem.calibration.executor_measurements import (
    LOOPBACK,
    executor_update,
)
from stratagem.calibration.measured_links import measured_host
from stratagem.calibration.profile_space import evicting, profile_host, touched_bytes
from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.cuda.fused_losses import faster_on
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.executor.running.launch import run_ranks
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.rank_place import Place
from stratagem.profiler import (
    CollectiveTiming,
    Effort,
    MeasuredCosts,
    TimingCache,
    TimingEntry,
    describe_environment,
    fit_link,
    plan_operators,
    profile_operators,
    profile_updates,
    time_collectives,
)
from stratagem.runs.predicted_and_measured import compare, ratio_at_paces
from stratagem.simulator.base.files import decode, encode
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline.timeline import Timeline

STEPS = 4
"""Of a turn, of which the first warms up; the operators have a turn before each."""
GPU_STEPS, GPU_WARMUP = 14, 4
"""Of a turn on a GPU. Its host runs ahead: the first steps are given, and not waited for."""
TURNS_A_LINK, LINK_REPEATS = 3, 4
"""After so many turns the collectives have one, with so many repeats a round."""
EFFORT = Effort(seconds=0.0, max_drift=math.inf)
"""The fewest repeats in a turn: a machine's speed changes within seconds, so many short turns say
more than a long one. What the machine is slowed by slows the plans too, so it stays.
"""
DEVIATIONS_OF_80 = 1.2816
"""Standard deviations on either side that hold 80 % of a normal distribution."""
PATIENCE = 1200.0
"""Seconds that the other rank may have to wait while operators are timed."""


@dataclass(frozen=True)
class Measured:
    """What the turns of one plan showed: seconds of all its steps, and the load meanwhile."""

    turns: tuple[tuple[float, ...], ...]
    timeline: Timeline
    load: float
    paces: tuple[tuple[float, ...], ...] = ()
    """Of each turn the seconds of the reference kernel around its steps; none on a GPU."""

    @property
    def step_time(self) -> float:
        """Seconds: the median of the turns' medians."""
        return statistics.median(statistics.median(turn) for turn in self.turns)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the seconds of all steps."""
        low, _, high = statistics.quantiles([s for turn in self.turns for s in turn], n=4)
        return low, high


def measure(setting: Setting, cache_file: Path) -> tuple[list[Measured], Cluster]:
    """Run all plans in turns, in as many processes as there are devices, and time their link.

    Times of operators come into the cache, those of the link into the cluster.
    """
    cluster = setting.cluster
    with tempfile.TemporaryDirectory() as folder:
        if cluster.num_devices > 1:
            command = ["benchmarks.local_fidelity", "--rank", folder]
            command += ["--turns", str(setting.turns), "--only", setting.only]
            run_ranks(command, cluster.num_devices, timeout=5400)
        else:
            turns = partial(take_turns, setting=setting, folder=Path(folder))
            run_local(1, turns, timeout=PATIENCE, device=setting.device)
        text = Path(folder, "measured.json").read_text()
        timings = decode(Path(folder, "timings.json").read_text(), LinkTimings, "link timings")
        keep_typical(sorted(Path(folder).glob("*.sqlite")), cache_file)
    found = [
        Measured(
            tuple(tuple(turn) for turn in each["turns"]),
            Timeline.from_dict(each["timeline"]),
            each["load"],
            tuple(tuple(paces) for paces in each["paces"]),
        )
        for each in json.loads(text)
    ]
    typical = [
        replace(
            same[0],
            seconds=statistics.fmean(timing.seconds for timing in same),
            wait=statistics.fmean(timing.wait for timing in same),
        )
        for same in zip(*timings, strict=True)
    ]
    if typical:
        link = fit_link(typical, LOOPBACK, shares_compute=True)
        cluster = replace(cluster, intra_node=link, inter_node=link)
    return found, measured_host(cluster) if setting.device == "cuda" else cluster


LinkTimings = list[list[CollectiveTiming]]
"""Every time that the collectives had a turn, the same ones."""


def run_rank(folder: Path, setting: Setting) -> None:
    """One process of `measure`."""
    with GlooCommunicator(timeout=PATIENCE) as comm:
        take_turns(comm, setting, folder)


def take_turns(comm: Communicator, setting: Setting, folder: Path) -> None:
    """One rank of all plans; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    plans = setting.all_plans()
    runners = []
    for (model, _), plan in zip(setting.plans, plans, strict=True):
        graph = setting.graph(model)
        interpreter = Interpreter(prepare(plan, graph), comm, state_of(graph))
        runners.append((interpreter, Batches(batch_of(model, graph), graph)))
    turns: list[list[Turn]] = [[] for _ in runners]
    timings: LinkTimings = []
    steps, warm = RunOptions(steps=STEPS), slice(1, None)
    if setting.device == "cuda":  # As most steps of a run: the first and the last are timed.
        steps, warm = RunOptions(steps=GPU_STEPS, timed_every=GPU_STEPS), slice(GPU_WARMUP, -1)
    for turn in range(setting.turns):
        if comm.rank == 0:
            profile(setting, plans, folder / f"{turn}.sqlite", first=not turn)
        comm.barrier()
        if turn % TURNS_A_LINK == 0 and comm.world_size > 1:
            timings.append(time_collectives(comm, repeats=LINK_REPEATS))
        for (interpreter, batches), done in zip(runners, turns, strict=True):
            # On one batch a loss is so small in the end that cores compute with denormal numbers.
            interpreter.reset()
            result = train(interpreter, batches, steps, place=Place())
            paces = tuple(map(max, result.step_paces[warm]))
            done.append((result.step_times[warm], result.timeline, os.getloadavg()[0], paces))
    if comm.rank == 0:
        written = [_summary(done) for done in turns]
        (folder / "measured.json").write_text(json.dumps(written))
        (folder / "timings.json").write_text(encode(timings))


Turn = tuple[tuple[float, ...], Timeline, float, tuple[float, ...]]
"""Seconds of the steps, the timeline of the median one, the load of the machine, and the seconds
of the reference kernel around each step, on the slowest core."""


def _summary(turns: Sequence[Turn]) -> dict[str, object]:
    middle = sorted(turns, key=lambda turn: statistics.median(turn[0]))[len(turns) // 2]
    return {
        "turns": [seconds for seconds, *_ in turns],
        "timeline": middle[1].to_dict(),
        "load": statistics.fmean(load for _, _, load, _ in turns),
        "paces": [paces for *_, paces in turns if paces],
    }


@dataclass(frozen=True, eq=False)
class Compared:
    """A plan as it was predicted and measured."""

    plan: Plan
    predicted: Simulation
    measured: Measured

    @property
    def within(self) -> list[bool]:
        """Of each turn, whether its median step lies in the 80 % interval of the prediction."""
        found = self.predicted
        return [
            abs(math.log(statistics.median(turn) / found.step_time))
            <= DEVIATIONS_OF_80 * found.relative_error
            for turn in self.measured.turns
        ]

    @property
    def errors_at_pace(self) -> list[float]:
        """Of each turn, the median of what is predicted at a step's pace over what it took."""
        if self.predicted.pace is None or not self.measured.paces:
            return []
        return [
            ratio_at_paces(self.predicted, paces, turn) - 1
            for paces, turn in zip(self.measured.paces, self.measured.turns, strict=True)
        ]


def compared(setting: Setting, kept: Path | None = None) -> tuple[list[Compared], Cluster]:
    """Every plan of a setting, measured and then predicted, and the cluster with its link.

    Times of operators are `kept` in a new cache, if one is named.
    """
    kind = setting.cluster.device_type(0).name
    with tempfile.TemporaryDirectory() as folder:
        cache_file = kept or Path(folder, "timings.sqlite")
        measured, cluster = measure(setting, cache_file)
        with TimingCache(cache_file) as timings:
            here = describe_environment(setting.device, load=setting.load)
            costs = MeasuredCosts(timings, {kind: here}, default_costs())
    plans = [replace(plan, cluster=cluster) for plan in setting.all_plans()]
    found = [
        Compared(plan, simulate_plan(plan, setting.graph(model), costs), each)
        for (model, _), plan, each in zip(setting.plans, plans, measured, strict=True)
    ]
    return found, cluster


def line(each: Compared) -> dict[str, object]:
    """What is printed of one plan."""
    predicted, measured = each.predicted, each.measured
    parts = compare(predicted, measured).rows[1:]
    return {
        "plan": each.plan.name,
        "predicted_ms": round(predicted.step_time * 1e3, 2),
        "measured_ms": round(measured.step_time * 1e3, 2),
        "error": round(100 * (predicted.step_time / measured.step_time - 1), 1),
        "stated": round(100 * predicted.relative_error, 1),
        "within_80": round(statistics.fmean(each.within), 2),
        "at_pace": [round(100 * error, 1) for error in each.errors_at_pace],
        "quartiles_ms": [round(q * 1e3, 2) for q in measured.quartiles],
        "parts": {
            p.what: [round(1e3 * p.predicted, 2), round(1e3 * p.measured, 2)] for p in parts
        },
        "load": round(measured.load, 2),
    }


def kinds_off(found: Sequence[Compared]) -> dict[str, float]:
    """Per kind of task the error in percent of all plans together."""
    sums: dict[str, list[float]] = {}
    for each in found:
        for part in compare(each.predicted, each.measured).rows[1:]:
            both = sums.setdefault(part.what, [0.0, 0.0])
            both[0] += part.predicted
            both[1] += part.measured
    return {
        what: round(100 * (predicted / measured - 1), 1)
        for what, (predicted, measured) in sums.items()
        if measured
    }


def figures(latency_us: float, bandwidth_gb_s: float) -> dict[str, float]:
    """A link in the units of cluster files."""
    return {"latency_us": round(latency_us, 1), "bandwidth_gb_s": round(bandwidth_gb_s, 3)}


def profile(
    setting: Setting, plans: Sequence[Plan], cache_file: Path, *, first: bool = True
) -> None:
    """Time all that the plans run; the other processes' cores run the same meanwhile.

    How much less launches take a GPU's host in a step is measured the `first` time only.
    """
    load, device = setting.load, setting.device
    with TimingCache(cache_file) as timings:
        training = setting.training
        for name in setting.models:
            graph = setting.graph(name)
            operators = [
                each
                for (model, _), plan in zip(setting.plans, plans, strict=True)
                if model == name
                for each in plan_operators(graph, plan)
            ]
            profile_operators(
                operators,
                training,
                timings,
                device=device,
                load=load,
                effort=evicting(EFFORT, touched_bytes(graph, setting.cluster, training), device),
                faster=faster_on(torch.device(device)),
            )
        touched = max(
            touched_bytes(setting.graph(name), setting.cluster, training)
            for name in setting.models
        )
        effort = evicting(EFFORT, touched, device)
        profile_updates(
            training, timings, executor_update, device=device, load=load, effort=effort
        )
        if device == "cpu" or first:
            profile_host(timings, device, load=load)


def keep_typical(sources: Sequence[Path], target: Path) -> None:
    """Per key the mean of what the caches have: what a step takes is the sum of its operators."""
    found: dict[str, list[TimingEntry]] = {}
    for source in sources:
        with TimingCache(source) as timings:
            for entry in timings.entries():
                found.setdefault(entry.key.digest, []).append(entry)
    with TimingCache(target) as kept:
        for same in found.values():
            mean = statistics.fmean(entry.measurement.median_s for entry in same)
            kept.put(same[0].key, replace(same[0].measurement, median_s=mean))


def main() -> None:
    """Print one line a plan, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--one-device", metavar="CLUSTER", help="plans on one device of a bundled cluster"
    )
    parser.add_argument(
        "--turns", type=int, default=TURNS, metavar="N", help="of every plan on two processes"
    )
    parser.add_argument("--only", default="", metavar="MODEL", help="the plans of one model")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_device:
        setting = one_device(arguments.one_device)
    else:
        setting = two_processes(arguments.turns, arguments.only)
    if arguments.rank is not None:
        run_rank(arguments.rank, setting)
        return
    found, cluster = compared(setting)
    lines = [line(each) for each in found]
    for each in lines:
        print(json.dumps(each), flush=True)
    ranks = spearmanr([x["predicted_ms"] for x in lines], [x["measured_ms"] for x in lines])
    link = cluster.intra_node
    off = [abs(float(str(x["error"]))) for x in lines]
    at_pace = [abs(100 * error) for each in found for error in each.errors_at_pace]
    summary = {
        "plans": len(lines),
        "median_error": round(statistics.median(off), 1),
        "percentile_90": round(float(np.percentile(off, 90)), 1),
        "mean": round(statistics.fmean(float(str(x["error"])) for x in lines), 1),
        "spearman": round(float(ranks.statistic), 3),
        "turns_within_80": round(statistics.fmean(w for each in found for w in each.within), 3),
        "turns_at_pace": round(statistics.median(at_pace), 1) if at_pace else None,
        "kinds": kinds_off(found),
        "message": figures(link.latency_us, link.bandwidth_gb_s),
        "collectives": [figures(g.latency_us, g.bandwidth_gb_s) for g in link.by_group_size],
        "wait": round(link.wait(cluster.num_devices), 3),
        "launch_us": round(cluster.calibration.launch_us, 1),
        "load": [round(x, 2) for x in os.getloadavg()],
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
