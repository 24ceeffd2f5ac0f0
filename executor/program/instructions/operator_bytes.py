"""Bytes of what the passes of an operator make on one rank, by what the simulator knows of it.

Shards are taken as large as the largest of their axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stratagem.executor.program.instructions.operands import Piece
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.placement import (
    input_placements,
    local_elements,
    local_sizes,
    output_placements,
)
from stratagem.simulator.kernel_times.memory_traffic import rounded_bytes
from stratagem.simulator.kernel_times.recurrent_workspace import kept_on_cpu
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of, saved_inside, saved_slots
from stratagem.simulator.operators.operator import Operator, factor_sizes


def output_elements(graphs: PlanGraphs, operator: Operator, output: int) -> int:
    """Elements of one of its outputs."""
    made = operator.outputs[output]
    config, shape = graphs.placed(operator)
    sizes = factor_sizes(made.layout, operator.sizes)
    return local_elements(sizes, output_placements(made, config), shape)


def kept_slots(operator: Operator) -> set[int]:
    """The inputs that backward reads.

    A cross entropy keeps its logits, which the simulator counts as its own.
    """
    own = {0} if role_of(operator) is OperatorRole.LOSS else set()
    return set(saved_slots(operator)) | own


def tape_bytes(
    graphs: PlanGraphs,
    operator: Operator,
    outputs: Sequence[int],
    dtypes: Sequence[str],
    piece: Piece | None,
) -> int:
    """What is kept for backward beside the values that are named: what kernels make inside.

    Args:
        graphs: of the program.
        operator: in the graph of its pass.
        outputs: bytes of each.
        dtypes: of each.
        piece: that runs; None for all of it.
    """
    parts = 1 if piece is None else piece.count
    config, shape = graphs.placed(operator)
    training = graphs.plan.training
    sizes = local_sizes(operator, config, shape)
    mesh = graphs.mesh(graphs.plan.stage_of[operator.name])
    workspace = None
    if all(device.is_cpu for device in mesh.device_types(graphs.plan.cluster)):
        # What kernels of CPUs keep in place of what a trace shows.
        workspace = kept_on_cpu(operator, sizes, training)
    if workspace is None:
        tensors, masks = saved_inside(operator)
        inside = sum(
            nbytes * tensors + nbytes // DTYPE_BYTES[dtype] * masks
            for nbytes, dtype in zip(outputs, dtypes, strict=True)
        )
    else:
        inside = workspace // parts
    # The operands of products are kept as they were rounded.
    return inside + rounded_bytes(operator, sizes, training) // parts


def input_gradient_bytes(
    graphs: PlanGraphs, operator: Operator, slot: int, microbatch: int
) -> int:
    """Of the gradient of an input, in the factors of the whole source."""
    read = operator.inputs[slot]
    config, shape = graphs.placed(operator)
    source = graphs.operator(read.source, microbatch)
    made = source.outputs[read.output]
    sizes = factor_sizes(made.layout, source.sizes)
    itemsize = graphs.plan.training.bytes_of(made.dtype)
    return local_elements(sizes, input_placements(read, config), shape) * itemsize


def earlier_gradient_bytes(
    graphs: PlanGraphs, operator: Operator, number: int, microbatch: int
) -> int:
    """Of the gradient of what a prefix reads of the earlier slice `number`."""
    own = graphs.slice_of(microbatch)
    assert own is not None
    part = graphs.slices[number]
    elements = output_elements(graphs, operator, 0) // own.stop * (part.stop - part.start)
    return elements * graphs.plan.training.bytes_of(operator.outputs[0].dtype)


def weight_gradient_bytes(graphs: PlanGraphs, operator: Operator, weight: int, dtype: str) -> int:
    """Of the gradient of one of its weights, in the dtype in which it is added up."""
    config, shape = graphs.placed(operator)
    sizes = local_sizes(operator, config, shape)
    layout = operator.weights[weight].layout
    return math.prod(sizes[name] for group in layout for name in group) * DTYPE_BYTES[dtype]
