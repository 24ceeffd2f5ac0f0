"""Splits whose devices may hold any nodes: the objective of `max_load` without contiguity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import scipy

from stratagem.searcher.planners.inputs.blocks import NodeBlocks, colour_blocks
from stratagem.searcher.planners.inputs.dnn_partitioning import (
    PartitionInput,
    read_partition_input,
)
from stratagem.searcher.planners.inputs.result import PlannedStage, PlannerResult
from stratagem.searcher.planners.solvers._kernels import PlacedBlocks, anneal_assignment
from stratagem.searcher.planners.solvers.max_load import (
    DEVICES,
    average_load,
    max_load,
    solve_max_load,
    with_loads,
)
from stratagem.simulator.base.arrays import Floats, Indices

SCATTERED = "max-load, any nodes on a device"
HOT, COLD = 0.01, 1e-5
"""Temperatures of a round of annealing, relative to the load."""
SMALL_NET = 6
"""Blocks of a net of which all pairs are told to the integer program."""
PROVED = 1e-6
"""Relative gap at which a split counts as the best one: the tolerance of the integer program."""


def solve_scattered(
    source: PartitionInput | str | Path,
    *,
    corrected: bool = False,
    num_moves: int = 1_000_000,
    rounds: int = 6,
    proof_seconds: float = 6.0,
    seed: int = 0,
) -> PlannerResult:
    """A split of small maximal load where a device may hold any nodes, and how good it is.

    Annealing begins with the best contiguous split, so the result is never worse, and goes on from
    the best one so far. The integer program of the problem then bounds it, and proves many.

    Example:
        >>> print(solve_scattered("bert24_inference.json"))  # doctest: +SKIP

    Args:
        source: the input or its file.
        corrected: as of `read_partition_input`, for a file.
        num_moves: moves of a round.
        rounds: rounds of annealing.
        proof_seconds: limit of the integer program; 0 leaves it out, and the bound is that of
            even loads and of the largest node. With a limit that strikes, the bound depends on
            how fast the machine is.
        seed: of the first round.

    Raises:
        ValueError: the file is broken, or no split fits into the memory.
    """
    graph = (
        source
        if isinstance(source, PartitionInput)
        else read_partition_input(source, corrected=corrected)
    )
    contiguous = solve_max_load(graph)
    model = Assignment(graph, colour_blocks(graph))
    place = model.from_stages(contiguous.stages)
    value, best = contiguous.value, contiguous.stages
    for number in range(rounds if num_moves else 0):
        load = model.anneal(place, num_moves, seed + number)
        if load < value:
            best = with_loads(graph, model.stages(place))
            value = max(stage.load for stage in best)
    bound = max(average_load(model.blocks, model.counts), model.largest_block())
    if proof_seconds > 0 and value > bound:
        proved, found = prove(model, value, proof_seconds)
        bound = max(bound, proved)
        if found is not None and (load := max_load(graph, model.stages(found))) < value:
            value, best = load, with_loads(graph, model.stages(found))
    return PlannerResult(
        input=graph.name,
        objective=SCATTERED,
        value=value,
        unit="ms",
        bound=min(bound, value),
        exact=value <= bound * (1 + PROVED),
        stages=best,
        notes=(f"{rounds} rounds of {num_moves:,} moves from the best contiguous split.",),
    )


@dataclass(frozen=True)
class Assignment:
    """Blocks and devices as arrays: accelerators first, then CPU cores."""

    graph: PartitionInput
    blocks: NodeBlocks

    @property
    def counts(self) -> tuple[int, int]:
        """Accelerators and CPU cores."""
        return self.graph.num_accelerators, self.graph.num_cpus

    @cached_property
    def work(self) -> Floats:
        """Latency in ms by block and device."""
        columns = [self.blocks.accelerator_ms] * self.counts[0]
        return np.stack(columns + [self.blocks.cpu_ms] * self.counts[1], axis=1)

    @cached_property
    def nets(self) -> tuple[Indices, Indices, Indices, Indices, Floats]:
        """Blocks by net, nets by block (offsets and entries each), and costs."""
        by_net = [sorted(net) for net, _ in self.blocks.nets]
        by_block: list[list[int]] = [[] for _ in range(len(self.blocks))]
        for number, net in enumerate(by_net):
            for block in net:
                by_block[block].append(number)
        costs = np.array([cost for _, cost in self.blocks.nets], dtype=np.float64)
        return *_compressed(by_net), *_compressed(by_block), costs

    def largest_block(self) -> float:
        """A load in ms that some device reaches: the fastest place of the slowest block."""
        work = np.where(self.allowed > 0, self.work, math.inf)
        return float(work.min(axis=1).max())

    @cached_property
    def allowed(self) -> Floats:
        """1 where a device can run a block."""
        allowed = np.ones_like(self.work)
        allowed[:, : self.counts[0]] -= self.blocks.unsupported[:, None]
        return allowed

    def from_stages(self, stages: Sequence[PlannedStage]) -> Indices:
        """Device of each block under a split."""
        next_free = {"accelerator": 0, "cpu": self.counts[0]}
        device_of: dict[int | str, int] = {}
        for stage in stages:
            device_of |= dict.fromkeys(stage.nodes, next_free[stage.device])
            next_free[stage.device] += 1
        return np.array([device_of[nodes[0]] for nodes in self.blocks.nodes], dtype=np.int32)

    def anneal(self, place: Indices, num_moves: int, seed: int) -> float:
        """Anneal an assignment in place; its greatest load in ms."""
        kinds = np.repeat([1.0, 0.0], self.counts)
        memory = np.where(kinds > 0, self.graph.memory_bytes, math.inf)
        blocks = PlacedBlocks(self.work, self.blocks.size, self.allowed, memory, kinds, *self.nets)
        rng = np.random.default_rng(seed)
        return float(anneal_assignment(blocks, num_moves, HOT, COLD, rng, place))

    def stages(self, place: Indices) -> tuple[PlannedStage, ...]:
        """The split that an assignment means; devices without nodes are left out."""
        stages = []
        for device in range(self.work.shape[1]):
            nodes = tuple(
                node
                for block, where in enumerate(place)
                if where == device
                for node in self.blocks.nodes[block]
            )
            if nodes:
                stages.append(PlannedStage(nodes, device=DEVICES[device >= self.counts[0]]))
        return tuple(stages)


def prove(model: Assignment, value: float, seconds: float) -> tuple[float, Indices | None]:
    """A bound in ms on every split, and a better split if the solver meets one.

    Variables say which device runs a block and which accelerators pay for a net. An accelerator
    pays if it runs one block of the net and not another one; it is enough to say so of pairs with
    one block of the net, and stronger to say it of all pairs. Accelerators are alike, so the k-th
    largest block is on one of the first k.
    """
    num_blocks, num_devices = model.work.shape
    num_accelerators, nets = model.counts[0], model.blocks.nets
    num_places, num_paid = num_blocks * num_devices, len(nets) * num_accelerators
    top = num_places + num_paid
    rows = _ProgramRows()
    for block in range(num_blocks):
        first = block * num_devices
        rows.add([(first + d, 1.0) for d in range(num_devices)], 1.0, 1.0)
    for number, (net, _) in enumerate(nets):
        for i, j in _pairs(sorted(net)):
            for d in range(num_accelerators):
                paid = num_places + number * num_accelerators + d
                terms = [(paid, 1.0), (i * num_devices + d, -1.0), (j * num_devices + d, 1.0)]
                rows.add(terms, 0.0, math.inf)
    for d in range(num_devices):
        terms = [(b * num_devices + d, float(model.work[b, d])) for b in range(num_blocks)]
        if d < num_accelerators:
            terms += [
                (num_places + number * num_accelerators + d, cost)
                for number, (_, cost) in enumerate(nets)
            ]
            sizes = [(b * num_devices + d, float(model.blocks.size[b])) for b in range(num_blocks)]
            rows.add(sizes, -math.inf, model.graph.memory_bytes)
        rows.add([*terms, (top, -1.0)], -math.inf, 0.0)
    upper = np.ones(top + 1)
    upper[:num_places] = model.allowed.ravel()
    upper[top] = value
    largest = np.argsort(-model.blocks.accelerator_ms, kind="stable")[:num_accelerators]
    for rank, block in enumerate(largest):
        upper[block * num_devices + rank + 1 : block * num_devices + num_accelerators] = 0.0
    objective = np.zeros(top + 1)
    objective[top] = 1.0
    whole = np.zeros(top + 1)
    whole[:num_places] = 1.0
    outcome = scipy.optimize.milp(
        objective,
        constraints=rows.constraint(top + 1),
        bounds=scipy.optimize.Bounds(np.zeros(top + 1), upper),
        integrality=whole,
        options={"time_limit": seconds, "mip_rel_gap": PROVED / 10},
    )
    bound = outcome.mip_dual_bound
    place = None
    if outcome.x is not None:
        chosen = outcome.x[:num_places].reshape(num_blocks, num_devices)
        place = chosen.argmax(axis=1).astype(np.int32)
    return (float(bound) if bound is not None and math.isfinite(bound) else 0.0), place


@dataclass
class _ProgramRows:
    """Rows of a sparse matrix with their limits, as they come."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    entry: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """One row: ``lower <= sum of terms <= upper``."""
        for column, entry in terms:
            self.row.append(len(self.lower))
            self.column.append(column)
            self.entry.append(entry)
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, num_columns: int) -> scipy.optimize.LinearConstraint:
        """All rows."""
        shape = (len(self.lower), num_columns)
        matrix = scipy.sparse.coo_array((self.entry, (self.row, self.column)), shape=shape).tocsr()
        return scipy.optimize.LinearConstraint(matrix, self.lower, self.upper)


def _pairs(net: Sequence[int]) -> list[tuple[int, int]]:
    """Ordered pairs of blocks of a net: all of a small one, else those with its first block."""
    return [
        (i, j) for i in net for j in net if i != j and (len(net) <= SMALL_NET or net[0] in (i, j))
    ]


def _compressed(rows: Sequence[Sequence[int]]) -> tuple[Indices, Indices]:
    """Offsets and entries of rows, one behind the other."""
    starts = np.cumsum([0, *map(len, rows)])
    entries = [entry for row in rows for entry in row]
    return starts.astype(np.int32), np.array(entries, dtype=np.int32)
