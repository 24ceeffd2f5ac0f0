"""What the actions of a rank work on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stratagem.executor.actions.named_values import NamedValues
from stratagem.executor.actions.operator_parts import OperatorParts
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.optimizers.make_optimizer import Optimizer
from stratagem.executor.program.programs import Program, RankProgram
from stratagem.executor.state.loss_scale import LossScale
from stratagem.executor.state.parameter_state import ParameterState


@dataclass(eq=False)
class RankState:
    """A rank's place in a program, its values, and how far its training has come.

    Attributes:
        program: what runs.
        mine: this rank's part of it.
        comm: how it talks to others.
        parts: its seats and shards.
        optimizer: of the parameters at home.
        scale: the loss scale of the next step in float16, None in other precisions.
        memory: values by name.
        kept: what it sends itself, by label of the message.
        batch: inputs of the whole batch of this step.
        states: by value, the parameters and buffers that it keeps between steps.
        overflowed: whether a gradient of this step was not finite in float16, on any rank.
        keeps_gradients: whether this step keeps what parameters are updated by.
    """

    program: Program
    mine: RankProgram
    comm: Communicator
    parts: OperatorParts
    optimizer: Optimizer
    scale: LossScale | None = None
    memory: NamedValues = field(default_factory=NamedValues)
    kept: dict[str, deque[Tensor]] = field(default_factory=dict)
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    states: dict[str, ParameterState] = field(default_factory=dict)
    overflowed: bool = False
    keeps_gradients: bool = False
