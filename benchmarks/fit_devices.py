"""Fits the constants of the bundled devices to published timings and writes them.

    python -m benchmarks.fit_devices --data DIR

Rewrites `simulator/hardware/devices/*.json` from the timings under `DIR/kernels` (see
`benchmarks.kernel_data`) and the data-sheet figures in those files. Deterministic: equal data
gives equal files. Every residual is the logarithm of said over measured, under a loss that is
linear beyond `OUTLIER`, so that a few rows which ran otherwise do not bend the rest. The error
that a file states is the mean absolute error on shapes held out by family.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import least_squares

from benchmarks.kernel_data import (
    Measured,
    MeasuredTraffic,
    Products,
    Traffic,
    aceso_products,
    aceso_traffic,
    data_bytes,
    kernel_folder,
    vidur_products,
    vidur_traffic,
)
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.files import encode, write_text
from stratagem.simulator.hardware.device_type import (
    DEVICE_FOLDER,
    AttentionConstants,
    DeviceType,
    MemoryConstants,
    ProductConstants,
)
from stratagem.simulator.kernel_times._matrix_product_time import all_product_seconds
from stratagem.simulator.kernel_times.fitted_kernels import memory_seconds
from stratagem.simulator.operators.kinds.traffic import Moved

Constants = TypeVar("Constants", ProductConstants, MemoryConstants, AttentionConstants)

DEVICE_FILES = Path(__file__).parents[1] / "simulator/hardware" / DEVICE_FOLDER

OUTLIER = 0.05
MOST_ROWS = 6000
FOLDS = 5
ITEMSIZE = {"float16": 2, "float32": 4}

BOUNDS = {
    "efficiency": (0.85, 0.3, 1.1),
    "reuse": (10.0, 0.1, 60.0),
    "prologue": (60.0, 1.0, 1000.0),
    "quantisation": (0.3, 0.01, 1.0),
    "memory_efficiency": (0.8, 0.3, 1.0),
    "sharpness": (3.0, 1.2, 20.0),
    "split_traffic": (1.0, 0.05, 10.0),
    "split_us": (2.0, 0.01, 20.0),
    "launch_us": (4.0, 0.5, 6.0),
}
"""Start and limits of each constant."""

FACTORS = ("batched", "backward", "winograd", "winograd_backward")
"""Constants that are fitted where there are rows that they decide."""


class Rows:
    """Measured products as arrays: each is one or two products whose times add up."""

    def __init__(self, measured: Measured, device: DeviceType) -> None:
        self.keys = list(measured)
        self.seconds = np.array([measured[key] for key in self.keys])
        self.device = device
        itemsize = ITEMSIZE[self.keys[0].precision]
        shapes, owner = [], []
        for i, key in enumerate(self.keys):
            m, n, k = key.rows, key.columns, key.depth
            moved = data_bytes(key, itemsize)
            for part in ((m, k, n), (k, n, m)) if key.backward else ((m, n, k),):
                shapes.append((*part, key.batch, moved))
                owner.append(i)
        self.shapes = np.array(shapes, dtype=np.float64)
        self.owner = np.array(owner)
        self.peak = device.peak_flops(self.keys[0].precision)
        self.flags = {
            "batched": np.array([key.batch > 1 for key in self.keys]),
            "backward": np.array([key.backward for key in self.keys]),
            "winograd": np.array([key.winograd and not key.backward for key in self.keys]),
            "winograd_backward": np.array([key.winograd and key.backward for key in self.keys]),
        }

    def factors(self) -> list[str]:
        """The constants in `FACTORS` that some but not all rows depend on."""
        return [name for name in FACTORS if 0 < self.flags[name].sum() < len(self.keys)]

    def predict(self, constants: ProductConstants) -> Floats:
        """Seconds of every row."""
        rate = np.ones(len(self.keys))
        for name in FACTORS:
            rate[self.flags[name]] *= getattr(constants, name)
        vector = constants.vector
        launch, vector = vector[-1], np.append(vector[:-1], 0.0)
        seconds = launch + all_product_seconds(
            self.shapes,
            self.peak * rate[self.owner],
            float(self.device.num_units),
            self.device.memory_bandwidth_gb_s * 1e9,
            vector,
        )
        found: Floats = np.bincount(self.owner, weights=seconds).astype(np.float64)
        return found


def fit_products(measured: Measured, device: DeviceType) -> ProductConstants:
    """The constants that suit `measured` best."""
    keys = list(measured)
    step = max(1, len(keys) // MOST_ROWS)
    rows = Rows({key: measured[key] for key in keys[::step]}, device)
    factors = rows.factors()
    names = [*BOUNDS, *factors]
    start = [BOUNDS[n][0] for n in BOUNDS] + [1.0] * len(factors)
    low = [BOUNDS[n][1] for n in BOUNDS] + [0.3] * len(factors)
    high = [BOUNDS[n][2] for n in BOUNDS] + [5.0] * len(factors)

    def build(logarithms: Sequence[float]) -> ProductConstants:
        values: dict[str, Any] = dict(
            zip(names, (float(v) for v in np.exp(logarithms)), strict=True)
        )
        return ProductConstants(relative_error=0.0, **values)

    def off(logarithms: Sequence[float]) -> Floats:
        return np.log(rows.predict(build(logarithms)) / rows.seconds)

    solutions = [
        least_squares(
            off,
            np.clip(np.log(np.array(start) * factor), np.log(low) + 1e-6, np.log(high) - 1e-6),
            bounds=(np.log(low), np.log(high)),
            loss="soft_l1",
            f_scale=OUTLIER,
            diff_step=1e-3,
            max_nfev=60,
        )
        for factor in (1.0, 0.8, 1.25)
    ]
    return _rounded(build(min(solutions, key=lambda found: found.cost).x))


def _rounded(constants: ProductConstants) -> ProductConstants:
    values: dict[str, Any] = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in asdict(constants).items()
    }
    return ProductConstants(**values)


def mape(said: Floats, seconds: Floats) -> float:
    """Mean absolute relative error."""
    return float(np.abs(said / seconds - 1).mean())


def held_out_predictions(measured: Measured, device: DeviceType) -> Floats:
    """What fits without a row's family say of it: families in `FOLDS` groups by name order."""
    families = sorted({key.family for key in measured})
    fold_of = {family: i % FOLDS for i, family in enumerate(families)}
    said: dict[Products, float] = {}
    for fold in range(min(FOLDS, len(families))):
        rest = {k: s for k, s in measured.items() if fold_of[k.family] != fold}
        left = {k: s for k, s in measured.items() if fold_of[k.family] == fold}
        constants = fit_products(rest, device)
        said |= dict(zip(left, Rows(left, device).predict(constants), strict=True))
    return np.array([said[key] for key in measured])


