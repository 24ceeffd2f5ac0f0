"""The cost model that answers from the timing cache, and corrects what the cache lacks."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import scipy

from stratagem.profiler.cache.csv_and_json import from_json, to_json
from stratagem.profiler.cache.timing_keys import (
    AROUND_OPERATORS,
    UPDATE_KIND,
    Launched,
    Measurement,
    PaceOf,
    TimingEntry,
    TimingKey,
    dispatch_key,
    error_of_median,
    launch_key,
    launched_key,
    pace_key,
    update_key,
)
from stratagem.profiler.costs.correction import Correction, Sample, learn
from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.base.tables import Table, Unit, Value
from stratagem.simulator.hardware.core_pace import OF_OTHERS, OVER_A_RUN, Pace, at_pace
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import (
    Cost,
    CostModel,
    CostSource,
    Direction,
    RooflineCosts,
    elasticity,
    local_operator,
    tensor_bytes,
)
from stratagem.simulator.kernel_times.fitted_kernels import KernelModelCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.experts import LOADS, filled_share
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.provenance import Environment

_Group = tuple[Environment, str, str, Direction, str]
"""What entries that correct one another share: where, kind, variant, direction, precision."""

LEAST_RELATIVES = 2
"""Operators of one chain of functions from which is learned, not from all chains."""
LEAST_ERROR = 0.02
"""What repeats in one process cannot show: other neighbours, another place in memory."""


COSTS_FORM = FileForm(version=1, remedy="profile again", format="stratagem costs")

FALLBACKS: Mapping[str, type[CostModel]] = {
    "fitted": KernelModelCosts,
    "roofline": RooflineCosts,
}
"""Cost models without anything of their own, by their names in files."""


class Timings(Protocol):
    """What has timings, such as a timing cache."""

    def entries(self) -> list[TimingEntry]:
        """All of them."""
        ...


class MeasuredCosts(SavedValue):
    """Costs from a timing cache, over a fallback for what was not measured.

    Example:
        >>> with TimingCache() as cache:  # doctest: +SKIP
        ...     costs = MeasuredCosts(cache, {"cpu": describe_environment()}, default_costs())

    An operator in the cache costs its median. Any other costs what the fallback says, corrected by
    what is learned from the cached operators of the same kind, direction and precision, where
    there are any (see `correction`); its relative error is that of those, left out in turn.
    What the executor spends around an operator comes on top, if the cache has it. An update costs
    a + b·n, fitted to the cached updates of the same optimizer.

    The cache is read once, here: make a new model after profiling more. The file of costs has
    these timings, so that a search elsewhere prices as one here:

        >>> costs.save("costs.json")  # doctest: +SKIP
        >>> costs = sg.costs.MeasuredCosts.load("costs.json")  # doctest: +SKIP
        >>> sg.search(graph, cluster, costs=costs)  # doctest: +SKIP

    Args:
        cache: may be closed afterwards.
        environments: per device type of the cluster, by name, where its times were taken. Device
            types that are not in it are the fallback's.
        fallback: prices what was not measured.
    """

    FILE: ClassVar[str] = "costs file"

    def __init__(
        self, cache: Timings, environments: Mapping[str, Environment], fallback: CostModel
    ) -> None:
        self._environments = dict(environments)
        self._fallback = fallback
        entries = [e for e in cache.entries() if not e.measurement.error]
        self._entries = tuple(entries)
        self._measured = {e.key.digest: e.measurement for e in entries}
        self._groups: dict[_Group, list[TimingEntry]] = {}
        for entry in entries:
            for group in _groups_of(entry.key):
                self._groups.setdefault(group, []).append(entry)
        self._learned: dict[_Group, list[tuple[Training, DeviceType, Correction]]] = {}
        self._paces = {where: self._paces_in(where) for where in self._environments.values()}

    def __repr__(self) -> str:
        where = " and ".join(self._environments) or "no device"
        fallback = type(self._fallback).__name__
        return f"<MeasuredCosts: {len(self._entries):,} timings of {where}, else {fallback}>"

    def _repr_html_(self) -> str:
        counts = Counter((e.key.operator.kind, e.key.direction.value) for e in self._entries)
        columns = {"operators": Unit.TEXT, "direction": Unit.TEXT, "timings": Unit.COUNT}
        rows = tuple((*key, count) for key, count in sorted(counts.items()))
        return f"<p>{html.escape(repr(self))}</p>{Table('timings', columns, rows)._repr_html_()}"

    def to_json(self) -> str:
        """The text of a costs file: all timings, where they were taken, and the fallback's name.

        Raises:
            ValueError: when the fallback is a cost model of one's own, which no file can hold.
        """
        names = [n for n, kind in FALLBACKS.items() if type(self._fallback) is kind]
        if not names:
            raise ValueError(
                f"costs fall back on {type(self._fallback).__name__}, which no file can hold; "
                f"save costs over {' or '.join(kind.__name__ for kind in FALLBACKS.values())}"
            )
        timings = json.loads(to_json(self._entries))
        file = _CostsFile(
            COSTS_FORM.format, COSTS_FORM.version, names[0], self._environments, timings
        )
        return encode(file)

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> MeasuredCosts:
        """Read the text of a costs file."""
        what = what or cls.FILE
        file = COSTS_FORM.read(text, _CostsFile, what)
        with reading(what):
            found = from_json(json.dumps(file.timings), "its timings")
            entries = [each for each in found if isinstance(each, TimingEntry)]
            fallback = FALLBACKS[file.fallback]()
            return cls(_Loaded(entries), file.environments, fallback)

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
        if LOADS in operator.attributes:
            alike = _alike(operator)
            cost = self.operator_cost(alike, sizes, direction, training, device)
            share = filled_share(operator, sizes) / filled_share(alike, sizes)
            return replace(cost, seconds=cost.seconds * share)
        local = local_operator(operator, sizes)
        key = TimingKey(environment, local, training.formats.kernels, direction)
        measured = self._measured.get(key.digest)
        if measured is not None:
            cost = _measured_cost(measured)
        else:
            cost = self._fallback.operator_cost(operator, sizes, direction, training, device)
            correction = self._correction_of(key, training, device)
            if correction is not None:
                cost = _corrected(correction, local, cost, training)
        cost = self._at_pace(cost, environment, elasticity(operator))
        return self._dispatched(cost, environment, direction)

    def pace(self, device: DeviceType) -> Pace | None:
        """See `PacedCosts`: that of all profiles, to which costs are brought."""
        environment = self._environments.get(device.name)
        paces = None if environment is None else self._paces[environment]
        return None if paces is None else paces[1]

    def launch_seconds(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> float | None:
        """See `LaunchTimes`: what a pass takes the host alone, as it is launched in a step."""
        environment = self._environments.get(device.name)
        if environment is None or not environment.cuda:
            return None
        local = local_operator(_alike(operator), sizes)
        key = TimingKey(environment, local, training.formats.kernels, direction)
        alone = self._measured.get(launch_key(key).digest)
        steps = [self._measured.get(launched_key(environment, how).digest) for how in Launched]
        if alone is None or steps[0] is None or steps[1] is None:
            return None
        return alone.median_s * steps[0].median_s / steps[1].median_s

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """See `CostModel`."""
        environment = self._environments.get(device.name)
        plain = self._fallback.update_cost(num_parameters, training, device)
        if environment is None:
            return plain
        key = update_key(num_parameters, training, environment)
        measured = self._measured.get(key.digest)
        entries = self._groups.get(_groups_of(key)[0], [])
        if measured is not None:
            cost = _measured_cost(measured)
        elif len(entries) > 1:
            cost = _fit_update(entries, num_parameters)
        else:
            correction = self._correction_of(key, training, device)
            if correction is None:
                return plain
            cost = _corrected(correction, key.operator, plain, training)
        return self._at_pace(cost, environment, OF_OTHERS)

    def explain(self, device: DeviceType, training: Training) -> Table:
        """What was learned from the measured operators of a device, the worst-known group first.

        Example:
            >>> print(costs.explain(device, Training()))  # doctest: +SKIP
            operators  direction  measured  model  error  of the fallback
            linear     forward          14  work    4.1%            61.0%
        """
        environment = self._environments.get(device.name)
        rows: list[tuple[Value, ...]] = []
        for group in sorted(self._groups, key=lambda group: (*group[1:3], group[3].value)):
            where, kind, variant, direction, precision = group
            if (where, precision) != (environment, training.formats.kernels) or not _is_timed(
                kind
            ):
                continue
            learned = self._correction(group, training, device)
            found = (learned.num_samples, learned.model, learned.error, learned.plain_error)
            rows.append((f"{kind} {variant}".rstrip(), direction.value, *found))
        table = Table(
            title=(
                f"operators of {device.name} in {training.formats.kernels} that were not measured"
            ),
            columns={
                "operators": Unit.TEXT,
                "direction": Unit.TEXT,
                "measured": Unit.COUNT,
                "model": Unit.TEXT,
                "error": Unit.SHARE,
                "of the fallback": Unit.SHARE,
            },
            rows=tuple(rows),
            note="Errors are typical ones (one standard deviation) of operators that were left "
            "out in turn; the last column is the device model's, uncorrected.",
        )
        return table.sorted_by("error")

    def _correction_of(
        self, key: TimingKey, training: Training, device: DeviceType
    ) -> Correction | None:
        """What is learned from the nearest relatives of an operator, if any were measured."""
        groups = [group for group in _groups_of(key) if group in self._groups]
        many = [group for group in groups if len(self._groups[group]) >= LEAST_RELATIVES]
        near = next(iter(many or groups), None)
        return None if near is None else self._correction(near, training, device)

    def _correction(self, group: _Group, training: Training, device: DeviceType) -> Correction:
        """How the measured operators of a group differ from the fallback.

        Devices of one name may differ: of a calibrated cluster, of a what-if. What is learned over
        the fallback's prices of one corrects no other's.
        """
        learned = self._learned.setdefault(group, [])
        for *asked, known in learned:
            if asked == [training, device]:
                return known
        entries = self._groups[group]
        samples = [
            _sample(entry.key.operator, self._plain(entry, training, device), training)
            for entry in entries
        ]
        correction = learn(samples, [entry.measurement.median_s for entry in entries])
        learned.append((training, device, correction))
        return correction

    def _plain(self, entry: TimingEntry, training: Training, device: DeviceType) -> Cost:
        operator, direction = entry.key.operator, entry.key.direction
        if _is_update(operator):
            return self._fallback.update_cost(operator.dims[0].size, training, device)
        return self._fallback.operator_cost(operator, operator.sizes, direction, training, device)

    def _paces_in(self, environment: Environment) -> tuple[float, Pace] | None:
        """To which pace the times of an environment were brought, and what the cores took."""
        times, cores = (self._measured.get(pace_key(environment, of).digest) for of in PaceOf)
        if times is None or cores is None:
            return None
        return times.median_s, Pace(cores.median_s, cores.spread)

    def _at_pace(self, cost: Cost, environment: Environment, share: float) -> Cost:
        """A cost at the pace that the cores have on average, and off by how far they vary."""
        paces = self._paces[environment]
        if paces is None or not cost.source.is_timed:
            return cost
        before, pace = paces
        return replace(
            cost,
            seconds=at_pace(cost.seconds, before, pace.reference_s, share),
            relative_error=math.hypot(cost.relative_error, share * OVER_A_RUN * pace.spread),
        )

    def _dispatched(self, cost: Cost, environment: Environment, direction: Direction) -> Cost:
        """A cost with what the executor spends around the operator, if that was measured."""
        dispatch = self._measured.get(dispatch_key(environment, direction).digest)
        return (
            cost if dispatch is None else replace(cost, seconds=cost.seconds + dispatch.median_s)
        )


@dataclass(frozen=True)
class _CostsFile:
    """What a costs file holds; `timings` as in an export of the timing cache."""

    format: str
    version: int
    fallback: str
    environments: dict[str, Environment]
    timings: dict[str, Any]


@dataclass(frozen=True)
class _Loaded:
    """The timings of a file."""

    found: list[TimingEntry]

    def entries(self) -> list[TimingEntry]:
        return self.found


def _alike(operator: Operator) -> Operator:
    """An operator as it is timed: a mixture with experts that are chosen alike."""
    if LOADS not in operator.attributes:
        return operator
    attributes = {key: x for key, x in operator.attributes.items() if key != LOADS}
    return replace(operator, attributes=attributes)


def _sample(operator: Operator, plain: Cost, training: Training) -> Sample:
    """What a correction may depend on."""
    if _is_update(operator):
        size = float(operator.dims[0].size)
        return Sample(plain.seconds, size, size)
    flops = kind_of(operator).flops(operator, operator.sizes)
    nbytes = tensor_bytes(operator, operator.sizes, training)
    return Sample(plain.seconds, flops, float(nbytes))


def _corrected(
    correction: Correction, operator: Operator, plain: Cost, training: Training
) -> Cost:
    error = plain.relative_error if correction.error is None else correction.error
    seconds = correction.seconds(_sample(operator, plain, training))
    return Cost(seconds, CostSource.CORRECTED, max(error, LEAST_ERROR))


def _fit_update(entries: Sequence[TimingEntry], num_parameters: int) -> Cost:
    """A line through the times of updates, by least squares of relative errors."""
    sizes = np.array([entry.key.operator.dims[0].size for entry in entries], dtype=np.float64)
    seconds = np.array([entry.measurement.median_s for entry in entries])
    rows = np.stack([1.0 / seconds, sizes / seconds], axis=1)
    scale = np.linalg.norm(rows, axis=0)
    solution, _ = scipy.optimize.nnls(rows / scale, np.ones(len(entries)))
    constant, slope = solution / scale
    errors = (constant + slope * sizes) / seconds - 1.0
    error = max(LEAST_ERROR, float(np.abs(errors).max()))
    return Cost(float(constant + slope * num_parameters), CostSource.CORRECTED, error)


def _measured_cost(measurement: Measurement) -> Cost:
    """The median, as sure as so many repeats make one: a step is a sum of many such runs."""
    sure = error_of_median(measurement.spread, measurement.repeats)
    return Cost(measurement.median_s, CostSource.MEASURED, max(sure, LEAST_ERROR))


def _groups_of(key: TimingKey) -> list[_Group]:
    """The groups of a time, the narrowest first.

    An update belongs to its optimizer's only; an elementwise chain to that of its functions and to
    that of all chains, since a GELU is another thing than a sum.
    """
    operator = key.operator
    if _is_update(operator):
        variants = [str(operator.attributes["optimizer"])]
    else:
        functions = [str(function) for function, _ in operator.attributes.get("steps", ())]
        variants = [", ".join(functions), ""] if functions else [""]
    return [
        (key.environment, operator.kind, variant, key.direction, key.precision)
        for variant in variants
    ]


def _is_timed(kind: str) -> bool:
    """Whether a kind is one of operators, not of updates or of what is around them."""
    return kind not in (UPDATE_KIND, *AROUND_OPERATORS)


def _is_update(operator: Operator) -> bool:
    return operator.kind == UPDATE_KIND
