"""How far are the device models from timings of shapes that they were not fitted to?

    python -m benchmarks.kernels --data DIR

Prints one JSON object a line for every set of timings under `DIR/kernels`: `rows` distinct shapes,
`mape` (percent) where the constants were fitted without the row's family, `committed_mape` of the
constants in the bundled files, `median` of the held-out errors, and `roofline_mape` of the larger
of arithmetic and memory time at the data sheet's peaks (of collectives: bytes over the bandwidth
of the link). What is held out:

* matrix products: whole depths K (Vidur's), whole models (Aceso's), in five folds;
* operators that move bytes: whole models;
* collectives: every other half-octave of sizes, so that fits interpolate and extrapolate.

Aceso's rows under 250 µs wait for the host that launches them and are left out, as is what holds
copies or two kinds of kernels (see `benchmarks.kernel_data`, `benchmarks.collectives`). The last
line of the collectives pools all all-reduces inside a node.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.collectives import Group, fit, preset_link, read_all
from benchmarks.collectives import Measured as MeasuredCollective
from benchmarks.fit_devices import (
    ITEMSIZE,
    Rows,
    held_out_predictions,
    held_out_traffic,
    traffic_seconds,
)
from benchmarks.kernel_data import (
    Measured,
    MeasuredTraffic,
    aceso_products,
    aceso_traffic,
    kernel_folder,
    roofline_seconds,
    vidur_products,
    vidur_traffic,
)
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink
from stratagem.simulator.hardware.device_type import DeviceType

Line = dict[str, object]


def mape(said: Floats, seconds: Floats) -> float:
    """Mean absolute relative error in percent."""
    return round(100 * float(np.abs(said / seconds - 1).mean()), 2)


def median(said: Floats, seconds: Floats) -> float:
    """Median absolute relative error in percent."""
    return round(100 * float(np.median(np.abs(said / seconds - 1))), 2)


def product_lines(measured: Measured) -> Iterator[Line]:
    """One line a device, precision, kind and direction; held out within device and precision."""
    groups: dict[tuple[str, str], Measured] = defaultdict(dict)
    for key, seconds in measured.items():
        groups[key.device, key.precision][key] = seconds
    for (name, precision), rows in sorted(groups.items()):
        device = DeviceType.preset(name)
        held_out = held_out_predictions(rows, device)
        committed = Rows(rows, device).predict(device.products[precision])
        yield from _split(rows, device, held_out, committed)


def _split(
    rows: Measured, device: DeviceType, held_out: Floats, committed: Floats
) -> Iterator[Line]:
    seconds = np.array(list(rows.values()))
    roofline = np.array(
        [
            roofline_seconds(
                key,
                device.peak_flops(key.precision),
                device.memory_bandwidth_gb_s * 1e9,
                ITEMSIZE[key.precision],
            )
            for key in rows
        ]
    )
    sets = [
        f"{key.kind}{' backward' if key.backward else ''} {key.precision} {key.device}"
        for key in rows
    ]
    for name in sorted(set(sets)):
        chosen = np.array([each == name for each in sets])
        yield {
            "set": name,
            "rows": int(chosen.sum()),
            "mape": mape(held_out[chosen], seconds[chosen]),
            "median": median(held_out[chosen], seconds[chosen]),
            "committed_mape": mape(committed[chosen], seconds[chosen]),
            "roofline_mape": mape(roofline[chosen], seconds[chosen]),
        }


def traffic_lines(measured: MeasuredTraffic) -> Iterator[Line]:
    """One line a device and family of kernels."""
    for name in sorted({key.device for key in measured}):
        rows = {key: seconds for key, seconds in measured.items() if key.device == name}
        device = DeviceType.preset(name)
        assert device.memory is not None
        held_out = held_out_traffic(rows, device, device.memory.l2_mib)
        committed = traffic_seconds(rows, device, device.memory)
        seconds = np.array(list(rows.values()))
        roofline = np.array([key.nbytes / (device.memory_bandwidth_gb_s * 1e9) for key in rows])
        kinds = np.array([key.kind for key in rows])
        for kind in sorted(set(kinds)):
            chosen = kinds == kind
            yield {
                "set": f"{kind} {name}",
                "rows": int(chosen.sum()),
                "mape": mape(held_out[chosen], seconds[chosen]),
                "median": median(held_out[chosen], seconds[chosen]),
                "committed_mape": mape(committed[chosen], seconds[chosen]),
                "roofline_mape": mape(roofline[chosen], seconds[chosen]),
            }


def is_held_out(measured: MeasuredCollective) -> bool:
    """Every other half-octave of sizes."""
    return math.floor(2 * math.log2(measured.nbytes)) % 2 == 1


def _said(group: Group, rows: Sequence[MeasuredCollective], link: AxisLink) -> Floats:
    kind = Collective(group.kind)
    return np.array([collective_time(kind, m.nbytes, group.size, link) for m in rows])


def collective_lines(found: Mapping[Group, Sequence[MeasuredCollective]]) -> Iterator[Line]:
    """One line a machine, kind and group, then all all-reduces inside nodes together."""
    pooled: list[tuple[Floats, Floats, Floats]] = []
    for group, measured in found.items():
        rows = [m for m in measured if m.nbytes > 0]
        left = [m for m in rows if is_held_out(m)]
        fitted = fit(group, [m for m in rows if not is_held_out(m)])
        seconds = np.array([m.seconds for m in left])
        held_out = _said(group, left, fitted)
        given = preset_link(group)
        wire = AxisLink(0.0, fitted.seconds_per_byte, fitted.crosses_nodes, False)
        roofline = _said(group, left, wire)
        name = f"{group.kind} {group.source} {group.machine}"
        yield {
            "set": f"{name} {group.size} ({group.members} a node)",
            "rows": len(left),
            "mape": mape(held_out, seconds),
            "median": median(held_out, seconds),
            "committed_mape": None if given is None else mape(_said(group, left, given), seconds),
            "roofline_mape": mape(roofline, seconds),
        }
        if group.kind == Collective.ALL_REDUCE.value and group.size == group.members:
            pooled.append((held_out, roofline, seconds))
    held, wire_only, seconds = (np.concatenate(each) for each in zip(*pooled, strict=True))
    yield {
        "set": "all-reduce in a node, all machines",
        "rows": len(seconds),
        "mape": mape(held, seconds),
        "median": median(held, seconds),
        "committed_mape": None,
        "roofline_mape": mape(wire_only, seconds),
    }


def main() -> None:
    """Print one line a set."""
    folder = kernel_folder(__doc__)
    for line in collective_lines(read_all(folder)):
        print(json.dumps(line), flush=True)
    for line in product_lines(vidur_products(folder) | aceso_products(folder)):
        print(json.dumps(line), flush=True)
    for line in traffic_lines(vidur_traffic(folder) | aceso_traffic(folder)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