def fit_traffic(measured: MeasuredTraffic, device: DeviceType, l2_mib: float) -> MemoryConstants:
    """The constants of operators that move bytes."""
    kinds = sorted({key.kind for key in measured})
    seconds = np.array(list(measured.values()))
    weights = np.array([1.0 / sum(k.kind == key.kind for k in measured) for key in measured])
    weights = np.sqrt(weights / weights.mean())

    def build(logarithms: Sequence[float]) -> MemoryConstants:
        launch, gain, *shares = (float(v) for v in np.exp(logarithms))
        return MemoryConstants(dict(zip(kinds, shares, strict=True)), launch, l2_mib, gain, 0.0)

    def off(logarithms: Sequence[float]) -> Floats:
        said = traffic_seconds(measured, device, build(logarithms))
        return np.asarray(weights * np.log(said / seconds))

    low, high = np.log([1.0, 1.0] + [0.05] * len(kinds)), np.log([4.0, 4.0] + [0.95] * len(kinds))
    start = np.log([2.5, 1.2] + [0.6] * len(kinds))
    found = least_squares(off, start, bounds=(low, high), loss="soft_l1", f_scale=2 * OUTLIER)
    made = build(found.x)
    return replace(
        made,
        shares={kind: _round(share) for kind, share in made.shares.items()},
        launch_us=_round(made.launch_us),
        l2_gain=_round(made.l2_gain),
    )


def traffic_seconds(
    measured: Iterable[Traffic], device: DeviceType, constants: MemoryConstants
) -> Floats:
    """What constants say of operators that move bytes."""
    return np.array(
        [
            memory_seconds(
                Moved(key.nbytes, key.kernels), constants.share(key.kind), device, constants
            )
            for key in measured
        ]
    )


def held_out_traffic(measured: MeasuredTraffic, device: DeviceType, l2_mib: float) -> Floats:
    """What fits without a row's model say of it; of a kind seen nowhere else, the whole fit."""
    whole = fit_traffic(measured, device, l2_mib)
    said: dict[Traffic, float] = {}
    for family in sorted({key.family for key in measured}):
        rest = {k: s for k, s in measured.items() if k.family != family}
        left = [key for key in measured if key.family == family]
        constants = fit_traffic(rest, device, l2_mib)
        shares = {**whole.shares, **constants.shares}
        constants = replace(constants, shares=shares)
        said |= dict(zip(left, traffic_seconds(left, device, constants), strict=True))
    return np.array([said[key] for key in measured])


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def scatter(said: Floats, seconds: Floats) -> float:
    """One standard deviation of the relative error, rows beyond 1 in 50 left aside."""
    errors = np.abs(np.log(said / seconds))
    return round(
        float(np.sqrt(np.mean(np.sort(errors)[: max(1, round(0.98 * len(errors)))] ** 2))), 3
    )


# -- what was not measured ----------------------------------------------------------------------

