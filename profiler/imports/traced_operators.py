"""Which operator of ours a recorded call ran: from its name, shapes, strides and constants.

A view is not recorded, but its strides are. A tensor of shape (4, 2, 8) and strides (48, 8, 1)
is a contiguous (4, 3, 2, 8) of which one third is read:

    size 8, stride 1    innermost
    size 2, stride 8    = 8 · 1              follows
    size 4, stride 48   = 3 · (2 · 8)        a factor of 3 lies between, of which one index is read

So operands are rebuilt by the ordinary builder, and the operator gets the key that the same call
in a model's graph has. Nothing is guessed: what has no such form is an `UnreadableError`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.profiler.imports.trace_events import TraceCall
from stratagem.simulator.base.precision import STORED
from stratagem.simulator.graph.building.convolution_builder import Sliding
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    permute,
    reshape,
    select,
)
from stratagem.simulator.operators.operator import Operator

_NAME = "call"
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "bool": "bool",
}
_RMS_EPS = 1.1920928955078125e-07
"""What torch takes where a call gives none: the float32 machine epsilon."""

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


class UnreadableError(ValueError):
    """Why a call has no operator of ours."""


@dataclass(frozen=True)
class TracedCall:
    """A call as operators of ours (all of them run as it did), and what its backward has to make.

    `products` counts the matrix products of a whole backward pass, `gradients` the tensors that
    a fused backward kernel gives a gradient.
    """

    operators: tuple[Operator, ...]
    precision: str
    products: int = 0
    gradients: int = 0


def read_call(call: TraceCall) -> TracedCall:
    """The operators that a call of one of `READERS` stands for.

    Raises:
        UnreadableError: says why it stands for none.
    """
    arguments = _Arguments(call)
    try:
        return READERS[call.name](arguments)
    except UnreadableError:
        raise
    except (ValueError, TypeError, IndexError, SyntaxError) as error:
        raise UnreadableError(str(error)) from error


@dataclass(frozen=True)
class _Operand:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


class _Arguments:
    """The recorded arguments of a call."""

    def __init__(self, call: TraceCall) -> None:
        recorded = call.arguments
        if "Input Dims" not in recorded:
            raise UnreadableError("no shapes recorded; profile with record_shapes=True")
        if "Input Strides" not in recorded or "Concrete Inputs" not in recorded:
            raise UnreadableError("no strides or constants recorded; profile with a later torch")
        self._shapes: Sequence[Any] = recorded["Input Dims"]
        self._types: Sequence[str] = recorded.get("Input type", ())
        self._strides: Sequence[Any] = recorded["Input Strides"]
        self._constants: Sequence[str] = recorded["Concrete Inputs"]

    @property
    def precision(self) -> str:
        """The one precision of all floating tensors."""
        found = {_DTYPES[kind] for kind in self._types if kind in _DTYPES}
        floats = sorted(kind for kind in found if kind.startswith(("float", "bfloat")))
        if len(floats) != 1 or floats[0] not in STORED:
            raise UnreadableError(f"floating types {', '.join(floats) or 'unknown'}")
        return floats[0]

    def has_tensor(self, index: int) -> bool:
        """Whether a tensor was given there."""
        return index < len(self._types) and self._types[index] in _DTYPES

    def tensor(self, index: int) -> _Operand:
        """The tensor at a position."""
        if not self.has_tensor(index):
            raise UnreadableError(f"argument {index} is no tensor")
        return _Operand(
            tuple(self._shapes[index]), tuple(self._strides[index]), _DTYPES[self._types[index]]
        )

    def constant(self, index: int, default: Any = None) -> Any:
        """The number, list or truth value at a position, `default` where none was given."""
        text = self._constants[index] if index < len(self._constants) else ""
        if not text:
            return default
        return ast.literal_eval(text) if text != "None" else default


class _Builder:
    """Rebuilds the operands of one operator."""

    def __init__(self) -> None:
        self.graph = GraphBuilder("trace")
        self._count = 0

    def input(self, operand: _Operand) -> DraftTensor:
        """A tensor that the operator reads, with its strides."""
        places = sorted(
            (place for place, size in enumerate(operand.shape) if size > 1),
            key=lambda place: (-operand.strides[place], place),
        )
        stored: list[tuple[int, int | None]] = []
        expected = 1
        for place in reversed(places):
            stride, size = operand.strides[place], operand.shape[place]
            if stride < expected or stride % expected:
                raise UnreadableError("a tensor whose elements overlap or repeat")
            if stride > expected:
                stored.append((stride // expected, None))
            stored.append((size, place))
            expected = stride * size
        stored.reverse()
        whole = self.graph.input(
            self._name(), [size for size, _ in stored], _written(operand), sample_dim=None
        )
        for position in reversed([i for i, (_, place) in enumerate(stored) if place is None]):
            whole = select(whole, position, 0)
        order = [place for _, place in stored if place is not None]
        return reshape(permute(whole, [order.index(p) for p in sorted(order)]), operand.shape)

    def parameter(self, operand: _Operand) -> DraftTensor:
        """A tensor that outlives the step, as it is stored."""
        if not _is_contiguous(operand):
            raise UnreadableError("a weight that is seen through a view")
        return self.graph.parameter(self._name(), operand.shape, _written(operand))

    def _name(self) -> str:
        self._count += 1
        return f"operand{self._count}"

    def finish(self, made: DraftTensor) -> Operator:
        """The operator called `call` that made this tensor."""
        return self.graph.build(self.graph.reduce(made)).operator(_NAME)


def _written(operand: _Operand) -> str:
    """Graphs are written in float32, whatever the precision of the training."""
    return "float32" if operand.is_float else operand.dtype


def _is_contiguous(operand: _Operand) -> bool:
    expected = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _transposed(operand: _Operand) -> _Operand:
    return _Operand(operand.shape[::-1], operand.strides[::-1], operand.dtype)


def _refuse_unless(condition: bool, why: str) -> None:
    if not condition:
        raise UnreadableError(why)


def _product_with(x: _Operand, weight: _Operand, bias: _Operand | None) -> Operator:
    """``x @ weight + bias`` with a stored (in, out), or a view of a stored (out, in)."""
    b = _Builder()
    is_view = not _is_contiguous(weight)
    stored = b.parameter(_transposed(weight) if is_view else weight)
    given = None if bias is None else b.parameter(bias)
    made = b.graph.linear(b.input(x), stored, given, transposed=not is_view, name=_NAME)
    return b.finish(made)


def _linear(given: _Arguments) -> TracedCall:
    weight = given.tensor(1)
    bias = given.tensor(2) if given.has_tensor(2) else None
    _refuse_unless(len(weight.shape) == 2, "a weight that is no matrix")
    operator = _product_with(given.tensor(0), _transposed(weight), bias)
    return TracedCall((operator,), given.precision, products=2)


def _addmm(given: _Arguments) -> TracedCall:
    bias, x, weight = (given.tensor(i) for i in range(3))
    _refuse_unless(given.constant(3, 1) == 1 == given.constant(4, 1), "beta or alpha is not 1")
    _refuse_unless(len(bias.shape) == 1, "an addend that is no bias")
    return TracedCall((_product_with(x, weight, bias),), given.precision, products=2)


def _matmul(given: _Arguments) -> TracedCall:
    """A product; of two matrices it runs alike whether the second is a parameter or not."""
    left, right = given.tensor(0), given.tensor(1)
    _refuse_unless(min(len(left.shape), len(right.shape)) > 1, "a product with a vector")
    b = _Builder()
    operators = [b.finish(b.graph.matmul(b.input(left), b.input(right), name=_NAME))]
    if len(right.shape) == 2:
        operators.append(_product_with(left, right, None))
    return TracedCall(tuple(operators), given.precision, products=2)


def _layer_norm(given: _Arguments) -> TracedCall:
    b = _Builder()
    x = b.input(given.tensor(0))
    weight, bias = (b.parameter(given.tensor(i)) if given.has_tensor(i) else None for i in (2, 3))
    num_dims, eps = len(given.constant(1)), given.constant(4, 1e-5)
    made = b.graph.layer_norm(x, weight, bias, num_dims=num_dims, eps=eps, name=_NAME)
    gradients = 1 + (weight is not None) + (bias is not None)
    return TracedCall((b.finish(made),), given.precision, gradients=gradients)


def _rms_norm(given: _Arguments) -> TracedCall:
    b = _Builder()
    x = b.input(given.tensor(0))
    weight = b.parameter(given.tensor(2)) if given.has_tensor(2) else None
    num_dims, eps = len(given.constant(1)), given.constant(3, _RMS_EPS)
    made = b.graph.rms_norm(x, weight, num_dims=num_dims, eps=eps, name=_NAME)
    return TracedCall((b.finish(made),), given.precision)


def _batch_norm(given: _Arguments) -> TracedCall:
    b = _Builder()
    _refuse_unless(all(given.has_tensor(i) for i in range(1, 5)), "no weights or running values")
    made = b.graph.batch_norm(
        b.input(given.tensor(0)),
        *(b.parameter(given.tensor(i)) for i in range(1, 5)),
        training=bool(given.constant(5)),
        momentum=given.constant(6),
        eps=given.constant(7),
        name=_NAME,
    )
    return TracedCall((b.finish(made),), given.precision, gradients=3)


def _softmax(given: _Arguments) -> TracedCall:
    _refuse_unless(given.constant(2) in (None, False), "a softmax in another precision")
    b = _Builder()
    made = b.graph.softmax(b.input(given.tensor(0)), dim=given.constant(1), name=_NAME)
    return TracedCall((b.finish(made),), given.precision)


def _conv(given: _Arguments) -> TracedCall:
    b = _Builder()
    weight = given.tensor(1)
    _refuse_unless(len(given.tensor(0).shape) == len(weight.shape), "an image without a batch")
    bias = b.parameter(given.tensor(2)) if given.has_tensor(2) else None
    stride, padding, dilation = (
        tuple(given.constant(i)) * (1 if len(given.constant(i)) > 1 else len(weight.shape) - 2)
        for i in (3, 4, 5)
    )
    sliding = Sliding(stride, padding, dilation, given.constant(6))
    made = b.graph.convolution(
        b.input(given.tensor(0)), b.parameter(weight), bias, sliding, name=_NAME
    )
    gradients = 2 if bias is None else 3
    return TracedCall((b.finish(made),), given.precision, gradients=gradients)


def _embedding(given: _Arguments) -> TracedCall:
    _refuse_unless(not given.constant(3) and not given.constant(4), "sparse or scaled gradients")
    b = _Builder()
    made = b.graph.embedding(b.input(given.tensor(1)), b.parameter(given.tensor(0)), name=_NAME)
    return TracedCall((b.finish(made),), given.precision)


def _attention(given: _Arguments) -> TracedCall:
    _refuse_unless(not given.constant(4, 0.0), "dropout")
    query, key, value = (given.tensor(i) for i in range(3))
    _refuse_unless(len(query.shape) in (3, 4), f"{len(query.shape)} dims")
    b = _Builder()
    made = b.graph.attention(
        b.input(query),
        b.input(key),
        b.input(value),
        b.input(given.tensor(3)) if given.has_tensor(3) else None,
        causal=bool(given.constant(5)),
        scale=given.constant(6),
        name=_NAME,
    )
    return TracedCall((b.finish(made),), given.precision)


READERS: Mapping[str, Callable[[_Arguments], TracedCall]] = {
    "aten::linear": _linear,
    "aten::addmm": _addmm,
    **dict.fromkeys(("aten::matmul", "aten::mm", "aten::bmm"), _matmul),
    "aten::layer_norm": _layer_norm,
    "aten::rms_norm": _rms_norm,
    "aten::batch_norm": _batch_norm,
    **dict.fromkeys(("aten::softmax", "aten::_softmax"), _softmax),
    **dict.fromkeys((f"aten::conv{places}d" for places in (1, 2, 3)), _conv),
    "aten::embedding": _embedding,
    "aten::scaled_dot_product_attention": _attention,
}
"""What reads the calls of each name; other calls are none of ours."""


def is_whole(reading: TracedCall, nodes: Sequence[TraceCall]) -> bool:
    """Whether backward calls make every gradient that the profiler's do.

    The first layer of a model needs none of its input, for instance, and is then shorter.
    """
    inside = [call for node in nodes for call in node.walk()]
    products = sum(call.name in PRODUCTS for call in inside)
    masks = [mask for call in inside if (mask := _output_mask(call)) is not None]
    enough = all(sum(mask) >= reading.gradients for mask in masks)
    return bool(nodes) and products >= reading.products and enough


def _output_mask(call: TraceCall) -> Sequence[bool] | None:
    """Which gradients a fused backward kernel was asked for, if the call says so."""
    constants = call.arguments.get("Concrete Inputs") or [""]
    if not call.name.endswith("_backward") or not constants[-1].startswith("["):
        return None
    mask = ast.literal_eval(constants[-1])
    return mask if all(isinstance(each, bool) for each in mask) else None
