"""Random tensors for an operator, alike in shape, dtype and range to those of a training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.simulator.kernel_times.cost_model import tensor_bytes
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import InputValues, OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, role_of
from stratagem.simulator.operators.operator import Input, Layout, Operator, factor_sizes, shape_of
from stratagem.simulator.operators.step_programs import references

CONDITIONS = {"where": (0,), "masked_fill": (1,)}
BITWISE = ("and", "or", "xor", "not")


@dataclass(frozen=True, eq=False)
class Operands:
    """What an operator reads: its inputs in the form in which their makers left them, and weights.

    `leaves` are those of both that backward gives a gradient.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]

    @property
    def leaves(self) -> list[Tensor]:
        """Inputs and weights that need a gradient."""
        return [tensor for tensor in (*self.inputs, *self.weights) if tensor.requires_grad]


def random_operands(operator: Operator, training: Training, device: torch.device) -> Operands:
    """Random inputs and weights of a local operator, always the same ones.

    Ids lie within the vocabulary and targets within the classes; what a step asks a truth value of
    is bool; other numbers are normally distributed (zeros would run faster than real data).
    """
    generator = torch.Generator(device).manual_seed(0)
    draw = _Draw(operator, getattr(torch, training.formats.storage), device, generator)
    buffers = kind_of(operator).buffers
    return Operands(
        inputs=tuple(draw.input(i) for i in range(len(operator.inputs))),
        weights=tuple(draw.weight(i, i not in buffers) for i in range(len(operator.weights))),
    )


def viewed(tensor: Tensor, read: Input, sizes: Mapping[str, int]) -> Tensor:
    """An input as its operator sees it: factors selected, put in order and merged into dims."""
    for position, index in sorted(read.select, reverse=True):
        tensor = tensor.select(position, index)
    left = sorted(read.order)
    tensor = tensor.permute([left.index(position) for position in read.order])
    return tensor.reshape(shape_of(read.layout, sizes))


def check_memory(operator: Operator, training: Training, *, copies: int = 1) -> None:
    """Refuse so many copies as would not fit in memory, where an attempt could end the process.

    Raises:
        MemoryError: names the bytes that are needed (tensors and gradients) and available.
    """
    needed = 2 * copies * tensor_bytes(operator, operator.sizes, training)
    available = _available_bytes()
    if available is not None and needed > available:
        raise MemoryError(
            f"needs {needed / 2**30:.1f} GiB for tensors and gradients, but "
            f"{available / 2**30:.1f} GiB are available"
        )


def _available_bytes() -> int | None:
    description = Path("/proc/meminfo")
    if description.exists():
        for line in description.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


@dataclass(frozen=True, eq=False)
class _Draw:
    operator: Operator
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def input(self, index: int) -> Tensor:
        operator, read = self.operator, self.operator.inputs[index]
        shape = _source_shape(read, operator.sizes)
        values = kind_of(operator).held(operator).get(index)
        if values is InputValues.ROWS:
            return self._below(_elements(operator, operator.weights[0].layout[:1]), shape)
        if values is InputValues.CLASSES:
            return self._below(_elements(operator, operator.inputs[0].layout[-1:]), shape)
        if values is InputValues.COUNT:
            count = 1 + _elements(operator, operator.inputs[1].layout)
            return torch.full(shape, count, device=self.device)
        if values is InputValues.FEW:
            return self._below(2, shape)
        if values in (InputValues.SHARES, InputValues.FED):
            drawn = torch.rand(shape, device=self.device, generator=self.generator)
            return drawn.to(self.dtype).requires_grad_(
                values is InputValues.SHARES and operator.outputs[0].differentiable
            )
        if values is InputValues.TRUTHS or ("in", index) in _truths(operator):
            return self._below(2, shape).bool()
        return self._normal(shape, any(out.differentiable for out in operator.outputs))

    def weight(self, index: int, trained: bool) -> Tensor:
        shape = shape_of(self.operator.weights[index].layout, self.operator.sizes)
        if ("weight", index) in _truths(self.operator):
            return self._below(2, shape).bool()
        if not trained:
            return self._normal(shape, False).abs_()
        return self._normal(shape, True)

    def _normal(self, shape: tuple[int, ...], needs_gradient: bool) -> Tensor:
        drawn = torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)
        return drawn.requires_grad_(needs_gradient)

    def _below(self, limit: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(limit, shape, device=self.device, generator=self.generator)


def _elements(operator: Operator, layout: Layout) -> int:
    return math.prod(factor_sizes(layout, operator.sizes))


def _source_shape(read: Input, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes of the source's factors; that of a selected one is not known, but at least 2."""
    shape = dict(zip(read.order, factor_sizes(read.layout, sizes), strict=True))
    shape.update({position: max(2, index + 1) for position, index in read.select})
    return tuple(shape[position] for position in sorted(shape))


def _truths(operator: Operator) -> set[tuple[str, int]]:
    """The operands of an elementwise chain that must be bool."""
    if role_of(operator) is not OperatorRole.CHAIN:
        return set()
    asked: list[Any] = []
    for function, arguments in operator.attributes["steps"]:
        every = range(len(arguments)) if function in BITWISE else ()
        asked.extend(arguments[position] for position in CONDITIONS.get(function, every))
    return {(kind, target) for kind, target in references(asked)}
