"""Fit the calibration constants of cluster presets to measured training steps.

    python -m benchmarks.fit_clusters --data DIR [--write] [--only PRESET]

Each preset has at most five constants of its own (see `CONSTANTS`); everything else comes from
timings of single kernels. They minimise a robust sum of squared logarithmic errors of the step
times that the runs on that cluster took, every run simulated as a plan; one whose setup is not
told counts less. Prints one JSON object a preset: the constants, and the mean error before and
after. `--write` puts them into the preset.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import stratagem.simulator.hardware
from benchmarks.fidelity.predict import Predictor
from benchmarks.fidelity.runs import Run
from benchmarks.fidelity.sets import read_runs, set_of
from stratagem.simulator.base.files import encode
from stratagem.simulator.hardware.cluster import Cluster

MOST_RUNS = 40
SCALE = 0.05
"""Relative errors beyond this count less than their square: outliers do not rule the fit."""


UNTOLD = 0.3
"""What a run counts whose setup is not told, but only from what its authors chose; others 1."""


DATA_SHEET_GB_S = {
    "a100-1600g": 200.0,
    "a100-400g": 50.0,
    "a100-800g": 100.0,
    "dgx-a100-superpod": 200.0,
    "h100-3200g": 400.0,
    "h100-3200g-nanotron": 400.0,
    "p3.16xlarge": 3.125,
}
"""What all cards of a node send together."""


@dataclass(frozen=True)
class Constant:
    """One calibration constant: how to read and set it, and its bounds."""

    name: str
    get: Callable[[Cluster], float]
    put: Callable[[Cluster, float], Cluster]
    low: float
    high: float


def _calibrated(name: str, low: float, high: float) -> Constant:
    return Constant(
        f"calibration.{name}",
        lambda c: float(getattr(c.calibration, name)),
        lambda c, v: replace(c, calibration=replace(c.calibration, **{name: v})),
        low,
        high,
    )


def _put_bandwidth(cluster: Cluster, value: float) -> Cluster:
    return replace(cluster, inter_node=replace(cluster.inter_node, bandwidth_gb_s=value))


def _intra_bandwidth(cluster: Cluster) -> float:
    """That of the largest groups that are listed; the others change in proportion."""
    link = cluster.intra_node
    return link.by_group_size[-1].bandwidth_gb_s if link.by_group_size else link.bandwidth_gb_s


def _put_intra_bandwidth(cluster: Cluster, value: float) -> Cluster:
    factor = value / _intra_bandwidth(cluster)
    link = cluster.intra_node
    groups = tuple(
        replace(g, bandwidth_gb_s=float(f"{g.bandwidth_gb_s * factor:.4g}"))
        for g in link.by_group_size
    )
    whole = float(f"{link.bandwidth_gb_s * factor:.4g}")
    return replace(cluster, intra_node=replace(link, bandwidth_gb_s=whole, by_group_size=groups))


CONSTANTS = (
    _calibrated("product_scale", 0.7, 1.6),
    _calibrated("memory_scale", 0.5, 3.0),
    _calibrated("launch_us", 2.0, 200.0),
    _calibrated("stall_us", 10.0, 1000.0),
    Constant("intra_node.bandwidth_gb_s", _intra_bandwidth, _put_intra_bandwidth, 1.0, 300.0),
    Constant(
        "inter_node.bandwidth_gb_s",
        lambda c: c.inter_node.bandwidth_gb_s,
        _put_bandwidth,
        1.0,
        500.0,
    ),
)


AS_KERNELS_SHOW = {
    "h100-3200g": ("calibration.memory_scale", "intra_node.bandwidth_gb_s"),
    "h100-3200g-nanotron": ("calibration.memory_scale", "intra_node.bandwidth_gb_s"),
}
"""Constants that a preset keeps as kernels timed alone have them: five of its own suffice."""


def main() -> None:
    """Fit every preset that the measured runs are on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of measured sets")
    parser.add_argument("--write", action="store_true", help="put the constants into the presets")
    parser.add_argument("--only", default="", help="the preset to fit")
    arguments = parser.parse_args()
    for preset, runs in sorted(_runs_by_preset(arguments.data).items()):
        if not arguments.only or arguments.only == preset:
            fitted, line = fit(preset, [run for run in runs if _can_be_planned(run)])
            print(json.dumps(line), flush=True)
            if arguments.write:
                _write(fitted)


