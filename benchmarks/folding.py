"""What does it save to simulate devices, and pipeline stages, that do the same as one?

    python -m benchmarks.folding

Prints one JSON object a line for the last backward block of a GPT, tensor-parallel in the node
and data-parallel between nodes: devices, tasks, and milliseconds to build and to play its task
graph with all devices folded into one cell and with a task per device, best of several; and
whether all copies of all tasks start and end when the folded task does. The last line is a
pipeline: milliseconds to build and play the blocks of its stages, those of equal stages once or
all of them, and whether the times are equal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from stratagem.searcher.space.strategies import tensor_parallel
from stratagem.simulator.cells.cell_layouts import Cells, Layouts
from stratagem.simulator.cells.device_cells import CellBlock, cell_block
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.priced_plan import (
    PlanModel,
    StageModel,
    block_times,
    plan_model,
)

DEVICES = (8, 64, 512)
GPUS_PER_NODE = 8
REPEATS = 5


def priced(graph: OperatorGraph, parts: Sequence[Sequence[str]], num_devices: int) -> PlanModel:
    """A stage for each part of the operators, every price looked up."""
    share = num_devices // len(parts)
    axes = (MeshAxis("node", share // GPUS_PER_NODE), MeshAxis("gpu", GPUS_PER_NODE))
    meshes = [
        DeviceMesh(axes, tuple(range(first, first + share)))
        for first in range(0, num_devices, share)
    ]
    choices = tensor_parallel(graph, meshes[0].shape, 1, zero=2)
    plan = Plan(
        name="folding",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=num_devices // GPUS_PER_NODE),
        training=Training(),
        stages=tuple(
            Stage(tuple(names), mesh, {name: choices[name] for name in names})
            for names, mesh in zip(parts, meshes, strict=True)
        ),
    )
    return plan_model(plan, graph, default_costs())


def layers_in_stages(graph: OperatorGraph, num_layers: int, num_stages: int) -> list[list[str]]:
    """Equally many layers a stage; what is before and behind them in the first and the last."""
    parts: list[list[str]] = [[] for _ in range(num_stages)]
    stage = 0
    for op in graph.operators:
        if op.name.startswith("h."):
            stage = int(op.name.split(".")[1]) * num_stages // num_layers
        parts[0 if op.is_source else stage].append(op.name)
    return parts


def build(stage: StageModel, *split: int) -> CellBlock:
    """The last backward block on cells cut along some axes."""
    choices = np.zeros(len(stage.table.graph.operators), dtype=np.int64)
    cells = Cells(stage.table.mesh.shape, split)
    blocks = stage.blocks
    layouts = Layouts(stage.builder, stage.table, choices, cells)
    return cell_block(blocks, blocks.backward, choices, layouts, last=True)


def best_ms(call: Callable[[], object]) -> float:
    """Milliseconds of the fastest of several calls."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return round(best * 1e3, 3)


def measure(num_devices: int) -> dict[str, object]:
    """Build and play the block both ways, and compare all times."""
    graph = gpt(num_layers=24, hidden=1024, num_heads=16, batch=num_devices)
    names = [op.name for op in graph.operators]
    stage = priced(graph, [names], num_devices).stages[0]
    folded, unfolded = build(stage), build(stage, 0, 1)
    once, each = simulate(folded.graph), simulate(unfolded.graph)
    starts, ends = (
        bool((a == b[unfolded.task]).all())
        for a, b in ((each.start, once.start), (each.end, once.end))
    )
    played = [best_ms(partial(simulate, block.graph)) for block in (folded, unfolded)]
    return {
        "case": "gpt-24 last backward",
        "devices": num_devices,
        "tasks_folded": folded.graph.num_tasks,
        "tasks_unfolded": unfolded.graph.num_tasks,
        "build_ms_folded": best_ms(lambda: build(stage)),
        "build_ms_unfolded": best_ms(lambda: build(stage, 0, 1)),
        "play_ms_folded": played[0],
        "play_ms_unfolded": played[1],
        "ratio_play": round(played[1] / played[0], 1),
        "equal": starts and ends,
    }


def measure_stages(num_layers: int, num_stages: int) -> dict[str, object]:
    """Build and play the blocks of a pipeline, sharing those of equal stages or not."""
    graph = gpt(num_layers=num_layers, hidden=1024, num_heads=16, batch=64)
    parts = layers_in_stages(graph, num_layers, num_stages)
    model = priced(graph, parts, num_stages * GPUS_PER_NODE)

    def anew() -> PlanModel:
        return model.split_along([()] * num_stages)

    shared, alone = model.block_times, [block_times(stage) for stage in model.stages]
    once = best_ms(lambda: anew().block_times)
    each = best_ms(lambda: [block_times(stage) for stage in anew().stages])
    return {
        "case": f"gpt-{num_layers} in {num_stages} stages",
        "distinct_stages": len({id(times) for times in shared}),
        "ms_once": once,
        "ms_each": each,
        "ratio": round(each / once, 2),
        "equal": all(
            (ours.end == theirs.end).all()
            for pair in zip(shared, alone, strict=True)
            for ours, theirs in zip(*(times.values() for times in pair), strict=True)
        ),
    }


def main() -> None:
    """Print one line a number of devices, and one for a pipeline."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for num_devices in DEVICES:
        print(json.dumps(measure(num_devices)), flush=True)
    print(json.dumps(measure_stages(96, 8)), flush=True)


if __name__ == "__main__":
    main()
