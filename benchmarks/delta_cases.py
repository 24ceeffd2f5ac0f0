"""Task graphs and changes of them that `benchmarks.delta` plays."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.space.skeletons import operator_choices, stage_meshes
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.stage.stage_blocks import Block, StageBlocks

Change = tuple[Ints, Ints, Ints]
"""Tasks, and their new durations and sets of resources."""

NUM_PROPOSALS = 300
SHARED = (TaskKind.COMMUNICATION, TaskKind.GRADIENT_SYNC)


@dataclass(frozen=True, eq=False)
class Proposals:
    """Changes in flat arrays: those of proposal k begin at ``starts[k]``."""

    starts: Ints
    tasks: Ints
    durations: Ints
    sets: Ints

    @property
    def count(self) -> int:
        """The number of proposals."""
        return self.starts.size - 1

    def proposal(self, k: int) -> Change:
        """Tasks, durations and sets of proposal k."""
        part = slice(self.starts[k], self.starts[k + 1])
        return self.tasks[part], self.durations[part], self.sets[part]


@dataclass(frozen=True)
class Case:
    """A name, and what builds the graph and its changes."""

    name: str
    build: Callable[[], tuple[TaskGraph, Proposals]]


def join(changes: Sequence[Change]) -> Proposals:
    """Lay changes (tasks, durations, sets) out in flat arrays."""
    starts = np.cumsum([0, *(tasks.size for tasks, _, _ in changes)]).astype(np.int64)
    return Proposals(starts, *(np.concatenate(column) for column in zip(*changes, strict=True)))


# --- Blocks of real models: one operator gets another choice ------------------------------------


def wide_resnet(counts: Sequence[int], *, batch: int, widening: int = 2) -> OperatorGraph:
    """A ResNet of bottlenecks with wide 3 × 3 convolutions (Zagoruyko & Komodakis 2016)."""
    b = GraphBuilder("wide_resnet")

    def convolved(
        name: str, x: DraftTensor, channels: int, kernel: int, stride: int = 1
    ) -> DraftTensor:
        weight = b.parameter(f"{name}.weight", (channels, x.shape[1], kernel, kernel))
        pad = kernel // 2
        y = b.conv2d(x, weight, stride=(stride, stride), padding=(pad, pad), name=name)
        stored = [b.parameter(f"{name}.norm.{k}", (channels,), trainable=k < 2) for k in range(4)]
        return b.batch_norm(y, *stored, name=f"{name}.norm")

    images = b.input("images", (batch, 3, 224, 224))
    labels = b.input("labels", (batch,), "int64")
    x = b.pointwise("relu", convolved("conv1", images, 64, 7, 2))
    x = b.pool2d(x, mode="max", kernel=(3, 3), stride=(2, 2), padding=(1, 1), name="pool")
    for group, count in enumerate(counts):
        width = 64 * 2**group
        for i in range(count):
            name, stride = f"group{group}.{i}", 2 if group and not i else 1
            y = b.pointwise("relu", convolved(f"{name}.a", x, width * widening, 1))
            y = b.pointwise("relu", convolved(f"{name}.b", y, width * widening, 3, stride))
            y = convolved(f"{name}.c", y, 4 * width, 1)
            if y.shape != x.shape:
                x = convolved(f"{name}.short", x, 4 * width, 1, stride)
            x = b.pointwise("relu", b.pointwise("add", y, x))
    weight = b.parameter("fc.weight", (1000, x.shape[1]))
    scores = b.linear(b.mean(x, [2, 3], name="mean"), weight, name="fc")
    return b.build(b.cross_entropy(scores, labels))


@functools.cache
def priced(model: str, size: int) -> tuple[OperatorGraph, StageBlocks, Ints, Ints]:
    """Blocks of a model on 16 GPUs, data-parallel choices, and the number of choices."""
    graph = (
        gpt(num_layers=size, hidden=1024, num_heads=16, batch=32)
        if model == "gpt"
        else wide_resnet((3, 4, size, 3), batch=64)
    )
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=8)
    mesh = stage_meshes(range(16), cluster)[0]
    builder = TableBuilder(graph, mesh, cluster, Training(), default_costs())
    choices = [operator_choices(graph, op, mesh.shape, (0, 2, 3)) for op in graph.operators]
    blocks = stage_blocks(builder.build(range(len(choices)), dict(enumerate(choices))))
    wanted = data_parallel(graph, mesh.shape)
    base = [
        options.index(wanted[op.name]) if wanted[op.name] in options else 0
        for op, options in zip(graph.operators, choices, strict=True)
    ]
    return graph, blocks, np.array(base), np.array([len(options) for options in choices])


def change_of(
    blocks: StageBlocks,
    block: Block,
    graph: TaskGraph,
    choices: Ints,
    operators: Sequence[int],
    *,
    last: bool = True,
) -> Change:
    """Tasks of a block, played as `graph`, that differ as operators turn to some choices."""
    touched = np.isin(block.first, operators) & (block.stride > 0)
    touched |= np.isin(block.second, operators) & (block.second_stride > 0)
    tasks = np.flatnonzero(touched)
    base = block.bases(last)[tasks]
    where = base + choices[block.first[tasks]] * block.stride[tasks]
    where += choices[block.second[tasks]] * block.second_stride[tasks]
    where[base == 0] = 0
    durations, sets = blocks.pool_ns[where], blocks.pool_mask[where]
    differs = (durations != graph.durations[tasks]) | (sets != graph.resource_sets[tasks])
    return tasks[differs], durations[differs], sets[differs]


def block_case(
    model: str,
    size: int,
    direction: str,
    *,
    cells: int = 1,
    copies: int = 1,
    drawn: bool = False,
    together: bool = False,
    slowdown: int = 0,
) -> tuple[TaskGraph, Proposals]:
    """A block in which operators change their choice.

    It may be laid on several cells, or several times in a row. Base choices may be drawn at
    random. Operators may change together with their likes in all layers. Computing and links may
    slow each other down, by so many per mille.
    """
    model_graph, blocks, base, counts = priced(model, size)
    names = [re.sub(r"\d+", "", operator.name) for operator in model_graph.operators]
    block: Block = getattr(blocks, direction)
    rng = np.random.default_rng(0)
    if drawn:
        base = rng.integers(0, counts)
    graph = blocks.task_graph(block, base, last=True)
    # Resource 0 computes, 1 and 2 are links.
    graph = dataclasses.replace(graph, rivals=((0, 1), (0, 2)), slowdown=slowdown)
    changes: list[Change] = []
    while len(changes) < NUM_PROPOSALS:
        operator = int(rng.integers(counts.size))
        choices = base.copy()
        likes = [operator]
        if together:
            likes = [i for i, name in enumerate(names) if name == names[operator]]
        choices[likes] = rng.integers(counts[likes].min())
        change = change_of(blocks, block, graph, choices, likes)
        if change[0].size:
            changes.append(change)
    if cells > 1:
        shared = np.array([kind in SHARED for kind in block.kinds])
        return on_cells(graph, changes, shared, cells)
    if copies > 1:
        return in_a_row(graph, changes, copies)
    return graph, join(changes)


def edges_of(graph: TaskGraph) -> Ints:
    """Pairs of task ids, [E, 2]."""
    before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_offsets))
    return np.stack([before, graph.successors], axis=1)


def on_cells(
    graph: TaskGraph, changes: Sequence[Change], shared: Ints, cells: int
) -> tuple[TaskGraph, Proposals]:
    """A task a cell for what devices do alone; communication holds links of all cells at once."""
    copies = np.where(shared, 1, cells)
    first = np.cumsum([0, *copies])[:-1]
    bits = [[b for b in range(NUM_RESOURCES) if m >> b & 1] for m in range(8)]
    members = [[c * NUM_RESOURCES + b for c in range(cells) for b in bits[m]] for m in range(8)]
    members += [[c * NUM_RESOURCES + b for b in bits[m]] for c in range(cells) for m in range(8)]

    def spread(tasks: Ints, durations: Ints, sets: Ints) -> Change:
        rows = [
            (first[t] + c, d, s if shared[t] or not s else 8 + 8 * c + s)
            for t, d, s in zip(tasks.tolist(), durations.tolist(), sets.tolist(), strict=True)
            for c in range(copies[t])
        ]
        table = np.array(rows, np.int64)
        return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()

    _, durations, sets = spread(np.arange(graph.num_tasks), graph.durations, graph.resource_sets)
    edges = [
        (first[a] + (c if copies[a] > 1 else 0), first[b] + (c if copies[b] > 1 else 0))
        for a, b in edges_of(graph).tolist()
        for c in range(max(copies[a], copies[b]))
    ]
    laid = build_task_graph(
        durations, edges, resource_sets=[()] * durations.size, num_resources=NUM_RESOURCES * cells
    )
    laid = dataclasses.replace(
        laid,
        resource_sets=sets,
        set_offsets=np.cumsum([0, *(len(m) for m in members)]).astype(np.int64),
        set_resources=np.concatenate([np.array(m, np.int64) for m in members]),
    )
    return laid, join([spread(*change) for change in changes])


def in_a_row(
    graph: TaskGraph, changes: Sequence[Change], copies: int
) -> tuple[TaskGraph, Proposals]:
    """Copies of a graph, one after the other; changes fall into any of them."""
    size = graph.num_tasks
    edges = edges_of(graph)
    last = np.setdiff1d(np.arange(size), edges[:, 0])
    roots = np.flatnonzero(graph.num_predecessors == 0)
    # A task of no duration between two copies: all that ends a copy ─▶ [between] ─▶ all roots.
    parts = [edges + k * size for k in range(copies)]
    for k in range(copies - 1):
        middle = size * copies + k
        parts.append(np.stack([last + k * size, np.full(last.size, middle)], axis=1))
        parts.append(np.stack([np.full(roots.size, middle), roots + (k + 1) * size], axis=1))
    idle = np.zeros(copies - 1, np.int64)
    laid = build_task_graph(
        np.concatenate([np.tile(graph.durations, copies), idle]),
        np.concatenate(parts),
        resource_sets=[()] * (size * copies + copies - 1),
        num_resources=graph.num_resources,
    )
    laid = dataclasses.replace(
        laid,
        resource_sets=np.concatenate([np.tile(graph.resource_sets, copies), idle]),
        set_offsets=graph.set_offsets,
        set_resources=graph.set_resources,
    )
    rng = np.random.default_rng(1)
    where = rng.integers(copies, size=len(changes)) * size
    return laid, join([(t + w, d, s) for w, (t, d, s) in zip(where, changes, strict=True)])


# --- Synthetic graphs: a few durations change by up to a half ------------------------------------


class Sketch:
    """A graph while it is being drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.durations: list[int] = []
        self.sets: list[tuple[int, ...]] = []
        self.edges: list[tuple[int, int]] = []

    def task(self, resources: tuple[int, ...], *before: int) -> int:
        """Add a task of 10 to 400 µs behind some others."""
        self.durations.append(int(self.rng.integers(10_000, 400_000)))
        self.sets.append(resources)
        self.edges += [(b, len(self.sets) - 1) for b in before]
        return len(self.sets) - 1

    def finish(self, num_resources: int, changed: int = 1) -> tuple[TaskGraph, Proposals]:
        """The graph, and random changes of one task each, or of more."""
        graph = build_task_graph(
            self.durations, self.edges, resource_sets=self.sets, num_resources=num_resources
        )
        changes: list[Change] = []
        for _ in range(NUM_PROPOSALS):
            tasks = self.rng.choice(graph.num_tasks, changed, replace=False)
            factors = self.rng.uniform(0.5, 1.5, changed)
            durations = (graph.durations[tasks] * factors).astype(np.int64)
            changes.append((tasks, durations, graph.resource_sets[tasks]))
        return graph, join(changes)


