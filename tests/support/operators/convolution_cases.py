"""Convolutions over one, two and three dims, transposed ones, and those of computed weights."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from stratagem.simulator.graph.building.convolution_builder import Sliding
from tests.support.operators.cases import Case, builder, case, operator_of


@case
def conv2d() -> Case:
    b, x, w = builder()
    made = b.conv2d(x(4, 3, 7, 6), w(5, 3, 3, 2), w(5), stride=(2, 1), padding=(1, 0))
    return Case(
        operator_of(b, made),
        lambda x, w, bias: functional.conv2d(x, w, bias, stride=(2, 1), padding=(1, 0)),
    )


@case
def conv2d_grouped() -> Case:
    b, x, w = builder()
    made = b.conv2d(x(3, 4, 5, 5), w(6, 2, 3, 3), groups=2, dilation=(2, 2))
    return Case(
        operator_of(b, made),
        lambda x, w: _grouped(functional.conv2d(x.flatten(1, 2), w, groups=2, dilation=2), 2),
    )


@case
def conv2d_depthwise() -> Case:
    b, x, w = builder()
    sliding = Sliding((2, 1), (1, 1), (1, 1), groups=4)
    made = b.convolution(x(2, 4, 5, 6), w(8, 1, 3, 3), w(8), sliding)
    return Case(
        operator_of(b, made),
        lambda x, w, bias: _grouped(
            functional.conv2d(x.flatten(1, 2), w, bias, (2, 1), 1, 1, groups=4), 4
        ),
    )


@case
def conv1d() -> Case:
    b, x, w = builder()
    made = b.convolution(x(4, 6, 11), w(5, 6, 3), w(5), Sliding((2,), (2,), (1,)))
    return Case(
        operator_of(b, made),
        lambda x, w, bias: functional.conv1d(x, w, bias, stride=2, padding=2),
    )


@case
def conv1d_grouped() -> Case:
    b, x, w = builder()
    sliding = Sliding((1,), (2,), (2,), groups=3)
    made = b.convolution(x(2, 6, 9), w(6, 2, 3), w(6), sliding)
    return Case(
        operator_of(b, made),
        lambda x, w, bias: _grouped(
            functional.conv1d(x.flatten(1, 2), w, bias, padding=2, dilation=2, groups=3), 3
        ),
    )


@case
def filter1d() -> Case:
    b, x, w = builder()
    sliding = Sliding((2,), (1,), (1,), groups=2)
    made = b.convolution(x(2, 4, 9), x(6, 2, 3), w(6), sliding)
    return Case(
        operator_of(b, made),
        lambda x, w, bias: _grouped(
            functional.conv1d(x.flatten(1, 2), w.flatten(0, 1), bias, 2, 1, 1, 2), 2
        ),
    )


@case
def filter2d() -> Case:
    b, x, _ = builder()
    made = b.convolution(x(2, 4, 5, 6), x(3, 4, 3, 2), None, Sliding((1, 1), (1, 0), (1, 1)))
    return Case(operator_of(b, made), lambda x, w: functional.conv2d(x, w, padding=(1, 0)))


@case
def filter3d() -> Case:
    b, x, w = builder()
    sliding = Sliding((1, 1, 1), (1, 1, 1), (1, 1, 1))
    made = b.convolution(x(2, 3, 4, 3, 4), x(2, 3, 3, 3, 3), w(2), sliding)
    return Case(operator_of(b, made), lambda x, w, bias: functional.conv3d(x, w, bias, padding=1))


@case
def conv3d() -> Case:
    b, x, w = builder()
    sliding = Sliding((1, 2, 1), (1, 0, 1), (1, 1, 1))
    made = b.convolution(x(3, 2, 5, 4, 6), w(4, 2, 3, 2, 3), w(4), sliding)
    return Case(
        operator_of(b, made),
        lambda x, w, bias: functional.conv3d(x, w, bias, stride=(1, 2, 1), padding=(1, 0, 1)),
    )


def _transposed(places: int, groups: int) -> Case:
    b, x, w = builder()
    image = (5, 4, 3)[:places]
    sliding = Sliding((2,) * places, (1,) * places, (1,) * places, groups, (1,) * places)
    kernel = (3,) * places
    made = b.conv_transpose(x(2, 6, *image), w(6, 4 // groups, *kernel), w(4), sliding)
    spread = getattr(functional, f"conv_transpose{places}d")

    def reference(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        merged = x if groups == 1 else x.flatten(1, 2)
        made = spread(merged, w, bias, 2, 1, 1, groups)
        return made if groups == 1 else _grouped(made, groups)

    return Case(operator_of(b, made), reference)


def _grouped(made: Tensor, groups: int) -> Tensor:
    """With the channels of each group apart, as grouped convolutions have them."""
    per_group = made.shape[1] // groups
    return made.unflatten(1, (groups, per_group))


@case
def conv_transpose1d() -> Case:
    return _transposed(1, 1)


@case
def conv_transpose2d() -> Case:
    return _transposed(2, 1)


@case
def conv_transpose2d_grouped() -> Case:
    return _transposed(2, 2)


@case
def conv_transpose3d() -> Case:
    return _transposed(3, 1)
