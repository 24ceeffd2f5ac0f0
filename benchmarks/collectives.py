"""How far are the prices of collectives from measured ones?

    python -m benchmarks.collectives --data DIR

Prints one JSON object a line for every source, machine, kind and group in the measurements under
`DIR/kernels`: the mean and the median relative error of what the preset of that machine says (null
where there is none), and of a latency and a bandwidth fitted to that very group; `bus_gb_s` is the
bandwidth of the largest ones, whatever the algorithm. The last lines are the constants that the
presets carry: per machine and group size the fit to its all-reduces inside a node, and to its
messages between two devices.

What to know of the sources: Vidur's nodes are joined by a cloud network, not by the InfiniBand of
the presets, and its H100 rows between nodes are doubtful (those of the pairwise machine are the
A100's). vTrain's V100s hang on mixed links: a pair has one NVLink, some other pairs two. Aceso's
times of all-gather, reduce-scatter and all-to-all hold a copy of the tensor, and sometimes two.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.kernel_data import kernel_folder, rows_of
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh, MeshAxis, axis_link

PRESETS = {
    "a100_dgx": "dgx-a100",
    "h100_dgx": "dgx-h100",
    "a100": "dgx-a100",
    "v100": "p3.16xlarge",
    "aceso v100": "p3.16xlarge",
}
FITTED_FROM = {
    "dgx-a100": ("a100_dgx", "a100"),
    "dgx-h100": ("h100_dgx",),
    "p3.16xlarge": ("aceso v100",),
}
FITTED_SIZES = (2, 4, 8)
OUT_OF_MEMORY_MS = 1e8
OUTLIER = 0.05
PIECE_S = 1e-6
PIECEWISE = {Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER}
MIB = 2**20


@dataclass(frozen=True, order=True)
class Group:
    """A kind of collective in one group of one machine."""

    source: str
    machine: str
    kind: str
    size: int
    members: int
    """Members on one node."""


@dataclass(frozen=True)
class Measured:
    """One collective: bytes as in `collective_time`, and its seconds."""

    nbytes: float
    seconds: float


def read_all(folder: Path) -> dict[Group, list[Measured]]:
    """All measurements, by group."""
    found: dict[Group, set[Measured]] = defaultdict(set)
    for reader in (_vidur, _aceso, _vtrain):
        for group, measured in reader(folder):
            found[group].add(measured)
    return {
        group: sorted(found[group], key=lambda m: (m.nbytes, m.seconds)) for group in sorted(found)
    }


def _vidur(folder: Path) -> Iterator[tuple[Group, Measured]]:
    kinds = {"all_reduce": Collective.ALL_REDUCE, "send_recv": Collective.SEND}
    for row in rows_of(folder / "vidur_collectives.csv.gz"):
        size, members = int(row["num_workers"]), int(row["devices_per_node"])
        group = Group("vidur", row["cluster"], kinds[row["op"]].value, size, members)
        yield group, Measured(int(row["size"]), float(row["time_ms"]) * 1e-3)


def _aceso(folder: Path) -> Iterator[tuple[Group, Measured]]:
    """Sizes are MiB of what a member holds before."""
    for row in rows_of(folder / "aceso_collectives_v100.csv.gz"):
        kind, size = Collective(row["coll"].replace("_", "-")), int(row["gpus"])
        nbytes, ms = float(row["size_MB"]) * MIB, float(row["time_ms"])
        if nbytes and ms < OUT_OF_MEMORY_MS:
            whole = nbytes * size if kind is Collective.ALL_GATHER else nbytes
            group = Group("aceso", "aceso v100", kind.value, size, size)
            yield group, Measured(whole, ms * 1e-3)


def _vtrain(folder: Path) -> Iterator[tuple[Group, Measured]]:
    for row in rows_of(folder / "allreduce_lut_vtrain.csv.gz"):
        size = int(row["n_gpus"])
        group = Group("vtrain", row["gpu"], Collective.ALL_REDUCE.value, size, size)
        yield group, Measured(int(row["bytes"]), float(row["time_ns_outofplace"]) * 1e-9)


def preset_link(group: Group) -> AxisLink | None:
    """What the preset of the group's machine says of it."""
    name = PRESETS.get(group.machine)
    if name is None:
        return None
    nodes = group.size // group.members
    cluster = Cluster.preset(name, num_nodes=max(nodes, 1))
    if group.kind == Collective.SEND.value:
        crosses = group.members == 1
        link = cluster.inter_node if crosses else cluster.intra_node
        alone = min(link.num_cards, cluster.devices_per_node) if crosses else 1
        return axis_link(replace(link, by_group_size=()), crosses, alone)
    per_node = cluster.devices_per_node
    devices = [n * per_node + i for n in range(nodes) for i in range(group.members)]
    return DeviceMesh((MeshAxis("group", group.size),), tuple(devices)).link(0, cluster)


