"""Piper's inputs: reading, writing, and its objective.

A node offers, for each tensor-parallel degree t, ways to run (with and without recompute, say). A
stage on d replicas of t devices takes, per microbatch, ``(Σp + 2Σ(c + sync)/bw)/d +
4(d−1)/d·Σw/(N·bw)`` seconds over its nodes and the edges that cross its border, and holds
``Σ(A·y + B)`` bytes a device, y being the replicas from this stage on over its own, rounded up
(Tarnawski et al., *Piper*, NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from stratagem.searcher.planners.inputs.reading import check_numbers, decode_file
from stratagem.searcher.planners.inputs.result import PlannedStage
from stratagem.simulator.base.files import write_text


class RunOption(msgspec.Struct, frozen=True, rename="camel"):
    """One way to run a node on a number of devices.

    Attributes:
        id: its name.
        time_per_sample: seconds forward and backward of a microbatch.
        parameter_size: bytes of weights to synchronise between replicas.
        memory_usage_a: bytes for each microbatch in flight.
        memory_usage_b: bytes besides.
        sync_time_fw: bytes to gather, by predecessor that is in another stage.
        sync_time_bw: the same by successor.
    """

    id: str
    time_per_sample: float
    parameter_size: float
    memory_usage_a: float
    memory_usage_b: float
    sync_time_fw: dict[int, float]
    sync_time_bw: dict[int, float]


class PiperNode(msgspec.Struct, frozen=True):
    """A layer and the ways to run it, by tensor-parallel degree."""

    id: int
    options: dict[int, tuple[RunOption, ...]] = msgspec.field(name="TMPCs")
    name: str = ""


class PiperEdge(msgspec.Struct, frozen=True, rename="camel"):
    """What one layer sends another: bytes a microbatch."""

    source_id: int
    dest_id: int
    communication_cost: float


class _PiperFile(msgspec.Struct, frozen=True, rename="camel"):
    max_devices: int
    max_memory_per_device: float
    bandwidth: float
    mbs_in_batch: int
    nodes: tuple[PiperNode, ...]
    edges: tuple[PiperEdge, ...]


@dataclass(frozen=True)
class PiperInput:
    """A profiled model and the devices to train it on.

    Attributes:
        name: the file.
        nodes: layers.
        edges: tensors between them.
        num_devices: devices there are.
        memory_bytes: memory of a device.
        bandwidth: bytes a second from a device to any other.
        num_microbatches: microbatches in a batch; replicas must divide them.
    """

    name: str
    nodes: tuple[PiperNode, ...]
    edges: tuple[PiperEdge, ...]
    num_devices: int
    memory_bytes: float
    bandwidth: float
    num_microbatches: int

    @cached_property
    def index(self) -> dict[int, int]:
        """Position of each node id."""
        return {node.id: i for i, node in enumerate(self.nodes)}

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the direct predecessors of each node."""
        before: list[list[int]] = [[] for _ in self.nodes]
        for edge in self.edges:
            before[self.index[edge.dest_id]].append(self.index[edge.source_id])
        return tuple(map(tuple, before))

    @property
    def most_replicas(self) -> int:
        """Replicas of all stages together are no more than this."""
        return min(self.num_devices, self.num_microbatches)


def read_piper_input(
    path: str | Path,
    *,
    num_devices: int | None = None,
    memory_bytes: float | None = None,
    bandwidth: float | None = None,
    num_microbatches: int | None = None,
) -> PiperInput:
    """Read an input; devices, memory, bandwidth and batch may be others than the file's.

    Example:
        >>> read_piper_input("bert32a100.json", num_devices=64)  # doctest: +SKIP

    Raises:
        ValueError: names the file, the node, edge or number, and what is expected.
    """
    file = decode_file(path, _PiperFile)
    graph = PiperInput(
        Path(path).stem,
        file.nodes,
        file.edges,
        file.max_devices if num_devices is None else num_devices,
        file.max_memory_per_device if memory_bytes is None else memory_bytes,
        file.bandwidth if bandwidth is None else bandwidth,
        file.mbs_in_batch if num_microbatches is None else num_microbatches,
    )
    _check(graph, str(path))
    return graph


def write_piper_input(graph: PiperInput, path: str | Path) -> None:
    """Write an input in the same format."""
    file = _PiperFile(
        graph.num_devices,
        graph.memory_bytes,
        graph.bandwidth,
        graph.num_microbatches,
        graph.nodes,
        graph.edges,
    )
    write_text(path, msgspec.json.encode(file).decode())


