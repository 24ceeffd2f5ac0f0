"""Splits of least maximal load: the objective of *Device Placement of DNN Graph Operators*.

An accelerator's load is the latency of its nodes, plus the cost of every outside node that feeds
it and of every inside node that feeds another device, once a node. A CPU core's load is latency
only. The time per sample of a pipeline is the greatest load (Jeong et al., NeurIPS 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stratagem.searcher.planners.inputs.blocks import NodeBlocks, pipeline_blocks
from stratagem.searcher.planners.inputs.dnn_partitioning import (
    PartitionInput,
    read_partition_input,
)
from stratagem.searcher.planners.inputs.down_sets import (
    DownSetCut,
    DownSets,
    Pairs,
    StageProblem,
    TooManyDownSetsError,
    cut_into_stages,
    down_sets,
    linear_down_sets,
    linearisations,
)
from stratagem.searcher.planners.inputs.result import PlannedStage, PlannerResult
from stratagem.searcher.planners.solvers._kernels import SplitNets, split_nets, stage_loads
from stratagem.simulator.base.arrays import Flags, Floats

CONTIGUOUS = "max-load, contiguous"
DEVICES = ("accelerator", "cpu")


def device_loads(graph: PartitionInput, stages: Sequence[PlannedStage]) -> list[float]:
    """Load in ms of each device of a split, whatever its nodes.

    Raises:
        ValueError: a node is missing, a colour is on two devices, or there are too many devices.
    """
    place = {node: number for number, stage in enumerate(stages) for node in stage.nodes}
    _check_split(graph, stages, place)
    on_cpu = [stage.device == "cpu" for stage in stages]
    load = [0.0] * len(stages)
    for node in graph.nodes:
        where = place[node.id]
        load[where] += node.cpu_latency if on_cpu[where] else node.fpga_latency
    readers: dict[int, set[int]] = {}
    for edge in graph.edges:
        if place[edge.source_id] != place[edge.dest_id]:
            readers.setdefault(edge.source_id, {place[edge.source_id]}).add(place[edge.dest_id])
    costs = graph.output_costs()
    for source, devices in readers.items():
        for device in devices:
            load[device] += 0.0 if on_cpu[device] else costs[source]
    return load


def max_load(graph: PartitionInput, stages: Sequence[PlannedStage]) -> float:
    """The greatest load in ms of a split: its time per sample.

    Raises:
        ValueError: as `device_loads`.
    """
    return max(device_loads(graph, stages))


def with_loads(graph: PartitionInput, stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """The same split with the load of each device written to it."""
    loads = device_loads(graph, stages)
    return tuple(replace(s, load=load) for s, load in zip(stages, loads, strict=True))


def solve_max_load(
    source: PartitionInput | str | Path, *, corrected: bool = False, limit: int = 200_000
) -> PlannerResult:
    """The contiguous split of least maximal load, by dynamic programming over down-sets.

    Splits along a few linear orders give an upper bound first. A down-set at which no better split
    can be cut, because the work on either side is too much for the devices left, is dropped. In
    training, backward nodes follow the forward nodes of their colour.

    Example:
        >>> print(solve_max_load("bert24_inference.json"))  # doctest: +SKIP

    Args:
        source: the input or its file.
        corrected: as of `read_partition_input`, for a file.
        limit: down-sets at most; beyond it only splits along linear orders are searched.

    Raises:
        ValueError: the file is broken, or no split fits into the memory.
    """
    graph = (
        source
        if isinstance(source, PartitionInput)
        else read_partition_input(source, corrected=corrected)
    )
    blocks = pipeline_blocks(graph)
    model = LoadModel(blocks, graph.memory_bytes, (graph.num_accelerators, graph.num_cpus))
    stages, value, notes, complete = _best_split(model, limit)
    stages = with_loads(graph, stages)
    least = average_load(blocks, model.counts)
    exact = complete and (_merging_is_free(graph, blocks, limit, value) or value <= least)
    load = max(stage.load for stage in stages)
    return PlannerResult(
        input=graph.name,
        objective=CONTIGUOUS,
        value=load,
        unit="ms",
        bound=load if exact else min(least, load),
        exact=exact,
        stages=stages,
        notes=notes,
        recurrence=value,
    )


def average_load(blocks: NodeBlocks, counts: tuple[int, int]) -> float:
    """A load in ms that every split reaches: all work, spread evenly, and nothing sent."""
    work, ratio = blocks.accelerator_ms.sum(), _speed_of_cpu(blocks)
    if not math.isfinite(ratio):
        return 0.0
    return float(work / (counts[0] + counts[1] * ratio))


def _check_split(
    graph: PartitionInput, stages: Sequence[PlannedStage], place: dict[int | str, int]
) -> None:
    for kind, count in zip(DEVICES, (graph.num_accelerators, graph.num_cpus), strict=True):
        used = sum(stage.device == kind for stage in stages)
        if used > count:
            raise ValueError(
                f"{graph.name}: the split uses {used} devices of kind {kind}, there are {count}"
            )
    colours: dict[int, int] = {}
    for node in graph.nodes:
        if node.id not in place:
            raise ValueError(f"{graph.name}: node {node.id} is on no device of the split")
        if node.color_class is None:
            continue
        if colours.setdefault(node.color_class, place[node.id]) != place[node.id]:
            raise ValueError(
                f"{graph.name}: nodes of colour {node.color_class} are on devices "
                f"{colours[node.color_class]} and {place[node.id]}; put them on one"
            )


def _speed_of_cpu(blocks: NodeBlocks) -> float:
    """How much of an accelerator's work a CPU core does in the same time, at most."""
    working = blocks.accelerator_ms > 0
    if not working.any():
        return 0.0
    with np.errstate(divide="ignore"):
        return float((blocks.accelerator_ms[working] / blocks.cpu_ms[working]).max())


