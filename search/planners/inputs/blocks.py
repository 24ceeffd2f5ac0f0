"""What of a partition input must stay together, and which tensors then cross between devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import scipy

from stratagem.searcher.planners.inputs.dnn_partitioning import PartitionInput, PartitionNode
from stratagem.simulator.base.arrays import Floats


@dataclass(frozen=True)
class NodeBlocks:
    """Groups of nodes that share a device, and the tensors between them.

    Attributes:
        nodes: node ids of each block.
        predecessors: blocks that must be on the same or an earlier device, per block.
        accelerator_ms: latency on an accelerator, forward and backward.
        cpu_ms: latency on a CPU core.
        size: bytes on an accelerator.
        unsupported: 1 where an accelerator cannot run the block, 0 elsewhere.
        nets: blocks that make or read one tensor, and the cost that each device among several
            pays for it, in ms.
    """

    nodes: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    accelerator_ms: Floats
    cpu_ms: Floats
    size: Floats
    unsupported: Floats
    nets: tuple[tuple[frozenset[int], float], ...]

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.nodes)


def colour_blocks(graph: PartitionInput) -> NodeBlocks:
    """Blocks of nodes of one colour: what any split must keep together."""
    return _build(graph, _colours(graph), [])


def pipeline_blocks(graph: PartitionInput, *, merge: bool = True) -> NodeBlocks:
    """Blocks for contiguous splits, whose forward parts send forward only.

    Backward nodes follow the forward nodes of their colour. A colour with backward nodes only
    counts as a forward node without work; its edges are those of its backward nodes turned round.
    Colours on a cycle share a device. The definition is that of the peer.

    Args:
        graph: the input.
        merge: let a block without work join the only block that it shares tensors with. No split
            gets worse by that, memory aside, and there are far fewer down-sets.
    """
    block_of = _colours(graph)
    order = _forward_edges(graph, block_of)
    count = max(block_of.values()) + 1
    tails, heads = zip(*order, strict=True) if order else ((), ())
    adjacency = scipy.sparse.coo_array((np.ones(len(tails)), (tails, heads)), shape=(count, count))
    _, component = scipy.sparse.csgraph.connected_components(
        adjacency, directed=True, connection="strong"
    )
    block_of = _renumbered(graph, {n: int(component[b]) for n, b in block_of.items()})
    blocks = _build(graph, block_of, _forward_edges(graph, block_of))
    while merge:
        joined = _idle_merges(blocks)
        if not joined:
            break
        block_of = _renumbered(graph, {n: joined.get(b, b) for n, b in block_of.items()})
        blocks = _build(graph, block_of, _forward_edges(graph, block_of))
    return blocks


def _colours(graph: PartitionInput) -> dict[int, int]:
    """Block of each node: one a colour, one a node without a colour."""
    keys = {
        node.id: ("node", node.id) if node.color_class is None else ("colour", node.color_class)
        for node in graph.nodes
    }
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    return {node: numbers[key] for node, key in keys.items()}


def _renumbered(graph: PartitionInput, block_of: dict[int, int]) -> dict[int, int]:
    """Blocks numbered from 0 as they appear in the file."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        numbers.setdefault(block_of[node.id], len(numbers))
    return {node: numbers[block] for node, block in block_of.items()}


def _forward_edges(graph: PartitionInput, block_of: dict[int, int]) -> list[tuple[int, int]]:
    """Edges between blocks that put stages in an order."""
    backward = {node.id for node in graph.nodes if node.is_backward_node}
    with_forward = {block_of[node.id] for node in graph.nodes if node.id not in backward}
    edges: set[tuple[int, int]] = set()
    for edge in graph.edges:
        tail, head = block_of[edge.source_id], block_of[edge.dest_id]
        if tail == head or (edge.dest_id in backward and edge.source_id not in backward):
            continue
        if edge.dest_id not in backward:
            edges.add((tail, head))
        elif tail not in with_forward or head not in with_forward:
            edges.add((head, tail))
    return sorted(edges)


def _build(
    graph: PartitionInput, block_of: dict[int, int], order: Iterable[tuple[int, int]]
) -> NodeBlocks:
    count = max(block_of.values()) + 1
    nodes: list[list[PartitionNode]] = [[] for _ in range(count)]
    for node in graph.nodes:
        nodes[block_of[node.id]].append(node)
    predecessors: list[list[int]] = [[] for _ in range(count)]
    for tail, head in order:
        predecessors[head].append(tail)

    def totals(field: str) -> Floats:
        return np.array([sum(float(getattr(n, field)) for n in block) for block in nodes])

    return NodeBlocks(
        nodes=tuple(tuple(node.id for node in block) for block in nodes),
        predecessors=tuple(map(tuple, predecessors)),
        accelerator_ms=totals("fpga_latency"),
        cpu_ms=totals("cpu_latency"),
        size=totals("size"),
        unsupported=np.array(
            [float(not all(n.supported_on_fpga for n in block)) for block in nodes]
        ),
        nets=_nets(graph, block_of),
    )


def _nets(
    graph: PartitionInput, block_of: dict[int, int]
) -> tuple[tuple[frozenset[int], float], ...]:
    """Blocks of each tensor that could cross; tensors of the same blocks are one net."""
    ends: dict[int, set[int]] = defaultdict(set)
    for edge in graph.edges:
        ends[edge.source_id] |= {block_of[edge.source_id], block_of[edge.dest_id]}
    costs = graph.output_costs()
    nets: dict[frozenset[int], float] = defaultdict(float)
    for source, blocks in ends.items():
        if len(blocks) > 1 and costs[source] > 0:
            nets[frozenset(blocks)] += costs[source]
    return tuple(nets.items())


def _idle_merges(blocks: NodeBlocks) -> dict[int, int]:
    """Blocks without work that share tensors and edges with at most one block: block → that one.

    What shares them with none joins any.
    """
    neighbours: list[set[int]] = [set(before) for before in blocks.predecessors]
    for block, before in enumerate(blocks.predecessors):
        for other in before:
            neighbours[other].add(block)
    for net, _ in blocks.nets:
        for block in net:
            neighbours[block] |= net - {block}
    joined: dict[int, int] = {}
    taken: set[int] = set()
    for block, others in enumerate(neighbours):
        idle = not (
            blocks.accelerator_ms[block] or blocks.cpu_ms[block] or blocks.unsupported[block]
        )
        if not idle or len(others) > 1 or block in taken or len(blocks) == 1:
            continue
        target = next(iter(others), 1 if block == 0 else 0)
        if target not in joined:
            joined[block] = target
            taken.add(target)
    return joined
