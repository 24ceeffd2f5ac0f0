"""Operators without a rule of their own: calls of torch, and what capture found out about them.

Such an operator holds what the exported program calls, and torch runs it on shards. Which of its
dims may be split is not known from a table: capture tries it on small tensors. What there is to
know for prices is counted once where torch is, for one index of every dim that is free to split,
and kept among the attributes:

=============  ==============================================================================
``calls``      the calls, as `torch_ops.generic.calls` reads them
``merged``     per input how many of its dims make each dim that torch sees
``split``      per dim that torch makes how many dims of the output it is
``averaged``   [operand, dim] of every dim that is split and over which torch takes a mean
``count``      the product of these dims over the whole batch
``dtypes``     of each input
``trained``    of each input, whether its gradient may be asked for
``work``       see `Work`
=============  ==============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from stratagem.simulator.operators.kinds.kind_record import (
    InputValues,
    MatrixProduct,
    OperatorKind,
    OperatorRole,
    Sizes,
)
from stratagem.simulator.operators.kinds.traffic import KernelChoice, Moved
from stratagem.simulator.operators.operator import Operator, shape_of


@dataclass(frozen=True)
class Work:
    """What one index of the dims that are free to split costs.

    Attributes:
        flops: operations of forward.
        moved: scalars that the kernels of forward read and write.
        kernels: of forward.
        backward_moved: scalars that its kernels read and write.
        backward_kernels: how many these are.
        product: rows, columns and batch of the largest matrix product; None without one.
        saved: numbers of the inputs that backward needs.
        saves_output: whether it needs the output.
        inside: bytes of what else it needs.
    """

    flops: float
    moved: float
    kernels: int
    backward_moved: float
    backward_kernels: int
    product: tuple[int, int, int] | None
    saved: tuple[int, ...]
    saves_output: bool
    inside: float

    def to_attribute(self) -> dict[str, Any]:
        """As plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def indices(operator: Operator, sizes: Sizes) -> int:
    """How many indices the dims have that are free to split."""
    return math.prod(sizes[dim.name] for dim in operator.dims if not dim.whole)


def averaged_share(operator: Operator, sizes: Sizes) -> float:
    """The part of a mean over the whole batch that the mean over local values is; 1 without."""
    if not operator.attributes["averaged"]:
        return 1.0
    operands = (*operator.inputs, *operator.weights)  # A mean may be one of a weight alone.
    names = {
        name
        for number, at in operator.attributes["averaged"]
        for name in operands[number].layout[at]
    }
    return math.prod(sizes[name] for name in names) / float(operator.attributes["count"])


def _work(operator: Operator) -> Mapping[str, Any]:
    work: Mapping[str, Any] = operator.attributes["work"]
    return work


def _flops(operator: Operator, sizes: Sizes) -> float:
    return float(_work(operator)["flops"]) * indices(operator, sizes)


def _product(operator: Operator, sizes: Sizes) -> tuple[int, int, int]:
    rows, columns, batch = _work(operator)["product"]
    share = indices(operator, sizes) / indices(operator, operator.sizes)
    return max(1, round(rows * share)), columns, batch


def _values(operator: Operator) -> Mapping[int, InputValues]:
    given = zip(operator.attributes["dtypes"], operator.attributes["trained"], strict=True)
    return {slot: _held(dtype, trained) for slot, (dtype, trained) in enumerate(given)}


def _held(dtype: str, trained: bool) -> InputValues:
    if "float" in dtype:
        return InputValues.SHARES if trained else InputValues.FED
    return InputValues.TRUTHS if dtype == "bool" else InputValues.FEW


@dataclass(frozen=True)
class Counted:
    """What the kernels of the decomposition move (`Work`)."""

    passes: float = 1.0

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        return "elementwise"

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        work = _work(operator)
        return self._moved(work["moved"], work["kernels"], operator, sizes, choice)

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        work = _work(operator)
        return self._moved(
            work["backward_moved"], work["backward_kernels"], operator, sizes, choice
        )

    def _moved(
        self, each: float, kernels: int, operator: Operator, sizes: Sizes, choice: KernelChoice
    ) -> Moved:
        return Moved(choice.parameter_bytes * each * indices(operator, sizes), kernels)


@dataclass(frozen=True)
class SavedByAutograd:
    """What autograd was seen to save (`Work`)."""

    def slots(self, operator: Operator, *, fused: bool) -> frozenset[int]:
        """See `Saved`."""
        return frozenset(_work(operator)["saved"])

    def output(self, operator: Operator) -> bool:
        """See `Saved`."""
        return bool(_work(operator)["saves_output"])

    def inside(self, operator: Operator, *, fused: bool) -> tuple[int, int]:
        """See `Saved`."""
        sizes = operator.sizes
        nbytes = float(_work(operator)["inside"]) * indices(operator, sizes)
        made = math.prod(shape_of(operator.outputs[0].layout, sizes))
        return 0, math.ceil(nbytes / made)


GENERIC = OperatorKind(
    name="generic",
    role=OperatorRole.OTHER,
    flops=_flops,
    backward_flops=2.0,
    product=None,
    traffic=Counted(),
    saved=SavedByAutograd(),
    weight_share=0.0,
    sums=True,
    values_of=_values,
)

GENERIC_PRODUCT = replace(GENERIC, name="generic_product", product=MatrixProduct(shape=_product))


def is_generic(operator: Operator) -> bool:
    """Whether an operator has no rule of its own.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> is_generic(mlp([8, 8], batch=4).operator("layers.0"))
        False
    """
    return operator.kind in (GENERIC.name, GENERIC_PRODUCT.name)