def errors(group: Group, measured: Sequence[Measured], link: AxisLink) -> tuple[float, float]:
    """Mean and median relative error in percent."""
    kind = Collective(group.kind)
    said = np.array([collective_time(kind, m.nbytes, group.size, link) for m in measured])
    seconds = np.array([m.seconds for m in measured])
    relative = 100 * np.abs(said / seconds - 1)
    return round(float(relative.mean()), 1), round(float(np.median(relative)), 1)


def fit(group: Group, measured: Sequence[Measured]) -> AxisLink:
    """The latency, bandwidth and cost of a piece that suit `measured` best.

    Least squares of logarithms, linear beyond `OUTLIER`.

    What the members of a node do among themselves is taken from the preset.
    """
    kind, given = Collective(group.kind), preset_link(group)
    plain = AxisLink(1e-5, 1e-10, crosses_nodes=False, shares_compute=False)
    start = plain if given is None else given
    seconds = np.array([m.seconds for m in measured])

    def link_of(logarithms: Sequence[float]) -> AxisLink:
        latency, per_byte, *piece = (float(v) for v in np.exp(logarithms))
        made = replace(start, latency=latency, seconds_per_byte=per_byte)
        return replace(made, seconds_per_piece=piece[0]) if piece else made

    def off(logarithms: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        link = link_of(logarithms)
        said = [collective_time(kind, m.nbytes, group.size, link) for m in measured]
        return np.log(np.array(said) / seconds)

    first = [start.latency, start.seconds_per_byte]
    if kind in PIECEWISE:
        first.append(PIECE_S)
    low = np.log([1e-8, 1e-14, 1e-12][: len(first)])
    high = np.log([1e-2, 1e-6, 5e-6][: len(first)])
    found = least_squares(
        off, np.log(first), bounds=(low, high), loss="soft_l1", f_scale=OUTLIER, diff_step=1e-4
    )
    return link_of(found.x)


def figures(link: AxisLink) -> dict[str, float]:
    """A link in the units of cluster files."""
    return {
        "bandwidth_gb_s": float(f"{1e-9 / link.seconds_per_byte:.3g}"),
        "latency_us": float(f"{link.latency * 1e6:.3g}"),
        "piece_us": round(link.seconds_per_piece * 1e6, 3),
    }


def compare(group: Group, measured: Sequence[Measured]) -> dict[str, object]:
    """One line: what preset and fit say of a group."""
    given, fitted = preset_link(group), fit(group, measured)
    mape, median = (None, None) if given is None else errors(group, measured, given)
    fit_mape, fit_median = errors(group, measured, fitted)
    return asdict(group) | {
        "samples": len(measured),
        "preset": PRESETS.get(group.machine),
        "preset_mape": mape,
        "preset_median": median,
        "fit_mape": fit_mape,
        "fit_median": fit_median,
        **figures(fitted),
        "bus_gb_s": bus_bandwidth(group, measured),
    }


def bus_bandwidth(group: Group, measured: Sequence[Measured]) -> float:
    """What a ring link must have carried in the largest tenth of the collectives: the median."""
    kind, link = Collective(group.kind), AxisLink(0.0, 1.0, False, False)
    largest = measured[-max(1, len(measured) // 10) :]
    rates = [collective_time(kind, m.nbytes, group.size, link) / m.seconds for m in largest]
    return float(f"{np.median(rates) * 1e-9:.3g}")


def constants(
    preset: str, found: Mapping[Group, Sequence[Measured]]
) -> Iterator[dict[str, object]]:
    """The figures of a preset: fits over all sources of its machine, one kind and group size."""
    pooled: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    example: dict[tuple[str, int], Group] = {}
    for group, measured in found.items():
        fits = group.kind in (Collective.ALL_REDUCE.value, Collective.SEND.value)
        inside = group.members == group.size and group.size in FITTED_SIZES
        if group.machine in FITTED_FROM[preset] and inside and fits:
            pooled[group.kind, group.size] += measured
            example[group.kind, group.size] = group
    for (kind, size), measured in sorted(pooled.items()):
        link = fit(example[kind, size], measured)
        yield {"preset": preset, "kind": kind, "size": size, **figures(link)}


def main() -> None:
    """Print one line a group, then one a constant."""
    folder = kernel_folder(__doc__)
    found = read_all(folder)
    for group, measured in found.items():
        print(json.dumps(compare(group, measured)), flush=True)
    for preset in FITTED_FROM:
        for line in constants(preset, found):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
