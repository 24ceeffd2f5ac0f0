"""Fit the calibration constants of cluster presets to measured training steps.

    python -m benchmarks.fit_clusters --data DIR [--write] [--only PRESET]

Each preset has at most five constants of its own (see `CONSTANTS`); everything else comes from
timings of single kernels. They minimise a robust sum of squared logarithmic errors of the step
times that the runs on that cluster took, every run simulated as a plan; one whose setup is not
told counts less, as the steps of those that it may have had differ (see `weight_of`). Steps are
Gauss-Newton's, with derivatives of a run taken one after the other, and end where the next one
would gain less than a hundredth. Prints one JSON object a preset: the constants, and the mean
error before and after. `--write` puts them into the preset where that became less; else what it
has predicts as well.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

import stratagem.simulator.hardware
from benchmarks.fidelity.predict import Predictor
from benchmarks.fidelity.runs import Run
from benchmarks.fidelity.sets import read_runs, set_of
from stratagem.searcher.space.situation import rank
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.files import encode
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.plan.plan import Plan

SCALE = 0.05
"""Relative errors beyond this count less than their square: outliers do not rule the fit."""


DIFFERENCE = 0.02
"""By what share constants differ where derivatives are taken."""


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


NVLINK_GB_S = {"NVLink 2": 150.0, "NVLink 3": 300.0, "NVLink 4": 450.0}
"""What a GPU sends to the others of its node by its data sheet."""


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
            if arguments.write and line["mape_after"] < line["mape_before"]:
                _write(fitted)


def fit(preset: str, runs: Sequence[Run]) -> tuple[Cluster, dict[str, Any]]:
    """The preset with its constants fitted to `runs`, and what to print."""
    start = Cluster.preset(preset)
    kept = AS_KERNELS_SHOW.get(preset, ())
    used = [c for c in CONSTANTS if c.get(start) > 0 and c.name not in kept]
    planned = [_planned(run) for run in runs]
    weights = np.sqrt([each.weight for each in planned])

    def at(values: Iterable[float]) -> Cluster:
        cluster = start
        for constant, value in zip(used, values, strict=True):
            cluster = constant.put(cluster, float(value))
        return cluster

    def errors(values: Floats) -> Floats:
        found: Floats = weights * _errors([at(values)], planned, used)[0]
        return found

    def slopes(values: Floats) -> Floats:
        steps = DIFFERENCE * np.maximum(values, 0.1)
        above = values + steps > most
        steps[above] *= -1
        around = [at(values), *(at(each) for each in values + np.diag(steps))]
        there, *moved = _errors(around, planned, used)
        found: Floats = np.stack([each - there for each in moved], axis=1) / steps
        return weights[:, None] * found

    most = np.array([_highest(c, start) for c in used])
    first = np.minimum([c.get(start) for c in used], most)
    solution = least_squares(
        errors,
        first,
        jac=slopes,
        bounds=([c.low for c in used], most),
        x_scale=np.maximum(first, 0.1),
        loss="soft_l1",
        f_scale=SCALE,
        ftol=0.01,
        xtol=0.003,
        max_nfev=7,
    )
    fitted = at([float(f"{value:.3g}") for value in solution.x])
    before, after = _errors([start, fitted], planned, used)
    line = {
        "preset": preset,
        "runs": len(runs),
        **{constant.name: constant.get(fitted) for constant in used},
        "mape_before": _mape(before),
        "mape_after": _mape(after),
    }
    return fitted, line


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run with its plan, and what it counts."""

    run: Run
    plan: Plan
    weight: float


def weight_of(steps: Sequence[float]) -> float:
    """What a run counts that may have had several setups, whose predicted steps take so long.

    Its error has two parts that know nothing of one another: that of a run whose setup is told,
    `SCALE`, and that of taking one setup for another, the standard deviation of the logarithms. A
    run counts with the inverse of its variance, one that is told 1.

    Example:
        >>> weight_of([2.0]), weight_of([2.0, 2.0]), round(weight_of([1.0, 1.1]), 2)
        (1.0, 1.0, 0.52)
    """
    spread = float(np.std(np.log(steps)))
    return SCALE**2 / (SCALE**2 + spread**2)


def _planned(run: Run) -> PlannedRun:
    """The run with the plan that is best by the constants so far, where it may have had many."""
    found = Predictor().simulations(run)
    fits = [each for each in found if each[1].fits] or found
    _, best = min(fits, key=lambda pair: rank(pair[1]))
    return PlannedRun(run, best.plan, weight_of([each.step_time for _, each in fits]))


def _errors(
    clusters: Sequence[Cluster], runs: Sequence[PlannedRun], used: Sequence[Constant]
) -> Floats:
    """[clusters, runs], logarithms of predicted over measured steps.

    Run by run: what a run's schedule and graph are is remembered for a few of them only.
    """
    predictors = [Predictor() for _ in clusters]
    found = np.zeros((len(clusters), len(runs)))
    for k, each in enumerate(runs):
        assert each.run.seconds is not None
        for c, (cluster, predictor) in enumerate(zip(clusters, predictors, strict=True)):
            sized = replace(each.run, cluster=_with_constants(each.run.cluster, cluster, used))
            seconds = predictor.simulate(sized, each.plan).step_time
            found[c, k] = math.log(seconds / each.run.seconds)
    return found


def _highest(constant: Constant, preset: Cluster) -> float:
    """No fit makes a network faster than its cards, or a node's links faster than they are."""
    if constant.name == "inter_node.bandwidth_gb_s":
        return DATA_SHEET_GB_S.get(preset.name, constant.high)
    if constant.name == "intra_node.bandwidth_gb_s":
        link = preset.intra_node
        fastest = max([link.bandwidth_gb_s, *(g.bandwidth_gb_s for g in link.by_group_size)])
        allowed = NVLINK_GB_S.get(link.name, constant.high)
        return min(constant.high, constant.get(preset) * allowed / fastest)
    return constant.high


def _mape(logarithms: Floats) -> float:
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
