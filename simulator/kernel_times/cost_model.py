"""What an operator costs on a device: the protocol that every cost model keeps, and a roofline.

A time comes with where it is from and how wrong it may be, so that a plan's prediction can say so.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast, runtime_checkable

from stratagem.simulator.base.arrays import Amounts, Floats, larger, rounded_up
from stratagem.simulator.graph.image_splits import with_halos
from stratagem.simulator.hardware.core_pace import OF_OTHERS, OF_PRODUCTS, Pace
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.memory_traffic import rounding_moved
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.inner_collectives import InnerReduction
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Layout, Operator, shape_of

SUMMED = "summed over ranks"
"""The attribute of local operators that tells where ranks sum inside the kernel."""


class Direction(enum.Enum):
    """Which pass of an operator."""

    FORWARD = "forward"
    BACKWARD = "backward"


class CostSource(enum.Enum):
    """Where a cost comes from, best first.

    `MEASURED` is the time of this very operator on the device that runs it, `CORRECTED` what times
    of its relatives there say; `FITTED` and `ROOFLINE` are a model of its type of device.
    """

    MEASURED = "measured"
    CORRECTED = "corrected"
    FITTED = "fitted"
    ROOFLINE = "roofline"

    @property
    def is_timed(self) -> bool:
        """Whether it rests on times of the device itself, which no calibration is made for."""
        return self in (CostSource.MEASURED, CostSource.CORRECTED)


@dataclass(frozen=True)
class Cost:
    """Seconds, where they come from, and their relative error (one standard deviation)."""

    seconds: float
    source: CostSource
    relative_error: float


class Costs(NamedTuple):
    """What one shard of an operator costs, or each of many: then `seconds` are an array."""

    seconds: Amounts
    source: CostSource
    relative_error: float


def of_one(costs: Costs) -> Cost:
    """What a single shard costs.

    Example:
        >>> import numpy as np
        >>> of_one(Costs(np.float64(2.0), CostSource.FITTED, 0.1))
        Cost(seconds=2.0, source=<CostSource.FITTED: 'fitted'>, relative_error=0.1)
    """
    return Cost(float(costs.seconds), costs.source, costs.relative_error)


Columns = Mapping[str, Floats]
"""By dim, its local size in each of many shards of an operator."""


class CostModel(Protocol):
    """Prices operators and parameter updates on one device."""

    def operator_cost(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Cost:
        """Time of one pass over an operator whose dims have the local `sizes`."""
        ...

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """Time of the optimizer on `num_parameters` scalars."""
        ...


@runtime_checkable
class LaunchTimes(Protocol):
    """A cost model that knows what launching a pass takes the host of a GPU."""

    def launch_seconds(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> float | None:
        """Seconds of the host for one pass over an operator of local `sizes`; None if unknown."""
        ...


@runtime_checkable
class PacedCosts(Protocol):
    """A cost model that knows at which pace of the cores its times hold."""

    def pace(self, device: DeviceType) -> Pace | None:
        """That of a device type; None where nobody looked."""
        ...


def elasticity(operator: Operator) -> float:
    """How the time of an operator goes with the pace of the cores that run it.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8], batch=4)
        >>> [elasticity(each) for each in graph.operators if each.kind == "linear"]
        [0.95]
    """
    return OF_OTHERS if kind_of(operator).product is None else OF_PRODUCTS


def local_operator(operator: Operator, sizes: Mapping[str, int]) -> Operator:
    """The operator that one device runs: the same kind on its local sizes, halos among them.

    Two local operators with equal `signature` run the same kernels, which is the key of every
    measured time. Where ranks sum over a dim inside the kernel, that is another kernel than on one
    device, and the attribute `SUMMED` has the dims' places: a batch norm over ranks takes means,
    waits for those of the others, and goes over its input again, where one device has one kernel.
    """
    summed = _summed(operator, sizes)
    sizes, attributes = with_halos(operator, sizes)
    dims = tuple(replace(dim, size=sizes[dim.name]) for dim in operator.dims)
    attributes = {**attributes, SUMMED: summed} if summed else attributes
    return replace(operator, dims=dims, attributes=attributes)


def _summed(operator: Operator, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Places of the sharded dims over which ranks sum inside the kernel."""
    summed = {
        name
        for inner in kind_of(operator).inner(operator, sizes)
        if isinstance(inner, InnerReduction)
        for name in inner.dims
    }
    return tuple(
        place
        for place, dim in enumerate(operator.dims)
        if dim.name in summed and sizes[dim.name] < dim.size
    )


def as_sizes(columns: Columns) -> Mapping[str, int]:
    """Sizes of many shards, for functions of the sizes of one: what they do, numpy does of many.

    Example:
        >>> import numpy as np
        >>> from stratagem.simulator.graph.models import mlp
        >>> layer = mlp([8, 4], batch=2).operator("layers.0")
        >>> rows = {"sample": np.array([1.0, 2.0])}
        >>> columns = {name: np.full(2, float(size)) for name, size in layer.sizes.items()} | rows
        >>> kind_of(layer).flops(layer, as_sizes(columns)).tolist()
        [64.0, 128.0]
    """
    return cast("Mapping[str, int]", columns)


