"""The cost model that answers from the timing cache, and corrects what the cache lacks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from stratagem.profiler.cache import TimingCache
from stratagem.profiler.keys import Environment, Measurement, TimingEntry, TimingKey
from stratagem.profiler.update import UPDATE_KIND, update_key
from stratagem.simulator.costs import Cost, CostModel, Direction, Source, local_operator
from stratagem.simulator.device import DeviceType
from stratagem.simulator.graph import Operator
from stratagem.simulator.training import Training

_Group = tuple[Environment, str, str, Direction, str]
"""What entries that correct one another share; the second string is an update's optimizer."""

LEAST_ERROR = 0.02
"""What repeats in one process cannot show: other neighbours, another place in memory."""


class MeasuredCosts:
    """Costs from a timing cache, over a fallback for what was not measured.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     costs = MeasuredCosts(cache, {"cpu": describe_environment()}, default_costs())

    An operator in the cache costs its median. Any other costs what the fallback says, times the
    geometric mean of measured / fallback over the cached operators of the same kind, direction and
    precision, where there are any; its relative error is the scatter of those ratios. An update
    costs a + b·n, fitted to the cached updates of the same optimizer.

    The cache is read once, here: make a new model after profiling more.

    Args:
        cache: may be closed afterwards.
        environments: per device type of the cluster, by name, where its times were taken. Device
            types that are not in it are the fallback's.
        fallback: prices what was not measured.
    """

    def __init__(
        self, cache: TimingCache, environments: Mapping[str, Environment], fallback: CostModel
    ) -> None:
        self._environments = dict(environments)
        self._fallback = fallback
        entries = [e for e in cache.entries() if not e.measurement.error]
        self._measured = {e.key.digest: e.measurement for e in entries}
        self._groups: dict[_Group, list[TimingEntry]] = {}
        for entry in entries:
            self._groups.setdefault(_group(entry.key), []).append(entry)
        self._corrections: dict[tuple[str, _Group], _Correction | None] = {}

    def operator_cost(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Cost:
        """See `CostModel`."""
        environment = self._environments.get(device.name)
        if environment is None:
            return self._fallback.operator_cost(operator, sizes, direction, training, device)
        key = TimingKey(
            environment, local_operator(operator, sizes), training.precision, direction
        )
        measured = self._measured.get(key.digest)
        if measured is not None:
            return _measured_cost(measured)
        plain = self._fallback.operator_cost(operator, sizes, direction, training, device)
        correction = self._correction(_group(key), training, device)
        return plain if correction is None else correction.apply(plain)

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """See `CostModel`."""
        environment = self._environments.get(device.name)
        plain = self._fallback.update_cost(num_parameters, training, device)
        if environment is None:
            return plain
        key = update_key(num_parameters, training, environment)
        measured = self._measured.get(key.digest)
        if measured is not None:
            return _measured_cost(measured)
        entries = self._groups.get(_group(key), [])
        if len(entries) > 1:
            return _fit_update(entries, num_parameters)
        correction = self._correction(_group(key), training, device)
        return plain if correction is None else correction.apply(plain)

    def _correction(
        self, group: _Group, training: Training, device: DeviceType
    ) -> _Correction | None:
        """How the measured operators of a group differ from the fallback, if there are any."""
        key = (device.name, group)
        if key not in self._corrections:
            ratios = [
                entry.measurement.median_s / self._plain_seconds(entry, training, device)
                for entry in self._groups.get(group, [])
            ]
            self._corrections[key] = _fit_correction(ratios) if ratios else None
        return self._corrections[key]

    def _plain_seconds(self, entry: TimingEntry, training: Training, device: DeviceType) -> float:
        operator, direction = entry.key.operator, entry.key.direction
        if _is_update(operator):
            return self._fallback.update_cost(operator.dims[0].size, training, device).seconds
        return self._fallback.operator_cost(
            operator, operator.sizes, direction, training, device
        ).seconds


@dataclass(frozen=True)
class _Correction:
    """The mean of measured / fallback and the scatter of its logarithm, if it can be known."""

    ratio: float
    scatter: float | None

    def apply(self, plain: Cost) -> Cost:
        error = plain.relative_error if self.scatter is None else self.scatter
        return Cost(plain.seconds * self.ratio, Source.FITTED, max(error, LEAST_ERROR))


def _fit_correction(ratios: Sequence[float]) -> _Correction:
    logarithms = [math.log(ratio) for ratio in ratios]
    scatter = statistics.stdev(logarithms) if len(logarithms) > 1 else None
    return _Correction(math.exp(statistics.fmean(logarithms)), scatter)


def _fit_update(entries: Sequence[TimingEntry], num_parameters: int) -> Cost:
    """A line through the times of updates, by least squares of relative errors."""
    sizes = np.array([entry.key.operator.dims[0].size for entry in entries], dtype=np.float64)
    seconds = np.array([entry.measurement.median_s for entry in entries])
    rows = np.stack([1.0 / seconds, sizes / seconds], axis=1)
    scale = np.linalg.norm(rows, axis=0)
    solution, _ = nnls(rows / scale, np.ones(len(entries)))
    constant, slope = solution / scale
    errors = (constant + slope * sizes) / seconds - 1.0
    error = max(LEAST_ERROR, float(np.abs(errors).max()))
    return Cost(float(constant + slope * num_parameters), Source.FITTED, error)


def _measured_cost(measurement: Measurement) -> Cost:
    return Cost(measurement.median_s, Source.MEASURED, max(measurement.spread, LEAST_ERROR))


def _group(key: TimingKey) -> _Group:
    optimizer = str(key.operator.attributes["optimizer"]) if _is_update(key.operator) else ""
    return key.environment, key.operator.kind, optimizer, key.direction, key.precision


def _is_update(operator: Operator) -> bool:
    return operator.kind == UPDATE_KIND