@dataclass(frozen=True)
class LoadModel:
    """Blocks, and the devices that they go to."""

    blocks: NodeBlocks
    memory: float
    counts: tuple[int, int]

    def split(
        self, sets: DownSets, bound: float = math.inf
    ) -> tuple[float, tuple[PlannedStage, ...]]:
        """Load and stages of the best split along some sets; infinite if none is below `bound`."""
        if not bound > 0:
            return math.inf, ()
        along = _AlongSets(self, sets, np.empty((0, 2)))
        ratio = _speed_of_cpu(self.blocks) if self.counts[1] else 0.0
        table = cut_into_stages(
            StageProblem(
                sets,
                along.costs,
                needs=((1, 0), (0, 1)),
                counts=self.counts,
                weight=along.totals[:, 0],
                limit=bound * max(1.0, ratio),
                alive=along.alive(bound, ratio),
            ),
            bound=bound,
        )
        if not math.isfinite(table.value):
            return math.inf, ()
        return table.value, tuple(self._stage(sets, cut) for cut in table.cuts())

    def _stage(self, sets: DownSets, cut: DownSetCut) -> PlannedStage:
        blocks = sets.between(cut.inner, cut.outer)
        nodes = tuple(node for block in blocks for node in self.blocks.nodes[block])
        return PlannedStage(nodes, device=DEVICES[cut.option])


