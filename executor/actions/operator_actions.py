"""Running operators: forward on local shards with a tape, backward by autograd over that tape.

Each operator is an autograd graph of its own. Its leaves are the inputs in the factors of their
sources and the weights; the view onto the operator's layout is inside the graph, so that gradients
come back in the factors of the source:

    leaf ──select, permute, reshape──▶ kernel ──▶ output
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stratagem.executor.actions.input_views import (
    Reader,
    Select,
    joined,
    reader,
    select_of,
)
from stratagem.executor.actions.named_values import NamedValues
from stratagem.executor.actions.registry import Action
from stratagem.executor.actions.views_of_memory import ViewOfMemory, begins_inside
from stratagem.executor.program.instructions import Backward, BackwardPart, Forward
from stratagem.executor.program.instructions.treatments import portion_of
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.operators.operator import Operator, factors, shape_of
from stratagem.simulator.torch_ops.kernels.run_kernel import prepare_kernel
from stratagem.simulator.torch_ops.kernels.shards import Shards
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype


@dataclass
class Tape:
    """What a backward pass needs.

    Attributes:
        edges: where the graph begins behind each output; None where it does not. The outputs
            themselves are not held: what backward needs of them, the graph keeps.
        kinds: shape, dtype and device of the outputs.
        leaves: inputs and then weights with a gradient.
        shapes: of the leaves.
        sources: shapes of the whole values of which the inputs are parts.
        anew: what was not kept as the kernel sees it, brought back for the backward pass.
    """

    edges: tuple[GradientEdge | None, ...] = ()
    kinds: tuple[tuple[torch.Size, torch.dtype, torch.device], ...] = ()
    leaves: list[Tensor] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    sources: list[torch.Size] = field(default_factory=list)
    anew: list[Tensor] = field(default_factory=list)

    def leaf(self, tensor: Tensor) -> Tensor:
        """A new leaf with the memory of `tensor`."""
        made = tensor.detach().requires_grad_()
        self.leaves.append(made)
        self.shapes.append(made.shape)
        return made


def forward(
    instruction: Forward,
    operator: Operator,
    shards: Shards,
    flows: Sequence[bool],
    seat: Seat,
    memory: NamedValues,
) -> Action:
    """The action of a forward instruction.

    Args:
        flows: per input and then per weight, whether a gradient is wanted.
        seat: from which sources are read.
    """
    values = memory.values
    names = [operand.value for operand in instruction.inputs]
    readers = [
        reader(read, operand, shards, seat)
        for read, operand in zip(operator.inputs, instruction.inputs, strict=True)
    ]
    slots = list(zip(names, readers, flows, strict=False))
    weights = list(zip(instruction.weights, flows[len(names) :], strict=True))
    (made_name,), (shape,) = instruction.outputs, factor_shapes(operator, shards)
    run = kernel_of(instruction, operator, shards)
    kernel = _forgetting(instruction, run) or (
        lambda inputs, parameters, tape: run(inputs, parameters)
    )
    tape_name, again = instruction.tape or "", instruction.again

    def run_taped() -> None:
        tape = Tape()
        inputs: list[Tensor] = []
        with torch.enable_grad():
            for name, read, flow in slots:
                value = values[name]
                inputs.append(enter(value, read, tape) if flow else read.view(read.part(value)))
            parameters: list[Tensor] = []
            for name, flow in weights:
                value = values[name]
                parameters.append(tape.leaf(value) if flow else constant(value, again))
            output = kernel(inputs, parameters, tape)
            tape.edges = (get_gradient_edge(output) if output.requires_grad else None,)
        tape.kinds = ((output.shape, output.dtype, output.device),)
        values[tape_name] = tape
        _store(output)

    def run_plain() -> None:
        inputs = [read.view(read.part(values[name])) for name, read, _ in slots]
        parameters = [constant(values[name], again) for name, _ in weights]
        _store(run(inputs, parameters))

    def _store(output: Tensor) -> None:
        made = output.detach()
        values[made_name] = made if shape is None else made.reshape(shape)

    return run_taped if tape_name else run_plain


def constant(value: Tensor, again: bool) -> Tensor:
    """A weight without a gradient: running statistics count a microbatch once, not `again`."""
    return value.clone() if again else value


def enter(tensor: Tensor, read: Reader, tape: Tape) -> Tensor:
    """An input as the kernel sees it, from a leaf of the tape that holds no memory itself.

    What backward needs of the input is kept by the kernel's own graph; the leaf is only a name.
    """
    tape.sources.append(read.cut_of(tensor).shape)
    leaf = tape.leaf(read.part(tensor))
    seen = read.view(leaf)
    if seen is leaf:
        seen = leaf.view_as(leaf)
    leaf.data = tensor.new_empty(0)
    return seen


def factor_shapes(operator: Operator, shards: Shards) -> list[tuple[int, ...] | None]:
    """Per output the shape of its factors; None where it has that shape already."""
    return [
        None
        if all(len(group) == 1 for group in output.layout)
        else tuple(shards.sizes[name] for name in factors(output.layout))
        for output in operator.outputs
    ]


Kernel = Callable[[list[Tensor], list[Tensor]], Tensor]
TapedKernel = Callable[[list[Tensor], list[Tensor], Tape], Tensor]


def kernel_of(instruction: Forward, operator: Operator, shards: Shards) -> Kernel:
    """The kernel, with its output in the dtype that the plan runs in."""
    (dtype,) = [torch_dtype(dtype) for dtype in instruction.dtypes]
    run = prepare_kernel(operator, shards)

    def in_dtype(inputs: list[Tensor], parameters: list[Tensor]) -> Tensor:
        made = run(inputs, parameters)
        return made if made.dtype == dtype else made.to(dtype)

    return in_dtype


def _forgetting(instruction: Forward, kernel: Kernel) -> TapedKernel | None:
    """The kernel of an operator some of whose inputs or weights are dropped behind it.

    Weights are gathered for each use under ZeRO-3, and inputs are dropped to be made again. The
    graph must not keep them alive: where autograd saves one, or a view of it, it keeps a note
    instead, and backward finds what was brought back.
    """
    if not instruction.gathered and not instruction.remade:
        return None

    def run(inputs: list[Tensor], parameters: list[Tensor], tape: Tape) -> Tensor:
        dropped = [inputs[slot] for slot in instruction.remade]
        dropped += [parameters[slot] for slot in instruction.gathered]
        places: dict[int, list[int]] = {}
        strides = [tensor.stride() for tensor in dropped]
        for number, tensor in enumerate(dropped):
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)

        def pack(tensor: Tensor) -> Any:
            for number in places.get(tensor.untyped_storage().data_ptr(), ()):
                offset = tensor.data_ptr() - dropped[number].data_ptr()
                if begins_inside(dropped[number], offset // dropped[number].itemsize):
                    return number, ViewOfMemory.of(tensor, offset)
            return tensor

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            number: int = kept[0]
            view: ViewOfMemory = kept[1]
            anew = tape.anew[number]
            if anew.stride() != strides[number]:
                # It came back whole where pieces were read, or the other way round.
                alike = torch.empty_strided(
                    anew.size(), strides[number], dtype=anew.dtype, device=anew.device
                )
                anew = tape.anew[number] = alike.copy_(anew)
            return view.on(anew)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = kernel(inputs, parameters)
        dropped.clear()  # The graph keeps `pack` as long as what it packed.
        if any(output is each for each in parameters):
            output = output.view_as(output)  # What hands a weight on is not emptied with it.
        for slot in instruction.gathered:
            if parameters[slot].requires_grad:  # A leaf of the tape; a frozen one is the value.
                parameters[slot].data = parameters[slot].new_empty(0)
        return output

    return run


def backward(
    instruction: Backward, operator: Operator, shards: Shards, seat: Seat, memory: NamedValues
) -> Action:
    """The action of a backward instruction."""
    values = memory.values
    reached = [n for n, names in enumerate(instruction.gradients) if names or instruction.seed]
    sums = [
        total_of(instruction, operator, shards, n, memory, lambda: values[instruction.tape])
        for n in reached
    ]
    returns = returns_of(
        [
            (name, select_of(read))
            for name, read in zip(instruction.inputs, operator.inputs, strict=True)
            if name is not None
        ]
    )
    added = frozenset(instruction.added)
    names = [name for name in instruction.weights if name is not None]
    weights = list(zip(names, map(torch_dtype, instruction.dtypes), strict=True))
    anew = _anew(instruction, operator, shards, seat, memory)

    def run_all() -> None:
        tape: Tape = values[instruction.tape]
        tape.anew = anew()
        totals = [total() for total in sums]
        found = gradients_of(tape, reached, totals, slice(None))
        tape.leaves.clear()
        give_back(returns, added, tape, found, memory)
        add_weights(weights, found[len(tape.sources) :], memory)

    def run_inputs() -> None:
        tape: Tape = values[instruction.tape]
        tape.anew = anew()
        totals = [total() for total in sums]
        values.update(zip(instruction.totals, totals, strict=True))
        wanted = slice(len(tape.sources))
        found = gradients_of(tape, reached, totals, wanted, again=True)
        give_back(returns, added, tape, found, memory)
        tape.anew = []

    def run_weights() -> None:
        tape: Tape = values[instruction.tape]
        tape.anew = anew()
        totals = [values[name] for name in instruction.totals]
        wanted = slice(len(tape.sources), None)
        found = gradients_of(tape, reached, totals, wanted)
        tape.leaves.clear()
        add_weights(weights, found, memory)

    return {
        BackwardPart.ALL: run_all,
        BackwardPart.INPUTS: run_inputs,
        BackwardPart.WEIGHTS: run_weights,
    }[instruction.part]


def _anew(
    instruction: Backward, operator: Operator, shards: Shards, seat: Seat, memory: NamedValues
) -> Callable[[], list[Tensor]]:
    """What the tape did not keep, as the kernel saw it."""
    count = len(instruction.remade)
    readers = [
        (operand.value, reader(operator.inputs[slot], operand, shards, seat))
        for slot, operand in zip(instruction.remade, instruction.anew, strict=False)
    ]
    weights = [operand.value for operand in instruction.anew[count:]]
    values = memory.values

    def brought() -> list[Tensor]:
        inputs = [read.view(read.part(values[name])) for name, read in readers]
        return inputs + [values[name] for name in weights]

    return brought


Returns = list[tuple[str, list[int], list[Select]]]
"""Per gradient of an input the leaves it is made of, and what each selects of the source."""


def returns_of(named: Sequence[tuple[str, Select]]) -> Returns:
    """What is returned for inputs, by the name of each one's gradient and what it selects."""
    found: dict[str, tuple[list[int], list[Select]]] = {}
    for number, (name, select) in enumerate(named):
        numbers, selects = found.setdefault(name, ([], []))
        numbers.append(number)
        selects.append(select)
    return [(name, numbers, selects) for name, (numbers, selects) in found.items()]


