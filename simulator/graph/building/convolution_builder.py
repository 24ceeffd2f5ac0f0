"""Builders of convolutions and of what slides windows over images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.simulator.graph.building.contraction_builder import ContractionBuilder, label
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    Loop,
    OperatorDraft,
    reshape,
)
from stratagem.simulator.operators.operator import DimKind

ATTRIBUTE, PARAMETER, REDUCTION = DimKind.ATTRIBUTE, DimKind.PARAMETER, DimKind.REDUCTION

_AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""What the dims are called that a window slides over."""

_HALO = "images are split by `split_images`"
_SPREAD = "windows of the result overlap"


@dataclass(frozen=True)
class Sliding:
    """How windows slide: a number for each dim of the image.

    Attributes:
        stride: from one window to the next.
        padding: zeros on either side.
        dilation: from one place of a window to the next.
        groups: of channels, which know nothing of one another.
        output_padding: rows more at the end of what a transposed convolution makes.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    output_padding: tuple[int, ...] = ()


class ConvolutionBuilder(ContractionBuilder):
    """Convolutions of one to three dims, and transposed ones."""

    def conv2d(
        self,
        x: DraftTensor,
        weight: DraftTensor,
        bias: DraftTensor | None = None,
        *,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        name: str = "",
    ) -> DraftTensor:
        """(sample, in_channel, in_height, in_width) to (sample, out_channel, height, width).

        The weight is (out_channel, in_channel / groups, kernel_height, kernel_width).

        Raises:
            ValueError: see `convolution`.
        """
        return self.convolution(
            x, weight, bias, Sliding(stride, padding, dilation, groups), name=name
        )

    def convolution(
        self,
        x: DraftTensor,
        weight: DraftTensor,
        bias: DraftTensor | None,
        sliding: Sliding,
        *,
        name: str = "",
    ) -> DraftTensor:
        """A convolution over as many dims as windows slide over: one, two or three.

        Groups are a dim of their own, in front of the channels of a group. A depthwise convolution
        has only them. A weight that is no parameter, such as one that is normalised, is read as
        another input.

        Raises:
            ValueError: the channels do not fit, or the kernel is larger than the padded image.
        """
        x, places, groups = self._written(x), len(sliding.stride), sliding.groups
        stored = isinstance(weight.node, DraftParameter)
        weight = weight if stored else self._written(weight)
        draft = self._draft(f"{'conv' if stored else 'filter'}{places}d", name)
        if weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups:
            raise ValueError(
                f"{draft.where}: {x.shape[1]} input channels in {groups} groups do not fit a "
                f"weight of shape {weight.shape}; it takes {weight.shape[1] * groups} channels"
            )
        sizes = window_sizes(
            draft.where,
            x.shape[2:],
            weight.shape[2:],
            sliding.stride,
            sliding.padding,
            sliding.dilation,
        )
        loops = self._channels(draft, x, weight.shape[1], weight.shape[0] // groups, sliding)
        kernel = self._kernel(draft, weight.shape[2:])
        images = self._image(draft, sizes, _HALO)
        draft.reads.append(self._bind(draft, _grouped(x, 1, groups), loops.read))
        own = [*loops.group, loops.out, loops.into, *kernel]
        split = _grouped(weight, 0, groups)
        if stored:
            draft.weights.append(self._bind_weight(draft, weight, own, split=split))
        else:
            draft.reads.append(self._bind(draft, split, own))
        return self._convolved(draft, x, bias, sliding, loops, images)

    def conv_transpose(
        self,
        x: DraftTensor,
        weight: DraftTensor,
        bias: DraftTensor | None,
        sliding: Sliding,
        *,
        name: str = "",
    ) -> DraftTensor:
        """A transposed convolution: every place of x is spread over a window of the result.

        The weight is (in_channel, out_channel / groups, kernel …).

        Raises:
            ValueError: the channels do not fit, or the padding takes away all that there is.
        """
        x, places, groups = self._written(x), len(sliding.stride), sliding.groups
        draft = self._draft(f"conv_transpose{places}d", name)
        if weight.shape[0] != x.shape[1] or x.shape[1] % groups:
            raise ValueError(
                f"{draft.where}: {x.shape[1]} input channels in {groups} groups do not fit a "
                f"weight of shape {weight.shape}; it takes {weight.shape[0]} channels"
            )
        sizes = _spread_sizes(draft.where, x.shape[2:], weight.shape[2:], sliding)
        loops = self._channels(draft, x, x.shape[1] // groups, weight.shape[1], sliding, _SPREAD)
        kernel = self._kernel(draft, weight.shape[2:])
        images = self._image(draft, sizes, _SPREAD)
        draft.reads.append(self._bind(draft, _grouped(x, 1, groups), loops.read))
        stored = [*loops.group, loops.into, loops.out, *kernel]
        split = _grouped(weight, 0, groups)
        draft.weights.append(self._bind_weight(draft, weight, stored, split=split))
        draft.attributes["output_padding"] = list(sliding.output_padding)
        return self._convolved(draft, x, bias, sliding, loops, images)

    def _channels(
        self,
        draft: OperatorDraft,
        x: DraftTensor,
        into: int,
        out: int,
        sliding: Sliding,
        whole: str = _HALO,
    ) -> _Channels:
        """Loops over samples, groups, channels and the image, of a group each."""
        sample = self._loop(draft, "sample", ATTRIBUTE, x.shape[0])
        group = (
            [self._loop(draft, "group", PARAMETER, sliding.groups)] if sliding.groups > 1 else []
        )
        read = self._loop(draft, "in_channel", REDUCTION, into)
        image = [
            self._loop(draft, f"in_{axis}", ATTRIBUTE, size, whole=whole)
            for axis, size in zip(_AXES[len(sliding.stride)], x.shape[2:], strict=True)
        ]
        made = self._loop(draft, "out_channel", PARAMETER, out)
        return _Channels(sample, group, read, made, image)

    def _kernel(self, draft: OperatorDraft, sizes: Sequence[int]) -> list[Loop]:
        return [
            self._loop(draft, f"kernel_{axis}", REDUCTION, size, whole="a kernel is applied whole")
            for axis, size in zip(_AXES[len(sizes)], sizes, strict=True)
        ]

    def _image(self, draft: OperatorDraft, sizes: Sequence[int], whole: str) -> list[Loop]:
        return [
            self._loop(draft, axis, ATTRIBUTE, size, whole=whole)
            for axis, size in zip(_AXES[len(sizes)], sizes, strict=True)
        ]

    def _convolved(
        self,
        draft: OperatorDraft,
        x: DraftTensor,
        bias: DraftTensor | None,
        sliding: Sliding,
        loops: _Channels,
        images: Sequence[Loop],
    ) -> DraftTensor:
        """The result, with all groups in one dim of channels."""
        own = [*loops.group, loops.out]
        if bias is not None:
            split = _grouped(bias, 0, sliding.groups)
            draft.weights.append(self._bind_weight(draft, bias, own, split=split))
        draft.attributes.update(
            stride=list(sliding.stride),
            padding=list(sliding.padding),
            dilation=list(sliding.dilation),
            groups=sliding.groups,
        )
        made = self._made(draft, [loops.sample, *own, *images], x.dtype)
        if loops.group:
            shape = made.shape
            made = reshape(made, (shape[0], math.prod(shape[1:3]), *shape[3:]))
        for dim, text in enumerate(("channel", *_AXES[len(images)]), 1):
            label(made, [dim], text, 2)
        return made


@dataclass(frozen=True)
class _Channels:
    """The loops of a convolution that its input has, and that over the channels that it makes."""

    sample: Loop
    group: list[Loop]
    into: Loop
    out: Loop
    image: list[Loop]

    @property
    def read(self) -> list[Loop]:
        """Those of the input."""
        return [self.sample, *self.group, self.into, *self.image]


def _grouped(tensor: DraftTensor, dim: int, groups: int) -> DraftTensor:
    """A dim seen as groups of channels, where there are several."""
    if groups == 1:
        return tensor
    shape = tensor.shape
    return reshape(tensor, (*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :]))


def _spread_sizes(
    where: str, image: Sequence[int], kernel: Sequence[int], sliding: Sliding
) -> tuple[int, ...]:
    """Sizes of what a transposed convolution makes."""
    sizes = []
    for i, (size, width) in enumerate(zip(image, kernel, strict=True)):
        span = sliding.dilation[i] * (width - 1) + 1
        made = (size - 1) * sliding.stride[i] + span - 2 * sliding.padding[i]
        made += sliding.output_padding[i]
        if made < 1:
            raise ValueError(
                f"{where}: an image of {size} spread by a window of {width} and cut by a padding "
                f"of {sliding.padding[i]} leaves {made}; pad less"
            )
        sizes.append(made)
    return tuple(sizes)


def window_sizes(
    where: str,
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> tuple[int, ...]:
    """Height and width after sliding a window over an image.

    Raises:
        ValueError: the window is larger than the padded image.
    """
    sizes = []
    for size, width, step, pad, gap in zip(image, kernel, stride, padding, dilation, strict=True):
        room = size + 2 * pad - gap * (width - 1) - 1
        if room < 0:
            raise ValueError(
                f"{where}: a window of {width} (dilation {gap}) is larger than an image of {size} "
                f"padded by {pad}; pad more or use a smaller window"
            )
        sizes.append(room // step + 1)
    return tuple(sizes)
