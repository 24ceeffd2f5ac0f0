"""Inputs of *Efficient Algorithms for Device Placement of DNN Graph Operators* (NeurIPS 2020).

A JSON file lists nodes with a latency on an accelerator and on a CPU core, sizes in bytes, and
edges with the cost of moving the output of their source. Nodes of one colour share a device. A
split file lists the nodes of each device. In the published layer graphs latencies are in
milliseconds but edge costs in seconds; `corrected` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stratagem.searcher.planners.inputs.reading import check_numbers, decode_file
from stratagem.searcher.planners.inputs.result import PlannedStage
from stratagem.simulator.base.files import write_text

EDGE_SECONDS_TO_MS = 1000.0


class PartitionNode(msgspec.Struct, frozen=True, rename="camel"):
    """One operator or layer; latencies in ms, size in bytes."""

    id: int
    fpga_latency: float
    cpu_latency: float
    supported_on_fpga: bool | int
    is_backward_node: bool | int
    size: float = 0.0
    color_class: int | None = None
    name: str = ""


class PartitionEdge(msgspec.Struct, frozen=True, rename="camel"):
    """A tensor from one node to another; the cost is that of moving the source's output, in ms."""

    source_id: int
    dest_id: int
    cost: float


class _PartitioningFile(msgspec.Struct, frozen=True):
    nodes: tuple[PartitionNode, ...]
    edges: tuple[PartitionEdge, ...]
    max_accelerators: int = msgspec.field(name="maxFPGAs")
    max_cpus: int = msgspec.field(name="maxCPUs")
    memory_bytes: float = msgspec.field(name="maxSizePerFPGA")


class _SplitDevice(msgspec.Struct, frozen=True):
    nodes: tuple[int, ...]
    load: float = -1.0


class _SplitFile(msgspec.Struct, frozen=True, rename="camel"):
    fpgas: tuple[_SplitDevice, ...]
    cpus: tuple[_SplitDevice, ...]
    max_load: float = -1.0


@dataclass(frozen=True)
class PartitionInput:
    """One graph to spread over accelerators and CPU cores.

    Attributes:
        name: the file, and what of it was corrected.
        nodes: operators or layers.
        edges: tensors between them; equal costs for all edges out of a node.
        num_accelerators: accelerators there are.
        num_cpus: CPU cores there are.
        memory_bytes: memory of an accelerator.
    """

    name: str
    nodes: tuple[PartitionNode, ...]
    edges: tuple[PartitionEdge, ...]
    num_accelerators: int
    num_cpus: int
    memory_bytes: float

    def output_costs(self) -> dict[int, float]:
        """Cost of moving the output of each node that has readers, in ms."""
        return {edge.source_id: edge.cost for edge in reversed(self.edges)}


def read_partition_input(path: str | Path, *, corrected: bool = False) -> PartitionInput:
    """Read a graph.

    Example:
        >>> graph = read_partition_input("bert24_training.json")  # doctest: +SKIP
        >>> graph.num_accelerators  # doctest: +SKIP
        6

    Args:
        path: the file.
        corrected: take edge costs for seconds and bring them to the milliseconds of the latencies,
            as the published layer graphs need it. As shipped otherwise.

    Raises:
        ValueError: names the file, the node or edge, what is wrong with it and what to do.
    """
    file = decode_file(path, _PartitioningFile)
    edges, name = file.edges, Path(path).stem
    if corrected:
        edges = tuple(
            PartitionEdge(e.source_id, e.dest_id, e.cost * EDGE_SECONDS_TO_MS) for e in edges
        )
        name += f" (edge costs × {EDGE_SECONDS_TO_MS:.0f})"
    graph = PartitionInput(
        name, file.nodes, edges, file.max_accelerators, file.max_cpus, file.memory_bytes
    )
    _check(graph, str(path))
    return graph