def give_back(
    returns: Returns, added: Set[str], tape: Tape, found: Sequence[Tensor], memory: NamedValues
) -> None:
    """Keep the gradients of inputs, of which some are `added` to what is there."""
    for name, numbers, selects in returns:
        parts = [found[number] for number in numbers]
        made = joined(parts, selects, tape.sources[numbers[0]])
        if name in added:
            memory.add(name, made)
        else:
            memory.values[name] = made


def add_weights(
    weights: Sequence[tuple[str, torch.dtype]], found: Sequence[Tensor], memory: NamedValues
) -> None:
    """Add the gradients of weights to what is there, in the dtype in which that is."""
    for (name, dtype), gradient in zip(weights, found, strict=True):
        memory.add(name, gradient.to(dtype))


def gradients_of(
    tape: Tape, reached: Sequence[int], totals: list[Tensor], wanted: slice, *, again: bool = False
) -> list[Tensor]:
    """Gradients of the wanted leaves; zeros where this rank's kernel did not use one (a bias).

    Args:
        reached: the outputs that have a gradient, and `totals` those gradients.
        again: whether the tape is needed once more.
    """
    leaves, shapes = tape.leaves[wanted], tape.shapes[wanted]
    ends = [(tape.edges[n], total) for n, total in zip(reached, totals, strict=True)]
    edges = [edge for edge, _ in ends if edge is not None]
    given = [total for edge, total in ends if edge is not None]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if leaves and edges:
        found = torch.autograd.grad(edges, leaves, given, retain_graph=again, allow_unused=True)
    return found_or_zeros(leaves, shapes, found)


