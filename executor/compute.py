"""Running operators: forward on local shards with a tape, backward by autograd over that tape.

Each operator is an autograd graph of its own. Its leaves are the inputs in the factors of their
sources and the weights; the view onto the operator's layout is inside the graph, so that gradients
come back in the factors of the source:

    leaf ──select, permute, reshape──▶ kernel ──▶ output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.instructions import Backward, Forward
from stratagem.executor.memory import Memory
from stratagem.executor.views import Reader, Select, joined, reader, select_of
from stratagem.simulator.graph import Operator, factors, shape_of
from stratagem.simulator.torch_ops.kernels import run_kernel
from stratagem.simulator.torch_ops.shards import Shards

Action = Callable[[], None]


@dataclass
class Tape:
    """What a backward pass needs.

    Attributes:
        outputs: of the kernel, with their graph.
        leaves: inputs and then weights with a gradient.
        shapes: of the leaves.
        sources: shapes of the whole values of which the inputs are parts.
        gathered: weights that were gathered anew for the backward pass.
    """

    outputs: tuple[Tensor, ...] = ()
    leaves: list[Tensor] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    sources: list[torch.Size] = field(default_factory=list)
    gathered: list[Tensor] = field(default_factory=list)

    def leaf(self, tensor: Tensor) -> Tensor:
        """A new leaf with the memory of `tensor`."""
        made = tensor.detach().requires_grad_()
        self.leaves.append(made)
        self.shapes.append(made.shape)
        return made


def forward(
    instruction: Forward, operator: Operator, shards: Shards, flows: Sequence[bool], memory: Memory
) -> Action:
    """The action of a forward instruction.

    Args:
        flows: per input and then per weight, whether a gradient is wanted.
    """
    values = memory.values
    names = [operand.value for operand in instruction.inputs]
    readers = [
        reader(read, operand, shards)
        for read, operand in zip(operator.inputs, instruction.inputs, strict=True)
    ]
    slots = list(zip(names, readers, flows, strict=False))
    weights = list(zip(instruction.weights, flows[len(names) :], strict=True))
    makers = _factor_shapes(operator, shards)
    kernel = _regathering(instruction, operator, shards) or (
        lambda inputs, parameters, tape: run_kernel(operator, shards, inputs, parameters)
    )
    tape_name = instruction.tape or ""

    def run_taped() -> None:
        tape = Tape()
        inputs: list[Tensor] = []
        with torch.enable_grad():
            for name, read, flow in slots:
                value = values[name]
                inputs.append(_enter(value, read, tape) if flow else read.view(read.part(value)))
            parameters: list[Tensor] = []
            for name, flow in weights:
                value = values[name]
                if flow:
                    value = tape.leaf(value)
                parameters.append(value)
            tape.outputs = kernel(inputs, parameters, tape)
        values[tape_name] = tape
        _store(tape.outputs)

    def run_plain() -> None:
        inputs = [read.view(read.part(values[name])) for name, read, _ in slots]
        parameters = [values[name] for name, _ in weights]
        _store(run_kernel(operator, shards, inputs, parameters))

    def _store(outputs: tuple[Tensor, ...]) -> None:
        for name, output, shape in zip(instruction.outputs, outputs, makers, strict=True):
            made = output.detach()
            values[name] = made if shape is None else made.reshape(shape)

    return run_taped if tape_name else run_plain


def _enter(tensor: Tensor, read: Reader, tape: Tape) -> Tensor:
    """An input as the kernel sees it, from a leaf of the tape that holds no memory itself.

    What backward needs of the input is kept by the kernel's own graph; the leaf is only a name.
    """
    tape.sources.append(tensor.shape)
    leaf = tape.leaf(read.part(tensor))
    seen = read.view(leaf)
    if seen is leaf:
        seen = leaf.view_as(leaf)
    leaf.data = tensor.new_empty(0)
    return seen


def _factor_shapes(operator: Operator, shards: Shards) -> list[tuple[int, ...] | None]:
    """Per output the shape of its factors; None where it has that shape already."""
    return [
        None
        if all(len(group) == 1 for group in output.layout)
        else tuple(shards.sizes[name] for name in factors(output.layout))
        for output in operator.outputs
    ]


Kernel = Callable[[list[Tensor], list[Tensor], Tape], tuple[Tensor, ...]]


def _regathering(instruction: Forward, operator: Operator, shards: Shards) -> Kernel | None:
    """The kernel of an operator whose weights are gathered for each use (ZeRO-3).

    The graph must not keep the gathered weights alive: where autograd saves one, or a view of it,
    it keeps a note instead, and backward finds the weight that was gathered anew.
    """
    if not instruction.gathered:
        return None

    def run(inputs: list[Tensor], parameters: list[Tensor], tape: Tape) -> tuple[Tensor, ...]:
        places = {
            parameters[slot].untyped_storage().data_ptr(): number
            for number, slot in enumerate(instruction.gathered)
        }

        def pack(tensor: Tensor) -> Any:
            number = places.get(tensor.untyped_storage().data_ptr())
            if number is None:
                return tensor
            return number, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            number, size, stride, offset = kept
            weight: Tensor = tape.gathered[number]
            return weight.as_strided(size, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            outputs = run_kernel(operator, shards, inputs, parameters)
        for slot in instruction.gathered:
            parameters[slot].data = parameters[slot].new_empty(0)
        return outputs

    return run


def backward(instruction: Backward, operator: Operator, shards: Shards, memory: Memory) -> Action:
    """The action of a backward instruction."""
    values = memory.values
    reached = [n for n, names in enumerate(instruction.gradients) if names or instruction.seed]
    sums = [_total(instruction, operator, shards, n, memory) for n in reached]
    returns = _returns(instruction, operator)
    weights = [name for name in instruction.weights if name is not None]

    def run() -> None:
        tape: Tape = values[instruction.tape]
        tape.gathered = [values[name] for name in instruction.gathered]
        found = _gradients(tape, [tape.outputs[n] for n in reached], [total() for total in sums])
        tape.leaves.clear()
        for name, numbers, selects in returns:
            parts = [found[number] for number in numbers]
            values[name] = joined(parts, selects, tape.sources[numbers[0]])
        for name, gradient in zip(weights, found[len(tape.sources) :], strict=True):
            memory.add(name, gradient)

    return run


def _returns(
    instruction: Backward, operator: Operator
) -> list[tuple[str, list[int], list[Select]]]:
    """Per input gradient the leaves it is made of, and what each selects of the source."""
    named = [
        (name, select_of(read))
        for name, read in zip(instruction.inputs, operator.inputs, strict=True)
        if name is not None
    ]
    found: dict[str, tuple[list[int], list[Select]]] = {}
    for number, (name, select) in enumerate(named):
        numbers, selects = found.setdefault(name, ([], []))
        numbers.append(number)
        selects.append(select)
    return [(name, numbers, selects) for name, (numbers, selects) in found.items()]


def _gradients(tape: Tape, outputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Gradients of the leaves; zeros where this rank's kernel did not use one (a bias, say)."""
    found: Sequence[Tensor | None] = [None] * len(tape.leaves)
    if any(output.requires_grad for output in outputs):
        found = torch.autograd.grad(outputs, tape.leaves, gradients, allow_unused=True)
    return [
        leaf.new_zeros(shape) if gradient is None else gradient
        for leaf, shape, gradient in zip(tape.leaves, tape.shapes, found, strict=True)
    ]


def _total(
    instruction: Backward, operator: Operator, shards: Shards, output: int, memory: Memory
) -> Callable[[], Tensor]:
    """The sum of the gradients that have come back to an output."""
    names = instruction.gradients[output]
    shape = shape_of(operator.outputs[output].layout, shards.sizes)
    values = memory.values

    def total() -> Tensor:
        terms: list[Tensor] = [values[name] for name in names]
        result = terms[0]
        for number, term in enumerate(terms[1:]):
            result = result.add_(term) if number else result + term
        return result.reshape(shape)

    def seeded() -> Tensor:
        tape: Tape = values[instruction.tape]
        one = torch.ones_like(tape.outputs[output])
        return one if not names else one + total()

    return seeded if instruction.seed else total
