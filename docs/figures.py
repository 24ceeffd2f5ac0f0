"""The figures of the pages, drawn by the library itself.

    python docs/figures.py [FOLDER]

They are committed in docs/images; equal inputs give equal figures.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import stratagem as sg
from stratagem.simulator.engine.delta_engine import DeltaEngine
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.schedules.named_schedules import gpipe, interleaved, one_f_one_b, zb_h1
from stratagem.simulator.schedules.schedule_player import StageTimes, play_schedule

PIXELS = 1300
"""How wide figures are, about twice as wide as the text that they stand in."""
WIDTH = 9.0
"""Inches of those that are not the library's own."""

COMPUTE, SYNC = 0, 1
NUM_LAYERS = 9
CHANGED = 3
"""The layer whose work the figure of a replay makes longer."""

UNCHANGED, REPLAYED, SHIFTED = "#c9d6e2", "#f2a23a", "#7fb2dd"


def pipelined() -> sg.Simulation:
    """A step of a GPT on four stages of two devices each."""
    graph = sg.models.gpt(
        num_layers=8, hidden=2048, num_heads=16, vocabulary=32000, sequence=1024, batch=64
    )
    setup = sg.TrainingSetup(microbatch=4, pipeline=4)
    cluster = sg.Cluster.preset("dgx-a100", num_nodes=1)
    return sg.simulate(setup.plan(graph, cluster), graph)


def draw_step(simulation: sg.Simulation) -> Figure:
    """The timeline of a pipelined step, its critical path drawn in."""
    return sg.plots.timelines([simulation.timeline], critical_path=simulation.critical_path)


def draw_memory(simulation: sg.Simulation) -> Figure:
    """What the first and the last stage hold over the step."""
    ranks = (0, len(simulation.memory) - 1)
    return sg.plots.memory([simulation.memory_timeline(rank) for rank in ranks])


def draw_schedules() -> Figure:
    """Four schedules of the same work: 4 ranks, 8 microbatches, backward twice forward."""
    whole = StageTimes(forward=4_000_000, backward=8_000_000)
    halves = StageTimes(forward=2_000_000, backward=4_000_000)
    split = replace(whole, input_gradient=4_000_000, weight_gradient=4_000_000)
    plays = [
        play_schedule(gpipe(4, 8), whole),
        play_schedule(one_f_one_b(4, 8), whole),
        play_schedule(interleaved(8, 8, num_ranks=4), halves),
        play_schedule(zb_h1(4, 8), split),
    ]
    return sg.plots.timelines([play.timeline for play in plays])


def backward_pass() -> TaskGraph:
    """Backward of some layers, each followed by the all-reduce of its gradients."""
    durations = [4] * NUM_LAYERS + [3] * NUM_LAYERS
    chain = [(layer, layer + 1) for layer in range(NUM_LAYERS - 1)]
    syncs = [(layer, NUM_LAYERS + layer) for layer in range(NUM_LAYERS)]
    held = [(COMPUTE,)] * NUM_LAYERS + [(SYNC,)] * NUM_LAYERS
    return build_task_graph(durations, chain + syncs, resource_sets=held, num_resources=2)


def draw_delta() -> Figure:
    """A change, the few tasks that are played again, and the rest, which only moves."""
    graph = backward_pass()
    before = simulate(graph)
    engine = DeltaEngine(graph)
    engine.propose([CHANGED], durations=[6])
    after = engine.times()
    order = np.lexsort((np.arange(graph.num_tasks), before.ready))
    first = int(np.flatnonzero(order == CHANGED)[0])
    again = set(order[first : first + engine.replayed].tolist())
    behind = set(order[first + engine.replayed :].tolist())
    shifts = {int(after.end[task] - before.end[task]) for task in behind}
    assert len(shifts) == 1, f"the rest moves by {shifts}, not by one shift"
    figure, (top, bottom) = plt.subplots(
        2, figsize=(WIDTH, 3.4), sharex=True, layout="constrained"
    )
    for axes, times, title in ((top, before, "played"), (bottom, after, "proposed")):
        for task in range(graph.num_tasks):
            colour = REPLAYED if task in again else SHIFTED if task in behind else UNCHANGED
            lane = task // NUM_LAYERS
            start, end = int(times.start[task]), int(times.end[task])
            axes.barh(-lane, end - start, left=start, color=colour, edgecolor="white", height=0.8)
            name = f"{'BS'[lane]}{task % NUM_LAYERS}"
            axes.text((start + end) / 2, -lane, name, ha="center", va="center", fontsize=7)
        axes.set_yticks([0, -1], ["compute", "link"])
        axes.set_title(f"{title}: {times.makespan} ns", loc="left", fontsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
    bottom.set_xlabel("ns")
    labels = (
        (UNCHANGED, "before the change"),
        (REPLAYED, f"played again: {engine.replayed} of {graph.num_tasks}"),
        (SHIFTED, f"the old timeline, shifted by {shifts.pop()} ns"),
    )
    top.legend(
        handles=[Patch(color=colour, label=label) for colour, label in labels],
        ncols=3,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8,
    )
    plt.close(figure)
    return figure


def draw_search(result: sg.SearchResult) -> Figure:
    """The plan that was found beside the known strategies, and the bound under which none is."""
    assert result.bound is not None
    rows = [row for row in result.rows if row[3]]
    rows.sort(key=lambda row: row[1])
    figure, axes = plt.subplots(figsize=(WIDTH, 0.27 * len(rows) + 0.8), layout="constrained")
    for place, (name, seconds, _, _) in enumerate(rows):
        found = name == "found plan"
        axes.barh(-place, seconds * 1e3, color="#2f6aa3" if found else SHIFTED, height=0.8)
    label = "no plan is under this"
    axes.axvline(result.bound * 1e3, color="#cf4f4a", linestyle="--", label=label)
    axes.set_yticks([-place for place in range(len(rows))], [row[0] for row in rows])
    axes.set_xlabel("predicted step, ms")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.97))
    axes.spines[["top", "right"]].set_visible(False)
    plt.close(figure)
    return figure


def searched() -> sg.SearchResult:
    """A search in which the chains have something to find."""
    graph = sg.models.gpt(
        num_layers=4, hidden=1024, num_heads=16, vocabulary=32000, sequence=1024, batch=32
    )
    return sg.search(
        graph,
        sg.Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4),
        training=sg.Training("bfloat16"),
        budget=sg.Budget(evaluations=20_000),
        prefer="fastest",
        draws=0,
        progress=False,
    )


def draw_all(folder: Path) -> list[Path]:
    """Draw every figure into a folder."""
    mpl.use("Agg")
    simulation = pipelined()
    figures = {
        "step": draw_step(simulation),
        "memory": draw_memory(simulation),
        "schedules": draw_schedules(),
        "delta": draw_delta(),
        "search": draw_search(searched()),
    }
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=PIXELS / figure.get_figwidth(), metadata={"Software": None})
        written.append(path)
    return written


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
