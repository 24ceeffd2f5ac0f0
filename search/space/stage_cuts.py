"""Cutting a graph into pipeline stages: of equal time, or by layers as frameworks do it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import shape_of
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.pricing.stage_boundaries import transfer_seconds
from stratagem.simulator.sharding.choice import Choice

_BY_TIME = "cut it by time (partition='time' of a TrainingSetup), or into another number of stages"


def balanced_stages(
    graph: OperatorGraph,
    cluster: Cluster,
    num_stages: int,
    costs: CostModel | None = None,
    training: Training | None = None,
) -> tuple[tuple[str, ...], ...]:
    """Consecutive operators per stage, so that the slowest stage is as fast as it can be.

    The time of a stage is that of its operators (whole, on one device) and of what it sends on, as
    plans are simulated under these costs and training; the cuts are optimal by dynamic programming
    (PipeDream, Narayanan et al. 2019). Sources belong to the stage of their first reader.

    Raises:
        ValueError: when there are fewer operators than stages, or `num_stages` is below 1.
    """
    return StageCutter(graph, cluster, costs, training).stages(num_stages)


class StageCutter:
    """Cuts a graph into any number of stages, see `balanced_stages`; what numbers share is kept.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph, cluster = mlp([64] * 4, batch=8), Cluster.preset("dgx-a100")
        >>> cutter = StageCutter(graph, cluster)
        >>> all(cutter.stages(n) == balanced_stages(graph, cluster, n) for n in (3, 1, 2))
        True
    """

    def __init__(
        self,
        graph: OperatorGraph,
        cluster: Cluster,
        costs: CostModel | None = None,
        training: Training | None = None,
    ) -> None:
        self._graph = graph
        operators = enumerate(graph.operators)
        self._layers = [i for i, operator in operators if not operator.is_source]
        count = len(self._layers)
        trained = training or Training()
        priced = costs_or_default(costs)
        seconds = _operator_seconds(graph, self._layers, cluster, priced, trained)
        sends = _cut_seconds(graph, self._layers, cluster, trained)
        self._until = np.concatenate([[0.0], np.cumsum(seconds)])
        self._tails = np.array([0.0, *sends[: count - 1], 0.0])
        self._best = self._until + np.where(np.arange(count + 1) > 0, self._tails, 0.0)
        self._origins: list[Ints] = []

    @property
    def num_layers(self) -> int:
        """Operators that are no sources: so many stages there can be at most."""
        return len(self._layers)

    def stages(self, num_stages: int) -> tuple[tuple[str, ...], ...]:
        """The operators of each of so many stages.

        Raises:
            ValueError: as `balanced_stages`.
        """
        layers = self._layers
        if not 1 <= num_stages <= len(layers):
            raise ValueError(
                f"{self._graph.name!r} has {len(layers)} operators; it cannot be {num_stages} "
                "stages"
            )
        return cut_stages(self._graph, layers, self._cuts(num_stages))

    def _cuts(self, num_stages: int) -> list[int]:
        """Cut positions that minimise the slowest stage (its time plus what it sends on)."""
        while len(self._origins) < num_stages - 1:
            self._add_stage()
        cuts: list[int] = []
        end = len(self._layers)
        for origin in reversed(self._origins[: num_stages - 1]):
            end = int(origin[end])
            cuts.append(end)
        return cuts[::-1]

    def _add_stage(self) -> None:
        """From the best slowest stage of the operators before each cut to that with one more."""
        count, stage = len(self._layers), len(self._origins) + 1
        until, tails, best = self._until, self._tails, self._best
        after, origin = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        for end in range(stage + 1, count + 1):
            slowest = np.maximum(best[stage:end], until[end] - until[stage:end] + tails[end])
            cut = int(np.argmin(slowest))
            after[end], origin[end] = slowest[cut], stage + cut
        self._best = after
        self._origins.append(origin)


def layer_stages(
    graph: OperatorGraph, num_stages: int, by: str = "layers"
) -> tuple[tuple[str, ...], ...]:
    """Whole repeated blocks per stage, dealt out as training frameworks do it.

    Args:
        graph: a model with repeated blocks.
        num_stages: how many stages.
        by: ``layers`` gives every stage as many, what stands before them to the first stage and
            what stands after them to the last (Megatron-LM). ``layers and ends`` counts each end
            as one more layer (Megatron-DeepSpeed). ``parameters`` ends a stage with the block at
            which it has passed its share of the weights of matrix products (nanotron).

    Raises:
        ValueError: the blocks do not divide evenly, or a stage would be empty.
    """
    units = layer_units(graph)
    num_blocks = len(units) - 2
    if by == "parameters":
        stages = _by_threshold([_matrix_weights(graph, unit) for unit in units], num_stages)
    else:
        counted = num_blocks + (2 if by == "layers and ends" else 0)
        if counted % num_stages:
            ends = " and 2 ends" if by == "layers and ends" else ""
            raise ValueError(
                f"{graph.name!r} has {num_blocks} repeated blocks{ends}, which {num_stages} "
                f"stages do not divide: {_BY_TIME}"
            )
        share = counted // num_stages
        skip = 1 if counted == num_blocks else 0
        last = num_stages - 1
        stages = [min(max(u - skip, 0) // share, last) for u in range(len(units))]
    if set(stages) != set(range(num_stages)):
        raise ValueError(
            f"{graph.name!r} has {num_blocks} repeated blocks, too few for {num_stages} stages: "
            f"{_BY_TIME}"
        )
    stage_of = {i: s for unit, s in zip(units, stages, strict=True) for i in unit}
    return by_stage(graph, stage_of, num_stages)


def layer_units(graph: OperatorGraph) -> list[list[int]]:
    """Operators that stand before the repeated blocks, those of each block, and those after.

    Sources are left out. Of several kinds of blocks the one with the most operators counts.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> len(layer_units(gpt(num_layers=4, batch=8)))
        6
    """
    segments: dict[int, list[int]] = {}
    for i, operator in enumerate(graph.operators):
        if not operator.is_source:
            segments.setdefault(graph.segments[i], []).append(i)
    kinds: dict[tuple[str, ...], list[list[int]]] = {}
    for segment in segments.values():
        kinds.setdefault(tuple(graph.operators[i].kind for i in segment), []).append(segment)
    blocks = max(kinds.values(), key=lambda found: (len(found) > 1) * sum(map(len, found)))
    inside = {i for block in blocks for i in block}
    layers = sorted(i for segment in segments.values() for i in segment)
    before = [i for i in layers if i < blocks[0][0]]
    for i in layers:
        if i not in inside and blocks[0][0] < i < blocks[-1][-1]:
            position = max(k for k, block in enumerate(blocks) if block[0] < i)
            blocks[position].append(i)
    after = [i for i in layers if i > blocks[-1][-1] and i not in inside]
    return [before, *blocks, after]


def _matrix_weights(graph: OperatorGraph, unit: Sequence[int]) -> int:
    """Weights that the matrix products of some operators have, biases left out."""
    return sum(
        math.prod(shape_of(weight.layout, graph.operators[i].sizes))
        for i in unit
        if kind_of(graph.operators[i]).product is not None
        for weight in graph.operators[i].weights
        if len(weight.layout) > 1
    )


def _by_threshold(weights: Sequence[int], num_stages: int) -> list[int]:
    """Stage per unit: one ends with the unit that takes it past its share.

    It ends before that where the units left are no more than the stages left.
    """
    total, done, stage = sum(weights), 0, 0
    stages: list[int] = []
    for number, weight in enumerate(weights):
        stages.append(stage)
        done += weight
        left, stages_left = len(weights) - number - 1, num_stages - stage - 1
        if stages_left and (done * num_stages > total * (stage + 1) or left <= stages_left):
            stage += 1
    return stages


def cut_stages(
    graph: OperatorGraph, layers: Sequence[int], cuts: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Names by stage, where the operators `layers`, in order, are cut at some places of theirs."""
    bounds = [0, *cuts, len(layers)]
    stage_of = {
        layers[k]: s for s in range(len(cuts) + 1) for k in range(bounds[s], bounds[s + 1])
    }
    return by_stage(graph, stage_of, len(cuts) + 1)


