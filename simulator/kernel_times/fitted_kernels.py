"""The cost model of devices whose kernels were timed: what operators cost by fitted constants.

An operator is the kernels that its passes run. Matrix products go by `matrix_products`, fused
attention by its share of the peak, everything else by the bytes that it moves (`memory_traffic`).
The host launches one kernel after the other, so no operator takes less than its launches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from stratagem.simulator.base.arrays import Amounts, larger, rounded_up, smaller
from stratagem.simulator.base.precision import FORMATS
from stratagem.simulator.hardware.device_type import (
    AttentionConstants,
    DeviceType,
    MemoryConstants,
)
from stratagem.simulator.kernel_times.cost_model import (
    Cost,
    CostModel,
    Costs,
    CostsByFormula,
    CostSource,
    Direction,
    RooflineCosts,
    of_one,
)
from stratagem.simulator.kernel_times.matrix_products import Multiplier
from stratagem.simulator.kernel_times.memory_traffic import (
    backward_moved,
    bias_gradient_bytes,
    forward_moved,
    rounding_moved,
)
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, product_of
from stratagem.simulator.operators.kinds.traffic import Moved
from stratagem.simulator.operators.operator import Operator, factors, shape_of

HEAD_DIM_STEP = 32
ATTENTION_TILE = 128
"""Fused attention pads heads to multiples of 32 and works on tiles of 128 queries."""

FLASH_SHARES = {1: (0.68, 0.55), 2: (1.0, 1.0), 3: (2.0, 1.6)}
"""Forward and backward rate of FlashAttention 1 and 3 to that of 2.

