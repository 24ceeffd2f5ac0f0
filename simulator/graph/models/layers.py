"""Layers that several models share, and the checks of their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.simulator.base.field_types import check_type
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor


def check_sizes(model: str, sizes: dict[str, int]) -> None:
    """Refuse sizes that are no whole numbers, or below 1.

    Example:
        >>> check_sizes("gpt", {"batch": 1.5})
        Traceback (most recent call last):
        ValueError: gpt: batch is 1.5; it must be a whole number

    Raises:
        ValueError: names the model, the size and its value.
    """
    for name, size in sizes.items():
        check_type(size, int, name, model)
        if size < 1:
            raise ValueError(f"{model}: {name} is {size}; sizes are at least 1")


def check_heads(model: str, hidden: int, num_heads: int) -> None:
    """Refuse heads of unequal size.

    Raises:
        ValueError: `hidden` is not a multiple of `num_heads`.
    """
    if hidden % num_heads:
        raise ValueError(
            f"{model}: hidden {hidden} is not a multiple of num_heads {num_heads}; every head "
            "needs equally many"
        )


def check_choice(model: str, what: str, value: str, known: Sequence[str]) -> None:
    """Refuse an unknown option.

    Raises:
        ValueError: names the model, the option, and what there is.
    """
    if value not in known:
        raise unknown(what, value, known, where=model)


def parameter(
    b: GraphBuilder, name: str, shape: Sequence[int], *, trainable: bool = True
) -> DraftTensor:
    """A parameter whose name begins with the open scope."""
    return b.parameter(b.full_name(name), shape, trainable=trainable)


def linear(
    b: GraphBuilder, name: str, x: DraftTensor, size: int, *, bias: bool = True
) -> DraftTensor:
    """A linear layer to `size` features with parameters of its own."""
    weight = parameter(b, f"{name}.weight", (size, x.shape[-1]))
    shift = parameter(b, f"{name}.bias", (size,)) if bias else None
    return b.linear(x, weight, shift, name=name)


def layer_norm(b: GraphBuilder, name: str, x: DraftTensor, *, bias: bool = True) -> DraftTensor:
    """A layer norm over the last dim with parameters of its own."""
    weight = parameter(b, f"{name}.weight", x.shape[-1:])
    shift = parameter(b, f"{name}.bias", x.shape[-1:]) if bias else None
    return b.layer_norm(x, weight, shift, name=name)


def rms_norm(b: GraphBuilder, name: str, x: DraftTensor) -> DraftTensor:
    """An RMS norm over the last dim with a weight of its own."""
    return b.rms_norm(x, parameter(b, f"{name}.weight", x.shape[-1:]), name=name)


def tokens(b: GraphBuilder, batch: int, sequence: int) -> tuple[DraftTensor, DraftTensor]:
    """The inputs ``input_ids`` and ``labels`` of a language model."""
    shape = (batch, sequence)
    return b.input("input_ids", shape, "int64"), b.input("labels", shape, "int64")
