"""What kernels take on the devices of a stage, the slowest of which all wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.hardware.cluster import Calibration
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import (
    Columns,
    CostModel,
    CostsByFormula,
    CostSource,
    Direction,
    LaunchTimes,
    as_sizes,
    formula_of,
)
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.experts import with_loads
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator

FEW_SHARDS = 4
"""So many are priced at once at least: fewer are priced as fast one by one."""


class KernelPrice(NamedTuple):
    """Seconds of one pass, their relative error, and where they come from."""

    seconds: float
    relative_error: float
    source: str


@dataclass(frozen=True, eq=False)
class KernelPrices:
    """Prices passes, updates and copies on the types of a stage's devices.

    Args:
        training: of the plan.
        costs: the cost model, which the calibration of the cluster corrects where nothing was
            timed.
        calibration: of the cluster.
        devices: one of each type.
        number: gives a small number for a large value (see `RowMemory`).
        known: prices that those of a cost model, cluster and training share.
        wait: share of their computing that devices wait for one another.
    """

    training: Training
    costs: CostModel
    calibration: Calibration
    devices: tuple[DeviceType, ...]
    number: Callable[[Any], int]
    known: dict[Any, KernelPrice]
    wait: float

    @cached_property
    def _types(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def of(
        self, operator: Operator, sizes: Mapping[str, int], direction: Direction
    ) -> KernelPrice:
        """The cost on the slowest of the stage's device types: all devices wait for it."""
        operator = with_loads(operator, self.training.expert_loads)
        kind = self.number(operator.signature)
        key = kind, tuple(sizes.values()), direction is Direction.FORWARD, self._types
        if key not in self.known:
            self.known[key] = self._cost(operator, sizes, direction)
        seconds, error, source = self.known[key]
        return KernelPrice(seconds * (1 + self.wait), error, source)

    def learn(
        self, operator: Operator, shards: Iterable[Mapping[str, int]], direction: Direction
    ) -> None:
        """Price those of some shards that are not known at once, where that can be."""
        operator = with_loads(operator, self.training.expert_loads)
        kind, forward = self.number(operator.signature), direction is Direction.FORWARD
        keyed = {(kind, tuple(each.values()), forward, self._types): each for each in shards}
        unknown = [key for key in keyed if key not in self.known]
        if len(unknown) < FEW_SHARDS:
            return
        sizes = np.array([key[1] for key in unknown], dtype=np.float64)
        columns = dict(zip(keyed[unknown[0]], np.ascontiguousarray(sizes.T), strict=True))
        if (found := self._many(operator, columns, direction)) is not None:
            seconds, error, source = found
            for key, each in zip(unknown, seconds.tolist(), strict=True):
                self.known[key] = KernelPrice(each, error, source)

    def of_many(self, operator: Operator, sizes: Columns, direction: Direction) -> Floats | None:
        """Seconds of many shards at once, as `of` says of each; None where that cannot be."""
        operator = with_loads(operator, self.training.expert_loads)
        found = self._many(operator, sizes, direction)
        return None if found is None else found[0] * (1 + self.wait)

    def _many(
        self, operator: Operator, sizes: Columns, direction: Direction
    ) -> tuple[Floats, float, str] | None:
        """What `_cost` says of many shards at once; None where they are priced one by one."""
        if self._formula is None or len(self.devices) > 1:
            return None
        matmul = kind_of(operator).product is not None
        device = self._calibrated(self.devices[0], matmul=matmul)
        given = operator, as_sizes(sizes), direction, self.training, device
        try:
            found = self._formula.formula(*given)
        except (TypeError, ValueError):  # Of single numbers alone; what is wrong is told there.
            return None
        corrected = found.seconds * self._correction(found.source, matmul=matmul)
        seconds = np.full(next(map(len, sizes.values()), 1), corrected)
        return seconds, found.relative_error, found.source.value

    @cached_property
    def _formula(self) -> CostsByFormula | None:
        return formula_of(self.costs)

    def _cost(
        self, operator: Operator, sizes: Mapping[str, int], direction: Direction
    ) -> KernelPrice:
        matmul = kind_of(operator).product is not None
        prices = []
        for device in self.devices:
            calibrated = self._calibrated(device, matmul=matmul)
            cost = self.costs.operator_cost(operator, sizes, direction, self.training, calibrated)
            seconds = cost.seconds * self._correction(cost.source, matmul=matmul)
            prices.append(KernelPrice(seconds, cost.relative_error, cost.source.value))
        return max(prices, key=lambda price: price.seconds)

    def _calibrated(self, device: DeviceType, *, matmul: bool) -> DeviceType:
        return self.calibration.device(device, self.calibration.scale(matmul=matmul))

    def _correction(self, source: CostSource, *, matmul: bool) -> float:
        """To a cost as training on the cluster shows it: the scales correct a model of the device.

        What was timed on the device has nothing to correct.
        """
        return 1.0 if source.is_timed else self.calibration.scale(matmul=matmul)

    @cached_property
    def launch_times(self) -> LaunchTimes | None:
        """The cost model, where it knows what launches take."""
        return self.costs if isinstance(self.costs, LaunchTimes) else None

    def launch_seconds(
        self, operator: Operator, sizes: Mapping[str, int], direction: Direction
    ) -> float | None:
        """What the cost model says that launching a pass takes the host; None if it does not."""
        if self.launch_times is None:
            return None
        operator = with_loads(operator, self.training.expert_loads)
        key = self.number(operator.signature), tuple(sizes.values()), direction, self._types
        if key not in self.known:
            given = operator, sizes, direction, self.training
            found = [self.launch_times.launch_seconds(*given, device) for device in self.devices]
            times = [seconds for seconds in found if seconds is not None]
            known = max(times) if len(times) == len(found) else math.nan
            self.known[key] = KernelPrice(known, 0.0, "")
        seconds = self.known[key].seconds
        return None if math.isnan(seconds) else seconds

    def update_seconds(self, num_parameters: int, training: Training) -> float:
        """Seconds of an update of so many parameters, trained in some way."""
        costs = [
            self.costs.update_cost(num_parameters, training, device) for device in self.devices
        ]
        return max(cost.seconds * self._correction(cost.source, matmul=False) for cost in costs)

    def moving(self, nbytes: int) -> float:
        """Seconds of a kernel that reads and writes so many bytes in all; of none, for none."""
        if not nbytes:
            return 0.0
        seconds = max(
            nbytes / (device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency)
            + device.launch_us * 1e-6
            for device in self.devices
        )
        return self.calibration.memory_scale * seconds
