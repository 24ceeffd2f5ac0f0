"""How long does it take to draw and save a timeline, and how much faster is that than `barh`?

    python -m benchmarks.timeline

Prints one JSON object a line: the case, its tasks (rows of the timeline) and lanes, the ms to make
and save the PNG, the same with the critical path drawn in, and the ratio of matplotlib's own
`barh` to the first: a figure of the same size, saved too, with 1,000 of the tasks, its time less
that of an empty figure scaled to all of them. Each is the best of several repeats.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import tensor_parallel
from stratagem.simulator.drawing.timeline_plot import plot_timelines
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline.timeline import Timeline

NUM_STAGES = 8
BARS = 1_000
REPEATS = 4


@dataclass(frozen=True)
class Case:
    """A GPT in a 1F1B pipeline of 8 stages, each on 2 devices in tensor parallelism."""

    num_layers: int
    num_microbatches: int


CASES = [Case(4, 2), Case(8, 8), Case(24, 32), Case(48, 64)]


def simulation(case: Case) -> Simulation:
    """Simulate a case on two nodes of A100s."""
    whole = gpt(
        num_layers=case.num_layers,
        hidden=1024,
        num_heads=16,
        vocabulary=50304,
        sequence=1024,
        batch=8 * case.num_microbatches,
    )
    cluster = Cluster.preset("dgx-a100", num_nodes=2)
    choices = tensor_parallel(whole.microbatch(case.num_microbatches), (1, 2), 1)
    stages = []
    for number, names in enumerate(balanced_stages(whole, cluster, NUM_STAGES)):
        axes = (MeshAxis("data", 1), MeshAxis("tensor", 2))
        mesh = DeviceMesh(axes, (2 * number, 2 * number + 1))
        stages.append(Stage(names, mesh, {name: choices[name] for name in names}))
    plan = Plan(
        name="pipeline",
        model=whole.name,
        fingerprint=whole.fingerprint,
        cluster=cluster,
        training=Training("bfloat16"),
        stages=tuple(stages),
        num_microbatches=case.num_microbatches,
    )
    return simulate_plan(plan, whole, default_costs())


def draw_barh(timeline: Timeline, num_bars: int, path: Path) -> None:
    """Draw some tasks as most people would: a rectangle each."""
    from matplotlib import pyplot as plt

    colours = {kind: f"C{number}" for number, kind in enumerate(set(timeline.kinds))}
    figure, ax = plt.subplots(figsize=(14, 10), dpi=120, layout="constrained")
    ax.barh(
        timeline.lane[:num_bars],
        (timeline.end - timeline.start)[:num_bars] * 1e-6,
        left=timeline.start[:num_bars] * 1e-6,
        color=[colours[kind] for kind in timeline.kinds[:num_bars]],
    )
    ax.set_yticks(range(len(timeline.lanes)), timeline.lanes)
    figure.savefig(path)
    plt.close(figure)


def milliseconds(call: Callable[[], object]) -> float:
    """Time the fastest of several calls."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


def measure(case: Case, folder: Path) -> dict[str, object]:
    """Draw one case in every way."""
    simulated = simulation(case)
    timeline, critical_path = simulated.timeline, simulated.critical_path
    png = folder / "step.png"
    ours = milliseconds(lambda: plot_timelines([timeline], png))
    with_path = milliseconds(lambda: plot_timelines([timeline], png, critical_path=critical_path))
    bars = min(BARS, timeline.num_rows)
    empty = milliseconds(lambda: draw_barh(timeline, 0, png))
    each = (milliseconds(lambda: draw_barh(timeline, bars, png)) - empty) / bars
    barh = empty + each * timeline.num_rows
    return {
        "case": f"{case.num_layers} layers, {NUM_STAGES} stages x {case.num_microbatches}",
        "tasks": timeline.num_rows,
        "lanes": len(timeline.lanes),
        "ms": round(ours),
        "ms_with_path": round(with_path),
        "ratio_barh": round(barh / ours, 1),
    }


def main() -> None:
    """Print one line a case."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    mpl.use("agg")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            print(json.dumps(measure(case, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
