"""A cluster as its topology: nodes of devices, and the links in and between them."""

from __future__ import annotations

from stratagem.simulator.drawing.svg import COLOURS, Drawing, text_width
from stratagem.simulator.hardware.cluster import Cluster, Link

MAX_NODES = 4
"""Nodes that are drawn; of more the last is a box that counts the others."""

MAX_COLUMNS = 8
CELL, GAP = 30.0, 4.0


def cluster_picture(cluster: Cluster) -> str:
    """The HTML of the picture.

    Example:
        >>> "A100-80GB" in cluster_picture(Cluster.preset("dgx-a100", num_nodes=2))
        True
    """
    drawing = Drawing()
    drawing.text(0, 14, cluster.name, size=15, bold=True)
    drawing.text(0, 33, _summary(cluster), faint=True)
    shown = cluster.num_nodes if cluster.num_nodes <= MAX_NODES else MAX_NODES - 1
    top, x = 46.0, 0.0
    width, height = _node_size(cluster)
    centres = []
    for node in range(shown):
        _draw_node(drawing, cluster, node, x, top)
        centres.append(x + width / 2)
        x += width + 3 * GAP
    if shown < cluster.num_nodes:
        drawing.box(x, top, width, height, dashed=True)
        more = f"and {cluster.num_nodes - shown} more nodes"
        drawing.text(x + width / 2, top + height / 2, more, anchor="middle")
        centres.append(x + width / 2)
    if cluster.num_nodes > 1:
        bus = top + height + 18
        for centre in centres:
            drawing.line([(centre, top + height), (centre, bus)], colour=COLOURS[1])
        drawing.line([(centres[0], bus), (centres[-1], bus)], colour=COLOURS[1])
        words = f"between nodes: {_link_words(cluster.inter_node, 'a node')}"
        drawing.text(0, bus + 18, words)
    return drawing.svg(f"cluster {cluster.name}: {_summary(cluster)}")


def _summary(cluster: Cluster) -> str:
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    kinds = ", ".join(sorted(set(cluster.node_devices)))
    memory = cluster.device_type(0).memory_gib
    price = f", {cluster.price_per_hour:g} an hour" if cluster.price_per_hour else ""
    return (
        f"{nodes} × {cluster.devices_per_node} = {cluster.num_devices} devices, {kinds} of "
        f"{memory:g} GiB{price}"
    )


def _link_words(link: Link, whose: str) -> str:
    cards = f", {link.num_cards} cards" if link.num_cards > 1 else ""
    return f"{link.name}, {link.bandwidth_gb_s:g} GB/s {whose}{cards}, {link.latency_us:g} µs"


def _node_size(cluster: Cluster) -> tuple[float, float]:
    columns = min(cluster.devices_per_node, MAX_COLUMNS)
    rows = -(-cluster.devices_per_node // MAX_COLUMNS)
    words = text_width(_link_words(cluster.intra_node, "a device"), 11) + 24
    return max(columns * (CELL + GAP) + 16, words), rows * (CELL + GAP) + 52


def _draw_node(drawing: Drawing, cluster: Cluster, node: int, x: float, y: float) -> None:
    width, height = _node_size(cluster)
    drawing.box(x, y, width, height)
    drawing.text(x + 8, y + 17, f"node {node} · {cluster.node_devices[node]}", bold=True)
    columns = min(cluster.devices_per_node, MAX_COLUMNS)
    left = x + 8
    for place in range(cluster.devices_per_node):
        device = node * cluster.devices_per_node + place
        across, down = place % columns, place // columns
        cell_x, cell_y = left + across * (CELL + GAP), y + 25 + down * (CELL + GAP)
        drawing.box(cell_x, cell_y, CELL, CELL, colour=COLOURS[0], fill=0.25)
        drawing.text(cell_x + CELL / 2, cell_y + 19, str(device), size=11, anchor="middle")
    words = _link_words(cluster.intra_node, "a device")
    drawing.text(x + 8, y + height - 8, words, size=11, faint=True)