def by_stage(
    graph: OperatorGraph, stage_of: dict[int, int], num_stages: int
) -> tuple[tuple[str, ...], ...]:
    """Names by stage; what has none yet (sources) goes to the stage of its first reader."""
    for i in reversed(range(len(graph.operators))):
        if i not in stage_of:
            readers = (edge.consumer for edge in graph.readers[i])
            stage_of[i] = min((stage_of[r] for r in readers), default=0)
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for i, operator in enumerate(graph.operators):
        names[stage_of[i]].append(operator.name)
    return tuple(map(tuple, names))


def _operator_seconds(
    graph: OperatorGraph,
    layers: Sequence[int],
    cluster: Cluster,
    costs: CostModel,
    training: Training,
) -> list[float]:
    """Both passes of each operator, whole, on the first device."""
    mesh = DeviceMesh((MeshAxis("device", 1),), (0,))
    builder = TableBuilder(graph, mesh, cluster, training, costs)
    return [builder.pass_seconds(i, [Choice((REPLICATE,))])[0] for i in layers]


def _cut_seconds(
    graph: OperatorGraph, layers: Sequence[int], cluster: Cluster, training: Training
) -> list[float]:
    """Per layer, seconds to send on what is alive after it, and those of its gradients back.

    A tensor is sent once, however many operators read it; where there are several nodes, all
    devices of one send at the same time. As operators are timed on one device of a stage's many,
    what all of them send counts.
    """
    position = {i: k for k, i in enumerate(layers)}
    last: dict[tuple[int, int], int] = {}
    flows: dict[tuple[int, int], bool] = {}
    for edge in graph.edges:
        if edge.producer in position:
            tensor = (edge.producer, edge.output)
            last[tensor] = max(last.get(tensor, 0), position[edge.consumer])
            flows[tensor] = flows.get(tensor, False) or graph.edge_needs_gradient(edge)
    total, senders = cluster.num_devices, 1
    if cluster.num_nodes > 1:
        senders = cluster.devices_per_node
    axes = (MeshAxis("device", senders),)
    ends = (
        DeviceMesh(axes, tuple(range(senders))),
        DeviceMesh(axes, tuple(range(total - senders, total))),
    )
    crossing = [0.0] * len(layers)
    for (i, output), end in last.items():
        made = graph.operators[i].outputs[output]
        nbytes = training.bytes_of(made.dtype) * math.prod(
            shape_of(made.layout, graph.operators[i].sizes)
        )
        once = senders * transfer_seconds(nbytes / senders, *ends, cluster)
        for k in range(position[i], end):
            crossing[k] += once * (2 if flows[i, output] else 1)
    return crossing
