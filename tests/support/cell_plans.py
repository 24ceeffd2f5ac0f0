"""Random plans with pins, and their stages and steps played folded, unfolded and flat."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.image_splits import split_images
from stratagem.simulator.graph.models import bert, gpt, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.macro_graph import are_blocks
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.flat_graph import FlatGraph
from stratagem.simulator.simulation.priced_plan import PlanModel, StageModel, macro_durations

CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
COSTS = RooflineCosts()
BATCH = 240


def shared_linears() -> OperatorGraph:
    """Six linears with two weights between them: parameters tied in and between stages."""
    b = GraphBuilder("shared")
    x, labels = b.input("x", (BATCH, 64)), b.input("target", (BATCH,), "int64")
    weights = [b.parameter(name, (64, 64)) for name in ("one", "two")]
    for i, which in enumerate((0, 1, 0, 1, 1, 0)):
        x = b.pointwise("relu", b.linear(x, weights[which], name=f"linear.{i}"))
    return b.build(b.cross_entropy(x, labels))


MODELS: dict[str, Callable[[], OperatorGraph]] = {
    "gpt": lambda: gpt(
        num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=BATCH
    ),
    "bert": lambda: bert(
        num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=BATCH
    ),
    "shared": shared_linears,
    "mlp": lambda: mlp([64, 128, 96, 32], batch=BATCH),
    "resnet": lambda: resnet(18, batch=BATCH, image=32, classes=16),
    "split resnet": lambda: split_images(resnet(18, batch=BATCH, image=48, classes=16)),
}
SHAPES = {8: [(2, 2, 2), (2, 4), (4, 2), (8,)], 4: [(4,), (2, 2), (1, 4)], 2: [(2,), (2, 1)]}


@functools.cache
def model_graph(name: str) -> OperatorGraph:
    return MODELS[name]()


@functools.cache
def options(
    name: str, parts: int, i: int, shape: tuple[int, ...], plain: bool
) -> tuple[Choice, ...]:
    graph = model_graph(name).microbatch(parts)
    allowed = Options() if plain else Options(chunks=(1, 2), fuse=True, stream=True, in_sums=True)
    return operator_choices(graph, graph.operators[i], shape, (0, 1, 2, 3), allowed)


def mesh_of(shape: Sequence[int], first: int = 0) -> DeviceMesh:
    axes = tuple(MeshAxis(f"a{i}", n) for i, n in enumerate(shape))
    return DeviceMesh(axes, tuple(range(first, first + int(np.prod(shape)))))


def make_plan(graph: OperatorGraph, stages: Sequence[Stage], **more: object) -> Plan:
    fields = {
        "name": "test",
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "cluster": CLUSTER,
        "training": Training(),
        "stages": tuple(stages),
    } | more
    return Plan(**fields)  # type: ignore[arg-type]


def random_plan(
    name: str,
    rng: random.Random,
    *,
    pins: float = 0.0,
    blocking: bool = False,
    plain: bool = False,
) -> Plan:
    """Any cut into stages, any meshes, any choices; `pins` is how often an operator is pinned.

    A `plain` plan recomputes nothing, runs nothing in pieces and fuses nothing.
    """
    graph = model_graph(name)
    schedule = rng.choice(["gpipe", "1f1b", "zb-h1", "interleaved"])
    num_stages, parts = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 5, 6])
    if schedule == "interleaved":
        num_stages, parts = 4, rng.choice([2, 4, 6])
    num_ranks = 2 if schedule == "interleaved" else num_stages
    devices = {1: 8, 2: 4, 3: 2, 4: 2}[num_ranks]
    shapes = [rng.choice(SHAPES[devices]) for _ in range(num_ranks)]
    names = [op.name for op in graph.operators]
    cuts = sorted(rng.sample(range(1, len(names)), num_stages - 1))
    stages, again = [], not plain and rng.random() < 0.5
    for s, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, len(names)], strict=True)):
        shape = shapes[s % num_ranks]
        pinned = [axis for axis in range(len(shape)) if rng.random() < 0.6] if pins else []
        choices = {
            names[i]: pin(
                rng.choice(options(name, parts, i, shape, plain)),
                {a: rng.randrange(shape[a]) for a in pinned if rng.random() < pins},
                source=graph.operators[i].is_source,
                recompute=again and rng.random() < 0.5,
            )
            for i in range(lo, hi)
        }
        stages.append(Stage(tuple(names[lo:hi]), mesh_of(shape, s % num_ranks * devices), choices))
    return make_plan(
        graph,
        stages,
        num_microbatches=parts,
        schedule=schedule,
        bucket_bytes=rng.choice([0, 4096]),
        inputs_first=rng.random() < 0.3,
        cluster=replace(
            busy_cores(CLUSTER) if blocking else CLUSTER,
            compute_slowdown=rng.choice([0.0, 0.13]),
            calibration=Calibration(
                launch_us=rng.choice([0.0, 8.0, 40.0]), stall_us=rng.choice([0.0, 3.0])
            ),
        ),
    )


def pin(choice: Choice, where: dict[int, int], *, source: bool, recompute: bool) -> Choice:
    if source:
        return choice
    config = tuple(Pin(where[a]) if a in where else p for a, p in enumerate(choice.config))
    if where:  # A pin may leave a size that has no such pieces.
        choice = replace(choice, chunks=1, streamed=False)
    return replace(choice, config=config, recompute=recompute)


def busy_cores(cluster: Cluster) -> Cluster:
    return replace(
        cluster,
        intra_node=replace(cluster.intra_node, shares_compute=True, bandwidth_gb_s=1.0),
        inter_node=replace(cluster.inter_node, shares_compute=True),
    )


def unfolded(model: PlanModel) -> PlanModel:
    return model.split_along([range(len(stage.table.mesh.shape)) for stage in model.stages])


def coarse_cell(stage: StageModel, fine: StageModel, cell: int) -> int:
    """The cell of `stage` that a cell of `fine`, split along more axes, is part of."""
    where = [int(fine.cells.index(axis)[cell]) for axis in stage.split]
    return int(np.ravel_multi_index(where, stage.cells.ways)) if where else 0


def assert_same_times(stage: StageModel, fine: StageModel) -> None:
    """Every copy on the fine cells runs when the copy that it is part of does."""
    for kind, ours in stage.cell_blocks.items():
        theirs = fine.cell_blocks[kind]
        once, each = simulate(ours.graph), simulate(theirs.graph)
        assert once.makespan == each.makespan
        copy_at = {
            (int(task), int(cell)): copy
            for copy, task in enumerate(ours.task)
            for cell in ours.cells_of(copy)
        }
        seen = set()
        for copy, task in enumerate(theirs.task.tolist()):
            for cell in theirs.cells_of(copy).tolist():
                assert (task, cell) not in seen, "a cell is in two copies of a task"
                seen.add((task, cell))
                part_of = copy_at[task, coarse_cell(stage, fine, cell)]
                assert each.start[copy] == once.start[part_of]
                assert each.end[copy] == once.end[part_of]
        cells_of_task = defaultdict(set)
        for task, cell in seen:
            cells_of_task[task].add(coarse_cell(stage, fine, cell))
        assert {(t, c) for t, cells in cells_of_task.items() for c in cells} == copy_at.keys()


seeds = st.integers(0, 2**32)
models = st.sampled_from(sorted(MODELS))


def composed_times(model: PlanModel, flat: FlatGraph) -> tuple[list[int], list[int]]:
    """When two levels say that each task of the flat graph starts and ends."""
    macro = simulate(model.macro.with_durations(macro_durations(model)))
    start, end = [], []
    begun: set[int] = set()
    rests = model.macro.rests
    beside = set(range(model.macro.graph.num_tasks)) - {*model.macro.blocks, *rests.values()}
    for task, within in zip(flat.macro_task.tolist(), flat.block_task.tolist(), strict=True):
        stage = int(model.macro.item[task])
        if within >= 0:
            kind = model.macro.block_kind(task)
            times = model.block_times[stage][kind]
            start.append(int(macro.start[task] + times.start[within]))
            end.append(int(macro.start[task] + times.end[within]))
        elif (
            not are_blocks(model.macro.kind[task])
            or task in beside
            or (task in rests and task in begun)
        ):
            # What leaves a last backward waits for an idle task as long as any backward.
            start.append(int(macro.start[task]))
            end.append(int(macro.end[task]))
        else:
            both = macro.end if task in begun | set(rests.values()) else macro.start
            start.append(int(both[task]))
            end.append(int(both[task]))
        begun.add(task)
    return start, end
