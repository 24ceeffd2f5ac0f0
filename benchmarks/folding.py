"""What does it save to simulate devices that do the same as one?

    python -m benchmarks.folding

Prints one JSON object a line for the last backward block of a GPT, tensor-parallel in the node
and data-parallel between nodes: devices, tasks, and milliseconds to build and to play its task
graph with all devices folded into one cell and with a task per device, best of several; and
whether all copies of all tasks start and end when the folded task does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from stratagem.search.strategies import tensor_parallel
from stratagem.simulator.cell_layouts import Cells
from stratagem.simulator.cells import CellBlock, cell_block
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.costs import RooflineCosts
from stratagem.simulator.engine import simulate
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.models import gpt
from stratagem.simulator.plan import Plan, Stage
from stratagem.simulator.simulation import StageModel, plan_model
from stratagem.simulator.training import Training

DEVICES = (8, 64, 512)
GPUS_PER_NODE = 8
REPEATS = 5


def priced(num_devices: int) -> StageModel:
    """A GPT of 24 layers in one stage on all devices, every price looked up."""
    nodes = num_devices // GPUS_PER_NODE
    axes = (MeshAxis("node", nodes), MeshAxis("gpu", GPUS_PER_NODE))
    mesh = DeviceMesh(axes, tuple(range(num_devices)))
    graph = gpt(num_layers=24, hidden=1024, num_heads=16, batch=8 * nodes)
    plan = Plan(
        name="folding",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=nodes),
        training=Training(),
        stages=(
            Stage(
                tuple(op.name for op in graph.operators),
                mesh,
                tensor_parallel(graph, mesh.shape, 1, zero=2),
            ),
        ),
    )
    return plan_model(plan, graph, RooflineCosts()).stages[0]


def build(stage: StageModel, *split: int) -> CellBlock:
    """The last backward block on cells cut along some axes."""
    choices = np.zeros(len(stage.table.graph.operators), dtype=np.int64)
    cells = Cells(stage.table.mesh.shape, split)
    blocks = stage.blocks
    return cell_block(
        stage.builder, stage.table, blocks, blocks.backward, choices, cells, last=True
    )


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
    stage = priced(num_devices)
    folded, unfolded = build(stage), build(stage, 0, 1)
    once, each = simulate(folded.graph), simulate(unfolded.graph)
    starts, ends = (
        bool((a == b[unfolded.task]).all())
        for a, b in ((each.start, once.start), (each.end, once.end))
    )
    played = [best_ms(lambda b=block: simulate(b.graph)) for block in (folded, unfolded)]
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


def main() -> None:
    """Print one line a number of devices."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for num_devices in DEVICES:
        print(json.dumps(measure(num_devices)), flush=True)


if __name__ == "__main__":
    main()
