"""What crosses between pipeline stages: activations, their gradients, tied parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Partial,
    Pin,
    Placements,
    Shard,
    input_gradient_placements,
    input_placements,
    local_elements,
    output_gradient_placements,
    output_placements,
    splits_of,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.hardware.resources import INTER_NODE, INTRA_NODE
from stratagem.simulator.operators.operator import Edge, Weight, factor_sizes
from stratagem.simulator.pricing.cost_rows import PricedTime, to_ns
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import trainable_weights
from stratagem.simulator.sharding.resharding_paths import Resharder


@dataclass(frozen=True, eq=False)
class BoundaryRow:
    """An edge between stages, per (producer choice, consumer choice).

    `received_bytes` is what one device of the consumer keeps of it per microbatch. `targets` says
    per consumer choice how the tensor must arrive: of two edges that want the same tensor in the
    same way, only one is sent.
    """

    forward: PricedTime
    backward: PricedTime
    targets: tuple[Placements, ...]
    received_bytes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def summed(placements: Placements) -> Placements:
    """The same placements with pending sums carried out: only whole values travel."""
    return tuple(REPLICATE if isinstance(p, Partial) else p for p in placements)


def transfer_seconds(
    nbytes: float, source: DeviceMesh, target: DeviceMesh, cluster: Cluster
) -> float:
    """Seconds until every device of `target` has received its `nbytes` from devices of `source`.

    Receivers of a node share its network cards, as do the senders, and no device uses more than
    one card; inside a node every device has its own link.
    """
    copies = target.num_devices / source.num_devices
    per_node = cluster.devices_per_node
    most = [max(mesh.per_node(per_node).values()) for mesh in (source, target)]
    if _share_node(source, target, per_node):
        link, busiest = cluster.intra_node, max(1.0, copies)
    else:
        link = cluster.inter_node
        alone = min(link.num_cards, per_node) * max(1.0, copies)
        busiest = max(most[1], most[0] * copies, alone)
    return link.latency_us * 1e-6 + busiest * nbytes / (link.bandwidth_gb_s * 1e9)


def landing(
    sizes: tuple[int, ...],
    itemsize: int,
    meshes: tuple[DeviceMesh, DeviceMesh],
    after: Placements,
    resharder: Resharder,
    cluster: Cluster,
) -> Placements:
    """How a tensor arrives on its way between two meshes before it lies as `after` says.

    Where neighbours of a node want the same, each may fetch a part from afar, and the node brings
    the parts together: between tensor-parallel groups of 8 that is an eighth of the bytes between
    the nodes (Narayanan et al. 2021, arXiv 2104.04473, section 4.1). Done where it is faster.

    Args:
        sizes: of the tensor's factors.
        itemsize: bytes of an element.
        meshes: where it comes from and where it goes to.
        after: how it must lie in the end.
        resharder: of the target mesh.
        cluster: gives the links.
    """
    return _cheapest_landing(sizes, itemsize, meshes, after, resharder, cluster)[1]


def _cheapest_landing(
    sizes: tuple[int, ...],
    itemsize: int,
    meshes: tuple[DeviceMesh, DeviceMesh],
    after: Placements,
    resharder: Resharder,
    cluster: Cluster,
) -> tuple[float, Placements]:
    """Seconds until a tensor lies as `after` says, and how it arrives."""
    shared, moves = after, meshes[0] != meshes[1]
    pinned = any(isinstance(placement, Pin) for placement in after)
    if moves and not pinned and transfer_mask(*meshes, cluster) == INTER_NODE:
        for axis, placement in enumerate(after):
            if placement == REPLICATE and not resharder.links[axis].crosses_nodes:
                shared = _shared_out(sizes, shared, axis, meshes[1])
    ways = [
        (_landing_seconds(sizes, itemsize, meshes, lands, after, resharder, cluster), lands)
        for lands in dict.fromkeys((after, shared))
    ]
    return min(ways, key=lambda way: way[0])


def _shared_out(
    sizes: tuple[int, ...], placements: Placements, axis: int, mesh: DeviceMesh
) -> Placements:
    """The same with the first factor that divides evenly cut along `axis` as well."""
    for factor, size in enumerate(sizes):
        cut = (*placements[:axis], Shard(factor), *placements[axis + 1 :])
        ways = math.prod(splits_of(cut, factor, mesh.shape))
        if Shard(factor) not in placements[axis + 1 :] and size % ways == 0:
            return cut
    return placements


def _landing_seconds(
    sizes: tuple[int, ...],
    itemsize: int,
    meshes: tuple[DeviceMesh, DeviceMesh],
    lands: Placements,
    after: Placements,
    resharder: Resharder,
    cluster: Cluster,
) -> float:
    """Seconds of the transfer and of bringing its parts together."""
    nbytes = local_elements(sizes, lands, meshes[1].shape) * itemsize
    steps = resharder.path(sizes, itemsize, lands, after)
    return transfer_seconds(nbytes, *meshes, cluster) + resharder.seconds(steps, itemsize)


def transfer_mask(source: DeviceMesh, target: DeviceMesh, cluster: Cluster) -> int:
    """The link class that a transfer between two meshes occupies."""
    inside = _share_node(source, target, cluster.devices_per_node)
    return INTRA_NODE if inside else INTER_NODE


def _share_node(source: DeviceMesh, target: DeviceMesh, per_node: int) -> bool:
    """Whether all devices of two meshes are on one node."""
    nodes = source.per_node(per_node)
    return len(nodes) == 1 and nodes.keys() == target.per_node(per_node).keys()


def blocks_compute(source: DeviceMesh, target: DeviceMesh, cluster: Cluster) -> bool:
    """Whether a transfer between two meshes keeps the cores of its senders busy."""
    inside = transfer_mask(source, target, cluster) == INTRA_NODE
    return (cluster.intra_node if inside else cluster.inter_node).shares_compute


def syncs_compute(mesh: DeviceMesh, cluster: Cluster) -> bool:
    """Whether a sum along the axes of a mesh may keep the cores of its devices busy."""
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    return any(mesh.link(axis, cluster).shares_compute for axis in axes)


def networked(
    pairs: Iterable[tuple[int, int]], meshes: Sequence[DeviceMesh], cluster: Cluster
) -> set[int]:
    """The stages that exchange tensors with stages on other nodes; `pairs` are those that do."""
    return {
        stage
        for a, b in pairs
        if transfer_mask(meshes[a], meshes[b], cluster) == INTER_NODE
        for stage in (a, b)
    }


def price_boundary(
    edge: Edge,
    source: TableBuilder,
    target: TableBuilder,
    ours: Sequence[Choice],
    theirs: Sequence[Choice],
    cluster: Cluster,
) -> BoundaryRow:
    """Price an edge from an operator on the mesh of `source` to one on the mesh of `target`.

    Forward sums what is pending on the source mesh, moves the tiles and, where that pays, shares
    them out on the target mesh (see `landing`); backward sums the gradient on the target mesh and
    moves it back in the same way. On one and the same mesh the tensor is resharded as inside a
    stage, and kept twice only where the two stages differ.
    """
    make = partial(_priced_boundary, edge, source, target, ours, theirs, cluster)
    if len(ours) > 1 or len(theirs) > 1:
        return make()
    memory, graph = source.memory, source.graph
    ends = graph.operators[edge.producer].signature, graph.operators[edge.consumer].signature
    key = (
        *map(memory.number, (*ends, source.mesh, target.mesh)),
        memory.cluster(cluster),
        source.priced_by,
        *(edge.output, edge.slot, graph.edge_needs_gradient(edge)),
        *map(memory.choices, (ours, theirs)),
    )
    row: BoundaryRow = memory.crossings.get(key, make)
    return row


def _priced_boundary(
    edge: Edge,
    source: TableBuilder,
    target: TableBuilder,
    ours: Sequence[Choice],
    theirs: Sequence[Choice],
    cluster: Cluster,
) -> BoundaryRow:
    graph = source.graph
    producer = graph.operators[edge.producer]
    made = producer.outputs[edge.output]
    read = graph.operators[edge.consumer].inputs[edge.slot]
    sizes = factor_sizes(made.layout, producer.sizes)
    itemsize = source.training.bytes_of(made.dtype)
    flows = graph.edge_needs_gradient(edge)
    there = [output_placements(made, choice.config) for choice in ours]
    wanted = [input_placements(read, other.config) for other in theirs]
    kept = [local_elements(sizes, each, target.mesh.shape) * itemsize for each in wanted]
    moves = source.mesh != target.mesh
    stays = [[not moves and a == b for b in wanted] for a in there]
    received = np.where(stays, 0, np.array(kept, dtype=np.int64)[None, :])
    forward = _moving_seconds(source, target, sizes, itemsize, there, wanted, cluster)
    backward = np.zeros_like(forward)
    if flows:
        grads = [input_gradient_placements(read, other.config) for other in theirs]
        needed = [output_gradient_placements(made, choice.config) for choice in ours]
        backward = _moving_seconds(target, source, sizes, itemsize, grads, needed, cluster).T
    mask = transfer_mask(source.mesh, target.mesh, cluster)
    return BoundaryRow(_masked(forward, mask), _masked(backward, mask), tuple(wanted), received)


def price_tie(
    owner: tuple[TableBuilder, int, Sequence[Choice]],
    user: tuple[TableBuilder, int, Sequence[Choice]],
    parameter: str,
    cluster: Cluster,
) -> PricedTime:
    """Price a parameter tied across stages, per (owner choice, user choice).

    Its gradient goes to the owner's stage once a step and the new value comes back; `owner` and
    `user` are each a builder, the operator's index and its choices.
    """
    there, back = user[0].mesh, owner[0].mesh
    gradient = [
        transfer_seconds(nbytes, there, back, cluster)
        for nbytes in _tied_bytes(
            *owner, parameter, weight_gradient_placements, owner[0].training.gradient_bytes
        )
    ]
    value = [
        transfer_seconds(nbytes, back, there, cluster)
        for nbytes in _tied_bytes(
            *user, parameter, weight_placements, user[0].training.parameter_bytes
        )
    ]
    return _masked(np.add.outer(np.array(gradient), np.array(value)), 0)


def _tied_bytes(
    builder: TableBuilder,
    operator: int,
    choices: Sequence[Choice],
    parameter: str,
    placed: Callable[[Weight, Config], Placements],
    itemsize: int,
) -> list[int]:
    """Bytes per device of a tied parameter under each choice."""
    node = builder.graph.operators[operator]
    weight = next(w for w in node.weights if w.parameter == parameter)
    sizes = factor_sizes(weight.layout, node.sizes)
    return [
        local_elements(sizes, summed(placed(weight, choice.config)), builder.mesh.shape) * itemsize
        for choice in choices
    ]


def _moving_seconds(
    source: TableBuilder,
    target: TableBuilder,
    sizes: tuple[int, ...],
    itemsize: int,
    before: Sequence[Placements],
    after: Sequence[Placements],
    cluster: Cluster,
) -> Floats:
    """Seconds until a tensor of one stage lies as another wants it, `before` × `after`."""
    if source.mesh == target.mesh:
        return np.array(
            [[_path_seconds(source, sizes, itemsize, a, b) for b in after] for a in before]
        )
    ends = source.mesh, target.mesh
    # Many choices differ in what a tensor does not feel.
    pending = {
        a: _path_seconds(source, sizes, itemsize, a, summed(a)) for a in dict.fromkeys(before)
    }
    moved = {
        b: _cheapest_landing(sizes, itemsize, ends, b, target.resharder, cluster)[0]
        for b in dict.fromkeys(after)
    }
    seconds: Floats = np.add.outer(
        np.array([pending[a] for a in before]), np.array([moved[b] for b in after])
    )
    return seconds


def _path_seconds(
    builder: TableBuilder,
    sizes: tuple[int, ...],
    itemsize: int,
    before: Placements,
    after: Placements,
) -> float:
    steps = builder.resharder.path(sizes, itemsize, before, after)
    return builder.resharder.seconds(steps, itemsize)


def _masked(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]], mask: int) -> PricedTime:
    return PricedTime(to_ns(seconds), np.where(seconds > 0, mask, 0))


def crossing_edges(stage_of: Mapping[str, int], graph: OperatorGraph) -> tuple[Edge, ...]:
    """The edges between operators of different stages (sources are everywhere)."""
    return tuple(
        edge
        for edge in graph.edges
        if not graph.operators[edge.producer].is_source
        and stage_of[graph.operators[edge.producer].name]
        != stage_of[graph.operators[edge.consumer].name]
    )


def stage_pairs(
    edges: Sequence[Edge], stage_of: Mapping[str, int], graph: OperatorGraph
) -> tuple[tuple[int, int], ...]:
    """The (stage, later stage) pairs that edges cross, in order."""
    names = [(graph.operators[e.producer].name, graph.operators[e.consumer].name) for e in edges]
    return tuple(sorted({(stage_of[a], stage_of[b]) for a, b in names}))


def crossing_ties(
    stage_of: Mapping[str, int], graph: OperatorGraph
) -> tuple[tuple[int, int, str], ...]:
    """(owner, user, parameter) of every use of a parameter whose owner is in another stage."""
    owner = graph.owners
    return tuple(
        (graph.index[owner[weight.parameter]], j, weight.parameter)
        for j, operator in enumerate(graph.operators)
        for weight in trainable_weights(graph, operator)
        if stage_of[owner[weight.parameter]] != stage_of[operator.name]
    )
