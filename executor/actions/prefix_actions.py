"""Running prefixes: keys and values of earlier token slices in front of a slice's own.

Autograd sees the view of a slice's own part only. The backward pass splits the gradient of all
positions; what belongs to earlier slices is added up for them (see `prefix_values`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from stratagem.executor.actions.input_views import joined, reader, select_of
from stratagem.executor.actions.named_values import NamedValues
from stratagem.executor.actions.operator_actions import Tape, enter, gradients_of
from stratagem.executor.actions.registry import Action
from stratagem.executor.program.instructions import Backward, Forward
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.graph.token_slices import TokenSlice
from stratagem.simulator.operators.operator import Operator, factor_sizes, shape_of
from stratagem.simulator.torch_ops.kernels.run_kernel import run_kernel
from stratagem.simulator.torch_ops.kernels.shards import Shards
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype


def forward(
    instruction: Forward,
    operator: Operator,
    parts: Sequence[Shards],
    seat: Seat,
    memory: NamedValues,
) -> Action:
    """The action of the forward instruction of a prefix.

    Args:
        parts: what this rank has of the prefix in each slice up to this one.
        seat: from which sources are read.
    """
    values, dtype = memory.values, torch_dtype(instruction.dtypes[0])
    (read,) = operator.inputs
    own, *before = instruction.inputs
    mine = reader(read, own, parts[-1], seat)
    readers = [
        (operand.value, reader(read, operand, shards, seat))
        for operand, shards in zip(before, parts, strict=False)
    ]
    made = factor_sizes(operator.outputs[0].layout, parts[-1].sizes)

    def run() -> None:
        tape = Tape()
        with torch.enable_grad():
            seen = enter(values[own.value], mine, tape)
        tape.edges = (get_gradient_edge(seen),)
        inputs = [seen.detach(), *(each.view(each.part(values[name])) for name, each in readers)]
        (output,) = run_kernel(operator, parts[-1], inputs, ())
        values[instruction.outputs[0]] = output.to(dtype).reshape(made)
        if instruction.tape is not None:
            values[instruction.tape] = tape

    return run


def backward(
    instruction: Backward,
    operator: Operator,
    shards: Shards,
    slices: Sequence[TokenSlice],
    memory: NamedValues,
) -> Action:
    """The action of the backward instruction of a prefix.

    Args:
        shards: what this rank has of the prefix.
        slices: all token slices.
    """
    values = memory.values
    arrived, later = instruction.gradients
    own, *before = instruction.inputs
    lengths = [each.stop - each.start for each in slices[: len(instruction.inputs)]]
    shape = shape_of(operator.outputs[0].layout, shards.sizes)
    selects = [select_of(operator.inputs[0])]

    def run() -> None:
        total: Tensor = sum((values[name] for name in arrived[1:]), start=values[arrived[0]])
        *earlier, mine = total.reshape(shape).split_with_sizes(lengths, operator.attributes["dim"])
        for name, part in zip(before, earlier, strict=True):
            assert name is not None
            # The first is a copy: it outlives the gradient of all positions.
            memory.add(name, part if name in instruction.added else part.clone())
        for name in later:
            mine = mine + values[name]
        tape: Tape = values[instruction.tape]
        found = gradients_of(tape, [0], [mine], slice(None))
        if own is not None:
            made = joined(found, selects, tape.sources[0])
            if own in instruction.added:
                memory.add(own, made)
            else:
                values[own] = made

    return run