L2_MIB = {
    "V100-16GB": 6.0,
    "A100-80GB": 40.0,
    "H100-80GB": 50.0,
    "A40": 6.0,
}
SIBLINGS = {"V100-32GB": "V100-16GB", "A100-40GB": "A100-80GB", "H200": "H100-80GB"}
"""Devices of the same architecture as a measured one."""

MORE_ERROR = {"sibling": 0.05, "precision": 0.03, "architecture": 0.1}
"""What deriving constants adds to their relative error."""

FLASH = {
    # Dao 2023 (FlashAttention-2), figures 4 to 6: at most 73 % of the peak forward and 63 %
    # backward on A100s; heads of 64 reach 84 % of that.
    "A100-80GB": AttentionConstants(0.7, 0.58, 30.0, 80.0, 0.15),
    # Shah et al. 2024 (FlashAttention-3), figure 5, where it compares with version 2: 370 TFLOP/s
    # forward at 16,384 positions and 309 at 512; backward about 300.
    "H100-80GB": AttentionConstants(0.37, 0.3, 25.0, 100.0, 0.15),
}


def _derived(constants: Constants, source: str, more: str) -> Constants:
    error = round(float(np.hypot(constants.relative_error, MORE_ERROR[more])), 3)
    return replace(constants, relative_error=error, derived_from=constants.derived_from or source)


def complete(devices: dict[str, DeviceType]) -> dict[str, DeviceType]:
    """The measured devices with what they lack from others, and their siblings."""
    volta = devices["V100-16GB"]
    assert volta.memory is not None
    single = volta.products["float32"]
    plain = volta.memory.shares["elementwise"]
    made = {}
    for name, device in devices.items():
        half, memory = device.products["float16"], device.memory
        if name != volta.name:
            # Batched products were timed on V100s only.
            half = replace(half, batched=volta.products["float16"].batched)
        assert memory is not None
        products = {"float16": half, "bfloat16": _derived(half, f"{name} float16", "precision")}
        if name == volta.name:
            # It has no matrix units for bfloat16: such products are widened.
            products["bfloat16"] = _derived(single, f"{name} float32", "architecture")
        other = _derived(single, f"{volta.name} float32", "architecture")
        products["float32"] = device.products.get("float32", other)
        if name != volta.name:
            # The kernels of training were timed on V100s only: as far below plain ones as there.
            own = memory.shares["elementwise"] / plain
            shares = {kind: _round(share * own) for kind, share in volta.memory.shares.items()}
            memory = _derived(memory, f"{volta.name}, all but elementwise", "sibling")
            memory = replace(memory, shares={**shares, **memory.shares})
        made[name] = replace(device, products=products, memory=memory, attention=_flash(name))
    for name, source in SIBLINGS.items():
        made[name] = _sibling(DeviceType.preset(name), made[source])
    return made


def _flash(name: str) -> AttentionConstants:
    known = FLASH.get(name)
    if known is not None:
        return known
    return _derived(FLASH["A100-80GB"], "A100-80GB", "architecture")


def _sibling(device: DeviceType, source: DeviceType) -> DeviceType:
    assert source.memory is not None
    assert source.attention is not None
    return replace(
        device,
        products={
            precision: _derived(constants, f"{source.name} {precision}", "sibling")
            for precision, constants in source.products.items()
        },
        memory=_derived(source.memory, source.name, "sibling"),
        attention=_derived(source.attention, source.name, "sibling"),
    )


def fit_device(name: str, products: Measured, traffic: MeasuredTraffic) -> DeviceType:
    """A measured device with the constants that its own timings give."""
    device = DeviceType.preset(name)
    fitted = {}
    for precision in sorted({key.precision for key in products if key.device == name}):
        rows = {k: s for k, s in products.items() if (k.device, k.precision) == (name, precision)}
        seconds = np.array(list(rows.values()))
        error = scatter(held_out_predictions(rows, device), seconds)
        fitted[precision] = replace(fit_products(rows, device), relative_error=error)
    moved = {k: s for k, s in traffic.items() if k.device == name}
    memory = fit_traffic(moved, device, L2_MIB[name])
    said = held_out_traffic(moved, device, L2_MIB[name])
    memory = replace(memory, relative_error=scatter(said, np.array(list(moved.values()))))
    return replace(device, products=fitted, memory=memory)


def main() -> None:
    """Fit every device and write its file."""
    folder = kernel_folder(__doc__)
    products = vidur_products(folder) | aceso_products(folder)
    traffic = vidur_traffic(folder) | aceso_traffic(folder)
    devices = {name: fit_device(name, products, traffic) for name in L2_MIB}
    for name, device in complete(devices).items():
        write_text(DEVICE_FILES / f"{name}.json", encode(device))
        print(json.dumps({"device": name} | asdict(device)), flush=True)


if __name__ == "__main__":
    main()