def stage_seconds(graph: PiperInput, stages: Sequence[PlannedStage]) -> list[float]:
    """Seconds a microbatch of each stage of a plan, by the formula.

    Raises:
        ValueError: a node is missing or runs in an unknown way, a stage sends backwards, the
            replicas do not divide the batch, or devices or memory do not suffice.
    """
    place = {node: number for number, stage in enumerate(stages) for node in stage.nodes}
    _check_plan(graph, stages, place)
    seconds, replicas_from = [], sum(stage.replicas for stage in stages)
    for number, stage in enumerate(stages):
        in_flight = -(-replicas_from // stage.replicas)
        replicas_from -= stage.replicas
        ways = dict(zip(stage.nodes, _ways(graph, stage, number), strict=True))
        held = sum(way.memory_usage_a * in_flight + way.memory_usage_b for way in ways.values())
        if held > graph.memory_bytes:
            raise ValueError(
                f"{graph.name}: stage {number} holds {held / 1e9:.6g} GB on devices of "
                f"{graph.memory_bytes / 1e9:.6g} GB; recompute more, or give it fewer layers"
            )
        crossing = 0.0
        for edge in graph.edges:
            if place[edge.source_id] == place[edge.dest_id]:
                continue
            if place[edge.dest_id] == number:
                sync = ways[edge.dest_id].sync_time_fw[edge.source_id]
                crossing += 2 * (edge.communication_cost + sync)
            elif place[edge.source_id] == number:
                sync = ways[edge.source_id].sync_time_bw[edge.dest_id]
                crossing += 2 * (edge.communication_cost + sync)
        d = stage.replicas
        computing = sum(way.time_per_sample for way in ways.values())
        weights = sum(way.parameter_size for way in ways.values())
        resync = 4 * (d - 1) / d * weights / (graph.num_microbatches * graph.bandwidth)
        seconds.append((computing + crossing / graph.bandwidth) / d + resync)
    return seconds


def with_seconds(graph: PiperInput, stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """The same plan with the seconds of each stage written to it."""
    loads = stage_seconds(graph, stages)
    return tuple(replace(s, load=load) for s, load in zip(stages, loads, strict=True))


def _ways(graph: PiperInput, stage: PlannedStage, number: int) -> list[RunOption]:
    ways = []
    for node, chosen in zip(stage.nodes, stage.options, strict=True):
        offered = graph.nodes[graph.index[int(node)]].options.get(stage.shards, ())
        way = next((option for option in offered if option.id == chosen), None)
        if way is None:
            raise ValueError(
                f"{graph.name}: node {node} of stage {number} has no way {chosen!r} to run on "
                f"{stage.shards} devices; it has {[option.id for option in offered]}"
            )
        ways.append(way)
    return ways


def _check_plan(
    graph: PiperInput, stages: Sequence[PlannedStage], place: dict[int | str, int]
) -> None:
    used = sum(stage.num_devices for stage in stages)
    if used > graph.num_devices:
        raise ValueError(f"{graph.name}: the plan takes {used} of {graph.num_devices} devices")
    replicas = sum(stage.replicas for stage in stages)
    if replicas > graph.num_microbatches:
        raise ValueError(
            f"{graph.name}: {replicas} replicas share {graph.num_microbatches} microbatches; "
            f"use fewer replicas"
        )
    for number, stage in enumerate(stages):
        if graph.num_microbatches % stage.replicas:
            raise ValueError(
                f"{graph.name}: {stage.replicas} replicas of stage {number} do not divide "
                f"{graph.num_microbatches} microbatches"
            )
    for node in graph.nodes:
        if node.id not in place:
            raise ValueError(f"{graph.name}: node {node.id} is in no stage of the plan")
    for edge in graph.edges:
        if place[edge.source_id] > place[edge.dest_id]:
            raise ValueError(
                f"{graph.name}: edge {edge.source_id} → {edge.dest_id} leads back from stage "
                f"{place[edge.source_id]} to {place[edge.dest_id]}"
            )


def _check(graph: PiperInput, where: str) -> None:
    limits = {
        "maxDevices": graph.num_devices,
        "maxMemoryPerDevice": graph.memory_bytes,
        "bandwidth": graph.bandwidth,
        "mbsInBatch": graph.num_microbatches,
    }
    for field, value in limits.items():
        if not value > 0:
            raise ValueError(f"{where}: {field} is {value}; give more than 0")
    if len(graph.index) < len(graph.nodes):
        ids = [node.id for node in graph.nodes]
        twice = next(i for i in ids if ids.count(i) > 1)
        raise ValueError(f"{where}: two nodes have the id {twice}; make ids unique")
    before: dict[int, set[int]] = {node.id: set() for node in graph.nodes}
    after: dict[int, set[int]] = {node.id: set() for node in graph.nodes}
    for edge in graph.edges:
        named = f"edge {edge.source_id} → {edge.dest_id}"
        for end in (edge.source_id, edge.dest_id):
            if end not in before:
                raise ValueError(f"{where}: {named} names node {end}, which is not in `nodes`")
        if edge.source_id in before[edge.dest_id]:
            raise ValueError(f"{where}: {named} is there twice; add the bytes up in one")
        check_numbers(where, named, (edge.communication_cost,))
        before[edge.dest_id].add(edge.source_id)
        after[edge.source_id].add(edge.dest_id)
    for node in graph.nodes:
        for degree, options in node.options.items():
            for option in options:
                _check_option(
                    f"{where}: node {node.id}, {degree} devices, {option.id!r}",
                    option,
                    before[node.id],
                    after[node.id],
                )


def _check_option(where: str, option: RunOption, before: set[int], after: set[int]) -> None:
    check_numbers(
        where,
        "an entry",
        (
            option.time_per_sample,
            option.parameter_size,
            option.memory_usage_a,
            option.memory_usage_b,
            *option.sync_time_fw.values(),
            *option.sync_time_bw.values(),
        ),
    )
    for field, given, expected in (
        ("syncTimeFw", option.sync_time_fw, before),
        ("syncTimeBw", option.sync_time_bw, after),
    ):
        if set(given) != expected:
            raise ValueError(
                f"{where}: {field} is for nodes {sorted(given)}, edges say {sorted(expected)}; "
                f"list each neighbour once"
            )
