"""Kinds of operators of one's own: how they are priced, run and captured, told in one call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stratagem.simulator.operators.kinds.kind_record import OperatorKind
from stratagem.simulator.operators.kinds.operator_kinds import register_kind
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS, Handler
from stratagem.simulator.torch_ops.kernels.run_kernel import KERNELS
from stratagem.simulator.torch_ops.kernels.shards import Kernel


def register_operator(kind: OperatorKind, kernel: Kernel, captured: Mapping[str, Handler]) -> None:
    """Make a kind of operator known: to capture, to prices and searches, and to runs.

    Example:
        >>> from stratagem.simulator.operators.kinds.kind_record import OperatorRole, no_operations
        >>> from stratagem.simulator.operators.kinds.operator_kinds import KINDS
        >>> from stratagem.simulator.operators.kinds.traffic import EachTensorOnce
        >>> from stratagem.simulator.operators.saved_tensors import SavedTensors
        >>> from stratagem.simulator.torch_ops.aten.arguments import reads
        >>> flip = OperatorKind(
        ...     name="flip",
        ...     role=OperatorRole.OTHER,
        ...     flops=no_operations,
        ...     backward_flops=1.0,
        ...     product=None,
        ...     traffic=EachTensorOnce(),
        ...     saved=SavedTensors(inputs=()),
        ...     weight_share=0.0,
        ... )
        >>> flipped = lambda operator, shards, inputs, weights: inputs[0].flip(0)
        >>> register_operator(flip, flipped, {"flip": reads("self")(lambda call: None)})
        >>> "flip" in KINDS, "flip" in KERNELS, "flip" in HANDLERS
        (True, True, True)
        >>> for table in (KINDS, KERNELS, HANDLERS):
        ...     del table["flip"]

    Processes that train import the module of the model: where that calls this, they know it too.

    Args:
        kind: what is known of it where there is no torch.
        kernel: the torch function that runs it on local shards, in profiles and in training.
        captured: by the name of an aten operator, what makes this operator of a call of it, and
            which arguments of the call it `reads`; calls with others are refused.

    Raises:
        ValueError: the kind is there already, or one of the aten operators is not, or is captured
            as another.
    """
    for name in captured:
        if name in HANDLERS:
            raise ValueError(
                f"aten operator {name!r}, one of {len(HANDLERS)} that capture knows, has a "
                f"handler already: leave it out of those that {kind.name!r} is captured from"
            )
        if "::" not in name and not hasattr(torch.ops.aten, name):
            raise ValueError(
                f"kind {kind.name!r} is captured from {name!r}, and torch {torch.__version__} has "
                f"no operator aten::{name}; operators of other libraries are named LIBRARY::NAME"
            )
    register_kind(kind)
    KERNELS[kind.name] = kernel
    HANDLERS.update(captured)
