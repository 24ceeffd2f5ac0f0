"""Matrix products: which ones the passes of an operator run, and what each takes on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Amounts, Flags, chosen, rounded
from stratagem.simulator.hardware.device_type import DeviceType, ProductConstants
from stratagem.simulator.kernel_times._matrix_product_time import (
    all_product_seconds,
    product_seconds,
)
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, product_of
from stratagem.simulator.operators.operator import Operator, shape_of

ALIGNED_BYTES = 16
"""What a tensor core's operands are loaded in (NVIDIA, matrix multiplication guide)."""


class Product(NamedTuple):
    """`batch` products of (rows × depth) by (depth × columns); `elements` are what they move."""

    rows: Amounts
    columns: Amounts
    depth: Amounts
    batch: Amounts
    elements: Amounts


@dataclass(frozen=True)
class Multiplier:
    """Prices products of one precision on one device by its constants.

    Example:
        >>> device = DeviceType.preset("A100-80GB")
        >>> whole = Multiplier(device, "float16", 2, device.products["float16"])
        >>> large = Product(8192, 8192, 8192, 1, 3 * 8192**2)
        >>> 0.6 < 2 * 8192**3 / 312e12 / whole.seconds(large) < 0.9
        True
    """

    device: DeviceType
    precision: str
    itemsize: int
    constants: ProductConstants

    def seconds(
        self, product: Product, gain: float = 1.0, *, aligned: bool | Flags = True
    ) -> Amounts:
        """Time of one kernel whose arithmetic runs at `gain` times the usual rate.

        Sizes of a product may be arrays: then it is many products, and so is the time.
        """
        constants, batched = self.constants, product.batch > 1
        rate = gain * self.device.peak_flops(self.precision)
        usual = chosen(batched, rate * constants.batched, rate)
        slow = chosen(batched, self.device.vector_tflops * 1e12, usual * constants.misaligned)
        sizes = (*product[:4], product.elements * self.itemsize)
        rates = chosen(aligned, usual, slow)
        units, byte_rate = float(self.device.num_units), self.device.memory_bandwidth_gb_s * 1e9
        many = [each.size for each in (*sizes, rates) if isinstance(each, np.ndarray)]
        if not many:
            rows, columns, depth, batch, moved = map(float, sizes)
            device = units, float(rates), byte_rate
            return product_seconds(rows, columns, depth, batch, moved, device, constants.vector)
        count = max(many)
        products = np.empty((count, len(sizes)))
        for place, size in enumerate(sizes):
            products[:, place] = size
        rates = np.full(count, rates)
        return all_product_seconds(products, rates, units, byte_rate, constants.vector)

    def forward(self, operator: Operator, sizes: Mapping[str, int]) -> Amounts:
        """The forward products of an operator."""
        gain = (
            self.constants.winograd
            if product_of(operator).saves_multiplications(operator)
            else 1.0
        )
        return sum(
            self.seconds(product, gain, aligned=self._aligned(product))
            for product in forward_products(operator, sizes)
        )

    def backward(self, operator: Operator, sizes: Mapping[str, int]) -> Amounts:
        """The products of both gradients: of the left operand, and of the right one."""
        gain = self.constants.backward
        if product_of(operator).saves_multiplications(operator):
            gain *= self.constants.winograd_backward
        total: Amounts = 0.0
        for product in forward_products(operator, sizes):
            aligned = self._aligned(product)
            m, n, k = product.rows, product.columns, product.depth
            left, right = product._replace(columns=k, depth=n), product._replace(rows=k, depth=m)
            total += sum(self.seconds(each, gain, aligned=aligned) for each in (left, right))
        return total

    def _aligned(self, product: Product) -> bool | Flags:
        """Whether every line of the three matrices starts at a multiple of 16 bytes.

        A head dim of 108 and 2 bytes does not. Only matrix units care, and so only the lower
        precisions.
        """
        step = ALIGNED_BYTES // self.itemsize
        if self.itemsize > 2:
            return True
        return (product.columns % step == 0) & (product.depth % step == 0)


def forward_products(operator: Operator, sizes: Mapping[str, int]) -> tuple[Product, ...]:
    """The products that an operator runs: one, or one for each input of a sum."""
    product = product_of(operator)
    rows, columns, batch = product.shape(operator, sizes)
    if not product.per_input:
        flops = kind_of(operator).flops(operator, sizes)
        depth = rounded(flops / (2 * rows * columns * batch))
        return (Product(rows, columns, depth, batch, _elements(operator, sizes)),)
    made = rows * columns
    depths = [shape_of(read.layout, sizes)[-1] for read in operator.inputs]
    return tuple(
        Product(rows, columns, depth, 1, made + depth * (rows + columns)) for depth in depths
    )


def _elements(operator: Operator, sizes: Mapping[str, int]) -> int:
    """What one product moves."""
    layouts = [read.layout for read in operator.inputs]
    layouts += [weight.layout for weight in operator.weights[:1]]
    layouts += [out.layout for out in operator.outputs]
    return sum(math.prod(shape_of(layout, sizes)) for layout in layouts)
