"""The record of a kind of operator: what every other module may know of it.

Whoever asks what an operator is asks a field of its kind's record, never the kind's name. So a new
kind is one record; it cannot be made without the fields that have no default, and those that have
one promise nothing: such a kind has no collectives inside, mixes what it reads, sums nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.operators.inner_collectives import InnerCollective
from stratagem.simulator.operators.kinds.traffic import Traffic, input_size
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.saved_tensors import Saved
from stratagem.simulator.operators.step_programs import Steps

Sizes = Mapping[str, int]
Reference = list[Any]
"""What stands for a value in a program of steps."""


class OperatorRole(enum.Enum):
    """What an operator is to a model, for the names of its dims, recipes, segments and exports."""

    SOURCE = "a program over the batch, of which no gradient is taken"
    CHAIN = "pointwise steps"
    LAYER = "a linear layer"
    PRODUCT = "a matrix product of two inputs"
    CONVOLUTION = "windows of an image, times weights"
    LOOKUP = "rows of a table by their number"
    LAYER_NORM = "each position less its mean, over its deviation"
    RMS_NORM = "each position over its root mean square"
    BATCH_NORM = "each channel less its mean over the batch, over its deviation"
    GROUP_NORM = "channels of a sample less the mean of their group, over its deviation"
    SOFTMAX = "weights that add up to one"
    ATTENTION = "values by how well their keys fit a query"
    ROTATION = "positions as rotations"
    REDUCTION = "sums over dims"
    PREFIX = "what earlier slices of a sequence made, in front of what a slice makes"
    LOSS = "a number to make smaller, of classes"
    OTHER = "none of these"


POSITION_NORMS = (OperatorRole.LAYER_NORM, OperatorRole.RMS_NORM)
"""Norms of each position alone."""


class Linearity(enum.Enum):
    """In which of its inputs an operator is linear: what it makes of sums over samples."""

    NONE = "none"
    ONE = "each, while the others stay as they are"
    ALL = "all of them together, beside a bias"


class InputValues(enum.Enum):
    """What an input holds, if not numbers of any size."""

    ROWS = "numbers of rows of the first weight"
    CLASSES = "numbers along the last dim of the first input"
    COUNT = "how many elements of the second input count"
    TRUTHS = "true or false"
    FEW = "whole numbers that index any dim: 0 or 1"
    SHARES = "numbers between 0 and 1, which every function takes"
    FED = "such numbers, of which no gradient is asked"


@dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """The matrix products that a forward pass runs on matrix units.

    Attributes:
        shape: rows, columns and batch of one, from the operator and its local sizes.
        per_input: whether there is one for each input, whose results are added up.
        fused: whether they are parts of a single kernel, whose backward computes more than two
            products for each: attention.
        sums_bias: whether a bias is added, whose gradient a kernel of its own sums up.
        columns: the dim of the output that its columns lie along, where two operators that read
            the same can be one with more columns; None where they cannot.
        saves_multiplications: whether an operator has fewer of them than operations say.
    """

    shape: Callable[[Operator, Sizes], tuple[int, int, int]]
    per_input: bool = False
    fused: bool = False
    sums_bias: bool = False
    columns: int | None = None
    saves_multiplications: Callable[[Operator], bool] = lambda operator: False

    def __post_init__(self) -> None:
        check_fields(self, "matrix products of a kind")

    def count(self, operator: Operator) -> int:
        """How many products a forward pass runs."""
        return len(operator.inputs) if self.per_input else 1

    def has_bias(self, operator: Operator) -> bool:
        """Whether the gradient of a bias has to be summed up."""
        return self.sums_bias and len(operator.weights) > self.count(operator)


@dataclass(frozen=True)
class Remade:
    """An operator that is to be written as steps of a source.

    Attributes:
        inputs: what it reads, as references of the program.
        attributes: its own.
        reduced: places of the dims of its first input that it sums over.
        keeps_dims: whether these stay in the output, of size 1.
        shape: of its output.
        dtype: of its output, if that of its first input is another; empty otherwise.
    """

    inputs: Sequence[Reference]
    attributes: Mapping[str, Any]
    reduced: Sequence[int]
    keeps_dims: bool
    shape: Sequence[int]
    dtype: str


class ProgramDraft(Protocol):
    """A program of steps under construction."""

    def add(self, function: str, *arguments: Any) -> Reference:
        """One more step."""
        ...

    def run(self, steps: Steps, inputs: Sequence[Reference] = ()) -> Reference:
        """The steps of another program, with `inputs` in the place of its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class OperatorKind:
    """What is known of a kind of operator.

    Example:
        >>> from stratagem.simulator.operators.kinds.traffic import EachTensorOnce
        >>> from stratagem.simulator.operators.saved_tensors import SavedTensors
        >>> kind = OperatorKind(
        ...     name="flip",
        ...     role=OperatorRole.OTHER,
        ...     flops=lambda operator, sizes: 0.0,
        ...     backward_flops=1.0,
        ...     product=None,
        ...     traffic=EachTensorOnce(),
        ...     saved=SavedTensors(inputs=()),
        ...     weight_share=0.0,
        ... )

    Attributes:
        name: what operators say in `Operator.kind`.
        role: what it is to a model.
        flops: operations of one forward pass, from the operator and its local sizes.
        backward_flops: how many times as many a backward pass has.
        product: the matrix products that these are; None where vector units run them.
        traffic: what its passes move through memory.
        saved: what its backward pass needs of its forward pass.
        weight_share: the part of a backward pass that makes the gradients of parameters, and may
            run later than that of the inputs; from 0 to 1.
        inner: the collectives inside its kernels, from the operator and its local sizes.
        linear: in which of its inputs it is linear.
        sums: whether what it makes of parts of a dim that its output lacks adds up to the whole.
        positionwise: whether a position of its result depends on that position alone, as long as
            its dim is neither summed over nor whole.
        like_input: whether its result has the dims of its first input.
        slides: whether windows slide over the last dims of its first input, and of its output.
        values: per input what it holds, where that is not numbers of any size.
        values_of: likewise of an operator, where its kind alone does not say so.
        buffers: weights that passes write, and that are not trained.
        asks_host: the number of inputs above which the host reads a value in every pass, to know
            how much there is to do; None where it never does.
        as_source: how a source computes the same; None where it cannot.

    Raises:
        ValueError: no name, a field of another type, a ratio or a share that is none.
    """

    name: str
    role: OperatorRole
    flops: Callable[[Operator, Sizes], float]
    backward_flops: float
    product: MatrixProduct | None
    traffic: Traffic
    saved: Saved
    weight_share: float
    inner: Callable[[Operator, Sizes], tuple[InnerCollective, ...]] = lambda operator, sizes: ()
    linear: Linearity = Linearity.NONE
    sums: bool = False
    positionwise: bool = False
    like_input: bool = False
    slides: bool = False
    values: Mapping[int, InputValues] = field(default_factory=dict)
    values_of: Callable[[Operator], Mapping[int, InputValues]] | None = None
    buffers: tuple[int, ...] = ()
    asks_host: int | None = None
    as_source: Callable[[ProgramDraft, Remade], Reference] | None = None

    def pass_flops(self, operator: Operator, sizes: Sizes, *, backward: bool) -> float:
        """Operations of one pass of an operator of local sizes."""
        return self.flops(operator, sizes) * (self.backward_flops if backward else 1.0)

    def held(self, operator: Operator) -> Mapping[int, InputValues]:
        """Per input of an operator what it holds, where that is not numbers of any size."""
        return self.values if self.values_of is None else self.values_of(operator)

    def multiplies_input(self, operator: Operator, slot: int) -> bool:
        """Whether an input of an operator is an operand of its products."""
        values = self.held(operator).get(slot, InputValues.SHARES)
        return self.product is not None and values in (InputValues.SHARES, InputValues.FED)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a kind of operator has no name: give it one that no other has")
        check_fields(self, f"kind {self.name!r}")
        if self.backward_flops < 0:
            raise ValueError(
                f"kind {self.name!r} has backward_flops {self.backward_flops}: it is a ratio to "
                "those of forward, 0 or more"
            )
        if not 0 <= self.weight_share <= 1:
            raise ValueError(
                f"kind {self.name!r} has weight_share {self.weight_share}: it is a part of a "
                "backward pass, from 0 to 1"
            )


def no_operations(operator: Operator, sizes: Sizes) -> float:
    """The operations of what only moves bytes."""
    return 0.0


def per_input(factor: float) -> Callable[[Operator, Sizes], float]:
    """So many operations for each scalar of the first input."""
    return lambda operator, sizes: factor * input_size(operator, sizes)
