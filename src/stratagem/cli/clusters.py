"""The command line's verb on clusters.

stratagem clusters
stratagem clusters dgx-a100 --nodes 4 --out four.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from stratagem.cli.shared.named_models import load_cluster
from stratagem.cli.shared.options import (
    AsJson,
    Devices,
    Nodes,
    among,
    print_json,
    print_tables,
    say_written,
    speaker,
)
from stratagem.cli.shared.rich_tables import simple_table
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.hardware.cluster import NOT_CALIBRATED, Cluster, Link, preset_names


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(help="preset or cluster file to show", autocompletion=among(preset_names)),
    ] = None,
    nodes: Nodes = None,
    devices: Devices = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="with its links as collectives in the timing cache show them"),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="cache file of --fit; that of the user if left out"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="cluster file to write, to be edited")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the bundled clusters, or show one.

    Example: stratagem clusters dgx-a100 --nodes 4 --out four.json
    """
    say = speaker(as_json)
    if cache is not None and not fit:
        raise ValueError(f"--cache {cache} is of --fit: say --fit to fit links to its collectives")
    if name is None:
        if fit or (nodes, devices, out) != (None, None, None):
            raise ValueError("--nodes, --devices, --fit and --out are of one cluster: name it")
        presets = [Cluster.preset(each) for each in preset_names()]
        say.print(_list(presets))
        if as_json:
            print_json({"clusters": [_facts(cluster) for cluster in presets]})
        return
    check_outputs(out)
    cluster = load_cluster(name, nodes, devices)
    if fit:
        cluster = _fitted(say, cluster, cache)
    say.print(_shown(cluster))
    if out is not None:
        cluster.save(out)
        say_written(say, out)
    if as_json:
        print_json(_facts(cluster))


def _fitted(say: Console, cluster: Cluster, cache: Path | None) -> Cluster:
    """The cluster with links of the timing cache, and in words what they were fitted to."""
    from stratagem.calibration.measured_links import links_from_cache

    found = links_from_cache(cluster, cache=cache)
    print_tables(say, found.table)
    return found.cluster


def _list(presets: list[Cluster]) -> Any:
    rows = []
    for cluster in presets:
        kinds = ", ".join(sorted(set(cluster.node_devices)))
        links = [
            f"{link.bandwidth_gb_s:g} GB/s, {link.latency_us:g} µs"
            for link in (cluster.intra_node, cluster.inter_node)
        ]
        size = f"{cluster.num_nodes} × {cluster.devices_per_node}"
        memory = f"{cluster.device_type(0).memory_gib:g} GiB"
        rows.append([cluster.name, size, kinds, memory, *links, _calibrated(cluster)])
    headings = (
        *("preset", "nodes × devices", "device", "memory", "in a node", "between nodes"),
        "steps",
    )
    return simple_table(headings, rows)


def _shown(cluster: Cluster) -> Any:
    device, calibration = cluster.device_type(0), cluster.calibration
    peaks = ", ".join(f"{name} {peak:g}" for name, peak in device.matmul_tflops.items())
    rows = [
        ["size", f"{cluster.num_nodes} nodes × {cluster.devices_per_node} devices"],
        ["devices", ", ".join(sorted(set(cluster.node_devices)))],
        [
            "memory of a device",
            f"{device.memory_gib:g} GiB, {device.memory_bandwidth_gb_s:g} GB/s",
        ],
        ["peak of a device", f"{peaks} TFLOP/s"],
        ["in a node", _link(cluster.intra_node)],
        ["between nodes", _link(cluster.inter_node)],
        ["products in training", f"{calibration.product_scale:g} × as long as alone"],
        ["other kernels", f"{calibration.memory_scale:g} × as long as alone"],
        ["taken of the memory", f"{calibration.reserved_gib:g} GiB"],
        ["steps", _calibrated(cluster)],
        ["price", f"{cluster.price_per_hour:g} an hour" if cluster.price_per_hour else "not told"],
    ]
    return simple_table((cluster.name, ""), rows)


def _calibrated(cluster: Cluster) -> str:
    """Whether steps on the cluster were measured."""
    spread = cluster.calibration.spread
    return f"{NOT_CALIBRATED}, ± {spread:.0%}" if spread else "calibrated"


def _link(link: Link) -> str:
    cards = f", {link.num_cards} cards" if link.num_cards > 1 else ""
    groups = [each.size for each in link.by_group_size]
    fitted = f"; figures of groups of {', '.join(map(str, groups))}" if groups else ""
    return f"{link.name}: {link.bandwidth_gb_s:g} GB/s, {link.latency_us:g} µs{cards}{fitted}"


def _facts(cluster: Cluster) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(cluster)
    return {**facts, "num_devices": cluster.num_devices}