@dataclass(frozen=True)
class _AlongSets:
    """Loads of the stages between down-sets."""

    model: LoadModel
    sets: DownSets
    buffer: Floats

    @cached_property
    def totals(self) -> Floats:
        """Accelerator ms, CPU ms, bytes and unsupported blocks of each set, by column."""
        b = self.model.blocks
        columns = (b.accelerator_ms, b.cpu_ms, b.size, b.unsupported)
        return np.stack([self.sets.sums(column) for column in columns], axis=1)

    @cached_property
    def nets(self) -> tuple[npt.NDArray[np.uint64], Floats]:
        """Blocks of each net as bits, and its cost."""
        masks = np.zeros((len(self.model.blocks.nets), self.sets.words.shape[1]), dtype=np.uint64)
        for row, (blocks, _) in enumerate(self.model.blocks.nets):
            for block in blocks:
                masks[row, block >> 6] |= np.uint64(1 << (block & 63))
        return masks, np.array([cost for _, cost in self.model.blocks.nets], dtype=np.float64)

    @cached_property
    def splits(self) -> tuple[npt.NDArray[np.uint64], Floats]:
        """Nets that each set splits, and their cost."""
        return split_nets(self.sets.words, *self.nets)

    def costs(self, pairs: Pairs) -> Floats:
        """Load of each stage on an accelerator and on a CPU core."""
        if len(self.buffer) < len(pairs.outer):
            object.__setattr__(self, "buffer", np.empty((len(pairs.outer), 2)))
        cost = self.buffer[: len(pairs.outer)]
        stage_loads(
            pairs.first,
            pairs.offsets,
            pairs.outer,
            SplitNets(self.sets.words, *self.splits, *self.nets),
            self.totals,
            self.model.memory,
            cost,
        )
        return cost

    def alive(self, bound: float, ratio: float) -> Flags:
        """By set and devices taken, whether a split with all loads below `bound` can pass there.

        Without a CPU core on one side of the cut, the accelerators there have its work and pay at
        least once for each net that the cut splits; with one, they have the work that it leaves.
        """
        accelerators, cpus = self.model.counts
        alive = np.ones((len(self.sets), cpus + 1, accelerators + 1), dtype=np.bool_)
        if math.isfinite(bound):
            work, crossing = self.totals[:, 0], self.splits[1]
            taken = np.arange(accelerators + 1)
            for on_cpu in range(cpus + 1):
                before = _devices_needed(work, crossing, bound, on_cpu, ratio)
                behind = _devices_needed(work[-1] - work, crossing, bound, cpus - on_cpu, ratio)
                alive[:, on_cpu] = (before[:, None] <= taken) & (
                    behind[:, None] <= accelerators - taken
                )
        return alive.reshape(len(self.sets), -1)


def _devices_needed(
    work: Floats, crossing: Floats, bound: float, num_cpus: int, ratio: float
) -> Floats:
    """Accelerators that one side of a cut takes at least."""
    slack = bound * (1 + 1e-12)
    if not num_cpus:
        return np.ceil((work + crossing) / slack - 1e-9)
    if not math.isfinite(ratio):
        return np.zeros_like(work)
    return np.ceil(np.maximum(work / slack - num_cpus * ratio, 0.0) - 1e-9)


def _best_split(
    model: LoadModel, limit: int
) -> tuple[tuple[PlannedStage, ...], float, tuple[str, ...], bool]:
    """Stages, value, notes, and whether all down-sets were searched."""
    value, stages = math.inf, tuple[PlannedStage, ...]()
    predecessors = model.blocks.predecessors
    for order in linearisations(predecessors):
        found, along = model.split(linear_down_sets(predecessors, order), value)
        if found < value:
            value, stages = found, along
    try:
        sets = down_sets(predecessors, limit=limit)
    except TooManyDownSetsError as error:
        notes, complete = (f"Cut along linear orders only: {error}.",), False
    else:
        found, along = model.split(sets, value)
        if found < value:
            value, stages = found, along
        notes, complete = (f"{len(sets):,} down-sets of {len(model.blocks)} blocks.",), True
    if not stages:
        raise ValueError(
            f"no contiguous split fits: {model.blocks.size.sum() / 1e9:.3g} GB in all, the "
            f"largest block {model.blocks.size.max() / 1e9:.3g} GB, on {model.counts[0]} "
            f"accelerators of {model.memory / 1e9:.3g} GB and {model.counts[1]} CPU cores; "
            f"give more or larger accelerators"
        )
    return stages, value, notes, complete


def _merging_is_free(graph: PartitionInput, blocks: NodeBlocks, limit: int, value: float) -> bool:
    """Whether merging idle blocks cannot have cost anything: the memory binds nowhere."""
    if blocks.size.sum() <= graph.memory_bytes:
        return True
    if len(blocks) == len(pipeline_blocks(graph, merge=False)):
        return True
    model = LoadModel(blocks, math.inf, (graph.num_accelerators, graph.num_cpus))
    return math.isclose(_best_split(model, limit)[1], value, rel_tol=1e-12)