Version 1 reaches 30 to 50 and 25 to 35 % of an A100's peak where version 2 reaches up to 73 and 63
(Dao 2023, arXiv 2307.08691, section 1 and 4.1); version 3 is 1.5 to 2.0 times as fast forward and
1.5 to 1.75 backward on an H100 (Shah et al. 2024, arXiv 2407.08608, section 1).
"""

FLASH_BACKWARD_FLOPS = 2.5
"""Backward computes the scores again: five products where forward has two."""


class KernelModelCosts(CostsByFormula):
    """Costs by the fitted constants of a device, by a roofline where it has none.

    Example:
        >>> device = DeviceType.preset("A100-80GB")
        >>> cost = KernelModelCosts().update_cost(10**9, Training("bfloat16"), device)
        >>> 0.01 < cost.seconds < 0.03, cost.source
        (True, <CostSource.FITTED: 'fitted'>)
    """

    def __init__(self) -> None:
        self._roofline = RooflineCosts()

    def __repr__(self) -> str:
        return "<KernelModelCosts: fitted constants of devices, rooflines where there are none>"

    def formula(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Costs:
        """See `CostsByFormula`."""
        given = (operator, sizes, direction, training, device)
        product = kind_of(operator).product
        if product is None:
            if device.memory is None:
                return self._roofline.formula(*given)
            return _traffic_cost(*given, device.memory)
        if product.fused and device.attention is not None:
            cost = _attention_cost(*given, device.attention)
        elif not product.fused and training.formats.products in device.products:
            cost = _product_cost(*given)
        else:
            return self._roofline.formula(*given)
        return cost if direction is Direction.BACKWARD else _rounded_first(cost, *given)

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """See `CostModel` and `Training.update_bytes`."""
        if device.memory is None:
            return self._roofline.update_cost(num_parameters, training, device)
        moved = Moved(float(num_parameters * training.update_bytes), 1)
        return of_one(_memory_cost(moved, "elementwise", device, device.memory))


@cache
def default_costs() -> CostModel:
    """The cost model where none is given: always the same, so that what it priced is found again.

    Example:
        >>> default_costs() is default_costs()
        True
    """
    return KernelModelCosts()


def costs_or_default(costs: CostModel | None) -> CostModel:
    """The costs that a user gave, or the cost model where none is given.

    Example:
        >>> costs_or_default(None)
        <KernelModelCosts: fitted constants of devices, rooflines where there are none>

    Raises:
        TypeError: what was given prices no operators, such as the cluster that a plan has anyway.
    """
    if costs is None:
        return default_costs()
    lacks = [name for name in ("operator_cost", "update_cost") if not hasattr(costs, name)]
    if lacks:
        raise TypeError(
            f"costs is a {type(costs).__name__}, which has no {' and no '.join(lacks)}; give "
            "KernelModelCosts, MeasuredCosts or RooflineCosts, or leave it out"
        )
    return costs


def memory_seconds(
    moved: Moved, share: float, device: DeviceType, memory: MemoryConstants
) -> Amounts:
    """Time of kernels that move bytes at a share of the bandwidth; the first ones stay in L2."""
    near = smaller(moved.nbytes, memory.l2_mib * 2**20 * larger(1, moved.kernels))
    counted = moved.nbytes - near + near / memory.l2_gain
    rate = device.memory_bandwidth_gb_s * 1e9 * share
    return counted / rate + moved.kernels * memory.launch_us * 1e-6


def _memory_cost(moved: Moved, family: str, device: DeviceType, memory: MemoryConstants) -> Costs:
    seconds = memory_seconds(moved, memory.share(family), device, memory)
    launches = moved.kernels * device.launch_us * 1e-6
    return Costs(larger(seconds, launches), CostSource.FITTED, memory.relative_error)


def _traffic_cost(
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Direction,
    training: Training,
    device: DeviceType,
    memory: MemoryConstants,
) -> Costs:
    """What an operator takes whose bytes move at its family's share of the bandwidth.

    Vector units keep up with the operations of what torch has; a kind of one's own may have more.
    A pass without a kernel, as of a view, computes nothing.
    """
    backward, kind = direction is Direction.BACKWARD, kind_of(operator)
    moved = (backward_moved if backward else forward_moved)(operator, sizes, training)
    family = kind.traffic.family(operator) + ("_backward" if backward else "")
    cost = _memory_cost(moved, family, device, memory)
    flops = smaller(1, moved.kernels) * kind.pass_flops(operator, sizes, backward=backward)
    return cost._replace(seconds=larger(cost.seconds, flops / (device.vector_tflops * 1e12)))


def _rounded_first(
    cost: Costs,
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Direction,
    training: Training,
    device: DeviceType,
) -> Costs:
    """The cost of a forward pass whose operands are rounded before, where they are."""
    moved = rounding_moved(operator, sizes, training)
    if not moved.kernels or device.memory is None:
        return cost
    added = _memory_cost(moved, "elementwise", device, device.memory)
    return cost._replace(seconds=cost.seconds + added.seconds)


def _product_cost(
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Direction,
    training: Training,
    device: DeviceType,
) -> Costs:
    multiplied = training.formats.products
    constants = device.products[multiplied]
    multiplier = Multiplier(device, multiplied, FORMATS[multiplied].nbytes, constants)
    products = product_of(operator).count(operator)
    made = training.parameter_bytes * math.prod(shape_of(operator.outputs[0].layout, sizes))
    kernels: Amounts
    if direction is Direction.FORWARD:
        seconds, kernels = multiplier.forward(operator, sizes), products
        added = Moved(3.0 * (products - 1) * made, products - 1)
        if added.kernels and device.memory is not None:
            share = device.memory.share("elementwise")
            seconds += memory_seconds(added, share, device, device.memory)
            kernels += added.kernels
    else:
        seconds, kernels = multiplier.backward(operator, sizes), 2 * products
        if product_of(operator).has_bias(operator) and device.memory is not None:
            share = device.memory.share("elementwise")
            summed = Moved(bias_gradient_bytes(operator, sizes, training), 1)
            seconds += memory_seconds(summed, share, device, device.memory)
            kernels += 1
    seconds = larger(seconds, kernels * device.launch_us * 1e-6)
    return Costs(seconds, CostSource.FITTED, constants.relative_error)


def _attention_cost(
    operator: Operator,
    sizes: Mapping[str, int],
    direction: Direction,
    training: Training,
    device: DeviceType,
    constants: AttentionConstants,
) -> Costs:
    """Two products of forward, five of backward, at the share of the peak for the head dim.

    On the diagonal of a causal mask whole tiles are computed. Dao 2023 has the figures.
    """
    query = math.prod(sizes[n] for n in operator.outputs[0].layout[-2])
    head = math.prod(sizes[n] for n in operator.outputs[0].layout[-1])
    keys = math.prod(sizes[n] for n in operator.inputs[1].layout[-2])
    padded = HEAD_DIM_STEP * rounded_up(head / HEAD_DIM_STEP)
    backward = direction is Direction.BACKWARD
    share: Amounts = constants.backward if backward else constants.forward
    half = constants.head_dim
    share = share * (_saturation(padded, half) / _saturation(128, half))
    share = share * FLASH_SHARES[training.flash_version][backward]
    share = share * (head / padded * keys / (keys + constants.keys))
    flops: Amounts = kind_of(operator).flops(operator, sizes)
    if operator.attributes.get("causal"):
        longest = larger(query, keys)
        flops = flops * ((longest + ATTENTION_TILE) / longest)
    flops = flops * (FLASH_BACKWARD_FLOPS if backward else 1.0)
    busy = _busy(operator, query, sizes, device)
    seconds = flops / (device.peak_flops(training.formats.products) * share * busy)
    moved = (backward_moved if backward else forward_moved)(operator, sizes, training)
    if device.memory is not None:
        rate = device.memory.share("elementwise")
        seconds = larger(seconds, memory_seconds(moved, rate, device, device.memory))
    seconds = larger(seconds, moved.kernels * device.launch_us * 1e-6)
    return Costs(seconds, CostSource.FITTED, constants.relative_error)


def _saturation(size: Amounts, half: float) -> Amounts:
    return size / (size + half)


def _busy(operator: Operator, query: int, sizes: Mapping[str, int], device: DeviceType) -> Amounts:
    """Share of the processors that tiles of queries keep busy, when they do not fill them."""
    heads = math.prod(sizes[n] for n in factors(operator.outputs[0].layout[:-2]))
    tiles = heads * rounded_up(query / ATTENTION_TILE)
    return smaller(1.0, tiles / device.num_units)