def found_or_zeros(
    leaves: Sequence[Tensor], shapes: Sequence[torch.Size], found: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients of leaves, zeros for those that were not used."""
    return [
        leaf.new_zeros(shape) if gradient is None else gradient
        for leaf, shape, gradient in zip(leaves, shapes, found, strict=True)
    ]


def total_of(
    instruction: Backward,
    operator: Operator,
    shards: Shards,
    output: int,
    memory: NamedValues,
    tape_of: Callable[[], Tape],
) -> Callable[[], Tensor]:
    """The sum of the gradients that have come back to an output."""
    names = instruction.gradients[output]
    shape = shape_of(operator.outputs[output].layout, shards.sizes)
    values, portion = memory.values, instruction.portion

    def term_of(name: str) -> Tensor:
        tensor: Tensor = values[name]
        return tensor if portion is None else portion_of(tensor, portion)

    def total() -> Tensor:
        terms = [term_of(name) for name in names]
        result = terms[0]
        for number, term in enumerate(terms[1:]):
            result = result.add_(term) if number else result + term
        return result.reshape(shape)

    def seeded() -> Tensor:
        size, dtype, device = tape_of().kinds[output]
        seed = instruction.seed * memory.seed
        one = torch.full(size, seed, dtype=dtype, device=device)
        return one if not names else one + total()

    return seeded if instruction.seed else total
