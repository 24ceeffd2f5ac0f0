"""Splits whose devices may hold any nodes: the objective of `max_load` without contiguity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stratagem.search.planners._kernels import anneal_assignment
from stratagem.search.planners.blocks import Blocks, colour_blocks
from stratagem.search.planners.dnn_partitioning import PartitionInput, read_partition_input
from stratagem.search.planners.max_load import DEVICES, average_load, solve_max_load, with_loads
from stratagem.search.planners.result import PlannedStage, PlannerResult

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int32]

SCATTERED = "max-load, any nodes on a device"
HOT, COLD = 0.03, 1e-5
"""Temperatures of a round of annealing, relative to the load."""


def solve_scattered(
    source: PartitionInput | str | Path,
    *,
    corrected: bool = False,
    num_moves: int = 3_000_000,
    rounds: int = 8,
    seed: int = 0,
) -> PlannerResult:
    """A split of small maximal load where a device may hold any nodes, by annealing.

    It begins with the best contiguous split, so it is never worse, and goes on from the best one
    so far. The bound is the best one of even loads and of the largest node.

    Example:
        >>> print(solve_scattered("bert24_inference.json"))  # doctest: +SKIP

    Args:
        source: the input or its file.
        corrected: as of `read_partition_input`, for a file.
        num_moves: moves of a round.
        rounds: rounds of annealing.
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
    model = _Assignment(graph, colour_blocks(graph))
    place = model.from_stages(contiguous.stages)
    value, best = contiguous.value, contiguous.stages
    for number in range(rounds if num_moves else 0):
        load = model.anneal(place, num_moves, seed + number)
        if load < value:
            best = with_loads(graph, model.stages(place))
            value = max(stage.load for stage in best)
    bound = max(average_load(model.blocks, model.counts), model.largest_block())
    return PlannerResult(
        input=graph.name,
        objective=SCATTERED,
        value=value,
        unit="ms",
        bound=min(bound, value),
        exact=value <= bound * (1 + 1e-12),
        stages=best,
        notes=(f"{rounds} rounds of {num_moves:,} moves from the best contiguous split.",),
    )


@dataclass(frozen=True)
class _Assignment:
    """Blocks and devices as arrays: accelerators first, then CPU cores."""

    graph: PartitionInput
    blocks: Blocks

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
        net_starts, nets, block_starts, block_nets, costs = self.nets
        return float(
            anneal_assignment(
                self.work,
                self.blocks.size,
                self.allowed,
                memory,
                kinds,
                net_starts,
                nets,
                block_starts,
                block_nets,
                costs,
                num_moves,
                HOT,
                COLD,
                seed,
                place,
            )
        )

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


def _compressed(rows: Sequence[Sequence[int]]) -> tuple[Indices, Indices]:
    """Offsets and entries of rows, one behind the other."""
    starts = np.cumsum([0, *map(len, rows)])
    entries = [entry for row in rows for entry in row]
    return starts.astype(np.int32), np.array(entries, dtype=np.int32)