def tensor_bytes(operator: Operator, sizes: Mapping[str, int], training: Training) -> int:
    """Bytes of all inputs, weights and outputs of one pass."""
    elements = training.bytes_of("float32")
    layouts: list[Layout] = [read.layout for read in operator.inputs]
    layouts += [weight.layout for weight in operator.weights]
    inputs = sum(math.prod(shape_of(layout, sizes)) for layout in layouts) * elements
    outputs = sum(
        math.prod(shape_of(out.layout, sizes)) * training.bytes_of(out.dtype)
        for out in operator.outputs
    )
    return inputs + outputs


class CostsByFormula(ABC):
    """A cost model by a formula, which numpy does of many shards as it does of one.

    A kind of operator whose functions look at a single number cannot be priced so, and numpy
    says so: its shards are priced one by one.
    """

    @abstractmethod
    def formula(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Costs:
        """Of a shard, or of many whose sizes are arrays (see `as_sizes`).

        Raises:
            TypeError: of arrays, where functions of the kind are about single numbers.
            ValueError: the same.
        """

    def operator_cost(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Cost:
        """See `CostModel`."""
        return of_one(self.formula(operator, sizes, direction, training, device))


def formula_of(costs: CostModel) -> CostsByFormula | None:
    """A cost model as one whose formula prices many shards at once; None where it has none.

    Nor has one that inherits it, but has another `operator_cost` of its own.

    Example:
        >>> class Slower(RooflineCosts):
        ...     def operator_cost(self, *asked):
        ...         return replace(super().operator_cost(*asked), seconds=1.0)
        >>> formula_of(RooflineCosts()), formula_of(Slower())
        (<RooflineCosts: arithmetic or memory, whichever takes longer>, None)
    """
    if not isinstance(costs, CostsByFormula):
        return None
    asked = getattr(costs.operator_cost, "__func__", None)
    return costs if asked is CostsByFormula.operator_cost else None


class RooflineCosts(CostsByFormula):
    """The larger of arithmetic and memory time, over the efficiencies of the device, plus
    launches.

    Matrix products pay for the tiles they do not fill and for the last wave of tiles that does not
    fill the device (Williams et al. 2009 for the roofline; NVIDIA's matrix-multiplication guide
    for tile and wave quantisation). An elementwise chain runs as one kernel per step, as eager
    PyTorch runs it, or as one (`Training.fused_elementwise`).

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> device = Cluster.preset("dgx-a100").device_type(0)
        >>> training = Training(precision="bfloat16")
        >>> RooflineCosts().update_cost(10**9, training, device).seconds < 0.05
        True
    """

    relative_error = 0.15

    def __repr__(self) -> str:
        return "<RooflineCosts: arithmetic or memory, whichever takes longer>"

    def formula(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Costs:
        """See `CostsByFormula`."""
        kind = kind_of(operator)
        backward = direction is Direction.BACKWARD
        steps = operator.attributes.get("steps", ())
        kernels: Amounts = 1 if training.fused_elementwise else max(1, len(steps))
        flops = kind.pass_flops(operator, sizes, backward=backward)
        moved: Amounts = tensor_bytes(operator, sizes, training) * kind.traffic.passes * kernels
        if backward:
            moved, kernels = 2.0 * moved, 2 * kernels
        else:
            rounding = rounding_moved(operator, sizes, training)
            moved, kernels = moved + rounding.nbytes, kernels + rounding.kernels
        memory = moved / (device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency)
        compute = flops / self._flop_rate(operator, sizes, training, device)
        seconds = larger(compute, memory) + kernels * device.launch_us * 1e-6
        return Costs(seconds, CostSource.ROOFLINE, self.relative_error)

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """See `CostModel` and `Training.update_bytes`."""
        rate = device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency
        seconds = num_parameters * training.update_bytes / rate + device.launch_us * 1e-6
        return Cost(seconds, CostSource.ROOFLINE, self.relative_error)

    def _flop_rate(
        self, operator: Operator, sizes: Mapping[str, int], training: Training, device: DeviceType
    ) -> Amounts:
        product = kind_of(operator).product
        if product is None:
            return device.vector_tflops * 1e12
        rows, columns, batch = product.shape(operator, sizes)
        filled = tile_efficiency(rows, columns, batch, device)
        return device.peak_flops(training.formats.products) * device.matmul_efficiency * filled


def tile_efficiency(
    rows: Amounts, columns: Amounts, batch: Amounts, device: DeviceType
) -> Amounts:
    """Share of the device that the best of a few tilings of a matrix product keeps busy.

    A product is cut into tiles, and all units work on one tile each at a time. Halved tiles fill
    better but reuse less, which costs a fifth.
    """
    best: Amounts = 0.0
    for edges, reuse in (((1, 1), 1.0), ((1, 2), 0.9), ((2, 2), 0.8)):
        tall, wide = (max(1, device.tile // edge) for edge in edges)
        tiles = rounded_up(rows / tall) * rounded_up(columns / wide) * batch
        waves = rounded_up(tiles / device.num_units)
        useful = rows * columns * batch / (waves * device.num_units * tall * wide)
        best = larger(best, useful * reuse)
    return best