def fit(preset: str, runs: Sequence[Run]) -> tuple[Cluster, dict[str, object]]:
    """The preset with its constants fitted to `runs`, and what to print."""
    start = Cluster.preset(preset)
    step = max(1, math.ceil(len(runs) / MOST_RUNS))
    told = np.array([1.0 if len(run.setups) == 1 else UNTOLD for run in runs[::step]])
    runs = [_as_tuned(run) for run in runs]
    some = runs[::step]
    kept = AS_KERNELS_SHOW.get(preset, ())
    used = [c for c in CONSTANTS if c.get(start) > 0 and c.name not in kept]

    def errors(
        cluster: Cluster, chosen: Sequence[Run]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        predictor = Predictor()
        found = []
        for run in chosen:
            sized = _with_constants(run.cluster, cluster, used)
            outcome = predictor.outcome(replace(run, cluster=sized))
            assert run.seconds is not None
            found.append(math.log(outcome.seconds / run.seconds))
        return np.array(found)

    def at(values: Sequence[float]) -> Cluster:
        cluster = start
        for constant, value in zip(used, values, strict=True):
            cluster = constant.put(cluster, float(value))
        return cluster

    first = [min(constant.get(start), _highest(constant, preset)) for constant in used]
    solution = least_squares(
        lambda values: np.sqrt(told) * errors(at(values), some),
        first,
        bounds=([c.low for c in used], [_highest(c, preset) for c in used]),
        x_scale=[max(value, 0.1) for value in first],
        diff_step=0.02,
        loss="soft_l1",
        f_scale=SCALE,
        max_nfev=7,
    )
    fitted = at([float(f"{value:.3g}") for value in solution.x])
    line = {
        "preset": preset,
        "runs": len(runs),
        "fitted_on": len(some),
        **{constant.name: constant.get(fitted) for constant in used},
        "mape_before": _mape(errors(start, runs)),
        "mape_after": _mape(errors(fitted, runs)),
    }
    return fitted, line


def _highest(constant: Constant, preset: str) -> float:
    """No fit makes a network faster than its cards."""
    is_network = constant.name == "inter_node.bandwidth_gb_s"
    return DATA_SHEET_GB_S.get(preset, constant.high) if is_network else constant.high


def _as_tuned(run: Run) -> Run:
    """The run with the setup that is best by the constants so far, where it may have had many."""
    if len(run.setups) == 1:
        return run
    return replace(run, setups=(Predictor().outcome(run).setup,))


def _mape(logarithms: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return round(100 * float(np.mean(np.abs(np.exp(logarithms) - 1))), 2)


def _with_constants(cluster: Cluster, source: Cluster, used: Sequence[Constant]) -> Cluster:
    for constant in used:
        cluster = constant.put(cluster, constant.get(source))
    return cluster


def _runs_by_preset(folder: Path) -> dict[str, list[Run]]:
    """The timed runs of all files, by the name of their cluster."""
    found: dict[str, list[Run]] = {}
    for path in sorted(folder.rglob("*.csv")):
        measured = set_of(path)
        for run in read_runs(path, measured).runs if measured else ():
            if run.seconds is not None:
                found.setdefault(run.cluster.name, []).append(run)
    return found


def _can_be_planned(run: Run) -> bool:
    """Whether some setup is a plan of the run's model on its cluster."""
    for setup in run.setups:
        try:
            setup.plan(run.model.graph(), run.cluster)
        except ValueError:
            continue
        return True
    return False


def _write(cluster: Cluster) -> None:
    """Put what was fitted into the preset's file; its devices stay names."""
    path = Path(stratagem.simulator.hardware.__file__).parent / "presets" / f"{cluster.name}.json"
    preset = json.loads(path.read_text("utf-8"))
    fitted = json.loads(encode(cluster))
    preset |= {key: fitted[key] for key in ("intra_node", "inter_node", "calibration")}
    path.write_text(json.dumps(preset, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