def write_partition_input(graph: PartitionInput, path: str | Path) -> None:
    """Write a graph in the same format, units as they are."""
    file = _PartitioningFile(
        graph.nodes, graph.edges, graph.num_accelerators, graph.num_cpus, graph.memory_bytes
    )
    write_text(path, msgspec.json.encode(file).decode())


def read_split(path: str | Path, graph: PartitionInput) -> tuple[PlannedStage, ...]:
    """Read a split, a human expert's say.

    Backward nodes that it leaves out go where a node of their colour is.

    Raises:
        ValueError: names the file and a node that is unknown, twice there, or nowhere.
    """
    file = decode_file(path, _SplitFile)
    devices = [("accelerator", list(d.nodes)) for d in file.fpgas]
    devices += [("cpu", list(d.nodes)) for d in file.cpus]
    known = {node.id: node for node in graph.nodes}
    place: dict[int, int] = {}
    for number, (_, nodes) in enumerate(devices):
        for node in nodes:
            if node not in known:
                raise ValueError(
                    f"{path}: node {node} of device {number} is not among the {len(known)} nodes "
                    f"of {graph.name}; give the graph that the split was made for"
                )
            if place.setdefault(node, number) != number:
                raise ValueError(
                    f"{path}: node {node} is on devices {place[node]} and {number}; "
                    f"leave it on one"
                )
    colours = {n: known[n].color_class for n in place}
    of_colour = {colours[n]: device for n, device in place.items() if colours[n] is not None}
    for left in graph.nodes:
        if left.id in place:
            continue
        if left.color_class not in of_colour:
            raise ValueError(
                f"{path}: node {left.id} is on no device, nor is another one of its colour "
                f"({left.color_class}); add it to a device"
            )
        devices[of_colour[left.color_class]][1].append(left.id)
    return tuple(PlannedStage(tuple(nodes), device=kind) for kind, nodes in devices if nodes)


def write_split(stages: Sequence[PlannedStage], path: str | Path) -> None:
    """Write a split, loads included, as the peer's own programs read it."""

    def devices(kind: str) -> tuple[_SplitDevice, ...]:
        return tuple(
            _SplitDevice(tuple(int(n) for n in stage.nodes), stage.load)
            for stage in stages
            if stage.device == kind
        )

    file = _SplitFile(devices("accelerator"), devices("cpu"), max(stage.load for stage in stages))
    write_text(path, msgspec.json.encode(file).decode())


def _check(graph: PartitionInput, where: str) -> None:
    if graph.num_accelerators < 1 or graph.num_cpus < 0 or not graph.memory_bytes > 0:
        raise ValueError(
            f"{where}: {graph.num_accelerators} accelerators, {graph.num_cpus} CPU cores and "
            f"{graph.memory_bytes} bytes; give at least 1, 0 and more than 0"
        )
    known: set[int] = set()
    for node in graph.nodes:
        if node.id in known:
            raise ValueError(f"{where}: two nodes have the id {node.id}; make ids unique")
        known.add(node.id)
        check_numbers(where, f"node {node.id}", (node.fpga_latency, node.cpu_latency, node.size))
    backward = {node.id for node in graph.nodes if node.is_backward_node}
    cost_of: dict[int, float] = {}
    for edge in graph.edges:
        named = f"edge {edge.source_id} → {edge.dest_id}"
        for end in (edge.source_id, edge.dest_id):
            if end not in known:
                raise ValueError(f"{where}: {named} names node {end}, which is not in `nodes`")
        check_numbers(where, named, (edge.cost,))
        if abs(cost_of.setdefault(edge.source_id, edge.cost) - edge.cost) > 1e-6:
            raise ValueError(
                f"{where}: edges out of node {edge.source_id} cost {cost_of[edge.source_id]} and "
                f"{edge.cost}; an output has one cost"
            )
        if edge.source_id in backward and edge.dest_id not in backward:
            raise ValueError(
                f"{where}: {named} leads from a backward node to a forward one; "
                f"check isBackwardNode of both"
            )