def branching_case(modules: int, cells: int) -> tuple[TaskGraph, Proposals]:
    """Inception-like: four branches of one to four tasks each, joined; a transfer after each join.

    Branches are spread over the cells; each cell has a compute stream and a link.
    """
    sketch = Sketch(2)
    joined = sketch.task((0,))
    for _ in range(modules):
        ends = []
        for branch, length in enumerate((1, 2, 3, 4)):
            cell = branch % cells
            last = joined
            if cell:
                last = sketch.task((cells + cell,), last)
            for _ in range(length):
                last = sketch.task((cell,), last)
            ends.append(last)
        joined = sketch.task((0,), sketch.task((cells,), *ends))
    return sketch.finish(2 * cells)


def grid_case(layers: int, steps: int, cells: int) -> tuple[TaskGraph, Proposals]:
    """LSTMs on top of each other, as in machine translation.

    Cell (layer, step) waits for (layer - 1, step) and (layer, step - 1).
    """
    sketch = Sketch(3)
    made: dict[tuple[int, int], int] = {}
    for step in range(steps):
        for layer in range(layers):
            before = [made[k] for k in ((layer - 1, step), (layer, step - 1)) if k in made]
            made[layer, step] = sketch.task((layer * cells // layers,), *before)
    return sketch.finish(cells)


def chains_case(num_tasks: int, num_chains: int) -> tuple[TaskGraph, Proposals]:
    """Chains side by side, each on its own resource: a change shifts one of them, for good."""
    sketch = Sketch(5)
    for task in range(num_tasks):
        before = [task - num_chains] if task >= num_chains else []
        sketch.task((task % num_chains,), *before)
    return sketch.finish(num_chains)


def random_case(
    num_tasks: int, num_resources: int, reach: int, changed: int = 1
) -> tuple[TaskGraph, Proposals]:
    """Every task waits for two of the `reach` before it and holds one resource, or two."""
    sketch = Sketch(4)
    for task in range(num_tasks):
        low = max(0, task - reach)
        before = sketch.rng.integers(low, task, 2).tolist() if task else []
        first = int(sketch.rng.integers(num_resources))
        gang = (first, (first + 1) % num_resources) if sketch.rng.random() < 0.1 else (first,)
        sketch.task(gang, *before)
    return sketch.finish(num_resources, changed)


def _block(*args: object, **options: object) -> Callable[[], tuple[TaskGraph, Proposals]]:
    return functools.partial(block_case, *args, **options)  # type: ignore[arg-type]


CASES = [
    Case("GPT 24 layers, forward, 1 cell", _block("gpt", 24, "forward")),
    Case("GPT 24 layers, backward, 1 cell", _block("gpt", 24, "backward")),
    Case("GPT 96 layers, forward, 1 cell", _block("gpt", 96, "forward")),
    Case("GPT 96 layers, backward, 1 cell", _block("gpt", 96, "backward")),
    Case("GPT 96 layers, forward, random choices", _block("gpt", 96, "forward", drawn=True)),
    Case("GPT 96 layers, backward, random choices", _block("gpt", 96, "backward", drawn=True)),
    Case("GPT 24 layers, forward, 8 cells", _block("gpt", 24, "forward", cells=8)),
    Case("GPT 24 layers, backward, 8 cells", _block("gpt", 24, "backward", cells=8)),
    Case("GPT 96 layers, forward, 8 cells", _block("gpt", 96, "forward", cells=8)),
    Case("GPT 96 layers, backward, 8 cells", _block("gpt", 96, "backward", cells=8)),
    Case("GPT 192 layers, forward, 8 cells", _block("gpt", 192, "forward", cells=8)),
    Case("GPT 96 layers, backward, contention", _block("gpt", 96, "backward", slowdown=130)),
    Case(
        "GPT 96 layers, forward, all layers at once", _block("gpt", 96, "forward", together=True)
    ),
    Case(
        "GPT 96 layers, backward, all layers at once", _block("gpt", 96, "backward", together=True)
    ),
    Case("Wide-ResNet-101, forward", _block("wide_resnet", 23, "forward")),
    Case("Wide-ResNet-101, backward", _block("wide_resnet", 23, "backward")),
    Case("Inception-like, 11 modules, 4 cells", functools.partial(branching_case, 11, 4)),
    Case("Inception-like, 300 modules, 1 cell", functools.partial(branching_case, 300, 1)),
    Case("Inception-like, 300 modules, 4 cells", functools.partial(branching_case, 300, 4)),
    Case("NMT-like LSTM 8 × 400, 1 cell", functools.partial(grid_case, 8, 400, 1)),
    Case("NMT-like LSTM 8 × 400, 4 cells", functools.partial(grid_case, 8, 400, 4)),
    Case("NMT-like LSTM 8 × 400, 8 cells", functools.partial(grid_case, 8, 400, 8)),
    Case("random DAG 3k, 16 resources", functools.partial(random_case, 3000, 16, 64)),
    Case("random DAG 3k, 2 resources", functools.partial(random_case, 3000, 2, 64)),
    Case("random DAG 20k, 16 resources", functools.partial(random_case, 20000, 16, 64)),
    Case("2 chains, 3k", functools.partial(chains_case, 3000, 2)),
    Case("2 chains, 200", functools.partial(chains_case, 200, 2)),
    Case("64 chains, 20k", functools.partial(chains_case, 20000, 64)),
    Case("random DAG 3k, 30 changes", functools.partial(random_case, 3000, 2, 64, 30)),
    Case("random DAG 3k, 300 changes", functools.partial(random_case, 3000, 2, 64, 300)),
    Case("random DAG 3k, 600 changes", functools.partial(random_case, 3000, 2, 64, 600)),
    Case("GPT forward × 69, 200k tasks, 1 cell", _block("gpt", 96, "forward", copies=69)),
    Case("GPT backward × 35, 200k tasks, 1 cell", _block("gpt", 96, "backward", copies=35)),
]
