"""A parameter on a rank: its part, and all of it that outlives a step.

whole model ── cut ──▶ given ── undo ──▶ ┌ value, for operators ┐
                                         │ float32 master       │── kept ──▶ checkpoints,
checkpoint ──── put ───────────────────▶ │ optimizer's state    │            whole tensors,
                                         └ gradient             ┘            bytes held
                                           ▲
                                           └── changed_by ── updates
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import num_bytes
from stratagem.executor.program.programs import Home, Stored, part_shape
from stratagem.executor.resharding.seats import Seat, cut
from stratagem.executor.state.gradient_lists import GradientChange
from stratagem.executor.state.optimizer_state import OptimizerState
from stratagem.simulator.sharding.tensor_parts import part_at
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype

PARAMETER = "parameter"
"""The kind of what is kept of a parameter that is no optimizer state: itself."""


class ParameterState:
    """A parameter or buffer as a rank keeps it between steps.

    Example:
        >>> state = interpreter.states["head.weight"]  # doctest: +SKIP
        >>> state.tensor.dtype, sorted(state.kept())  # doctest: +SKIP
        (torch.float32, ['mean', 'parameter', 'square'])

    Args:
        stored: which parameter, how it lies on its stage's mesh, and how operators call it.
        home: what makes it the authoritative one; None for a copy that only operators read.
        seat: of this rank on the stage's mesh.
        whole: all of the parameter, which is not changed.
        dtype: of the model's parameter; `whole` may be of one with fewer numbers.
        values: this rank's, by name, where operators read it, and may put another in its place.
        device: this rank's.

    Attributes:
        part: which part this is, in factors.
        given: what it began as: a view of all of the parameter, or memory of its own.
        master: what is updated, where that is float32 and operators use less; None elsewhere.
        optimizer: what the optimizer remembers of it; empty where it is not trained.
        gradient: what it was updated by, in a step that kept that.
    """

    def __init__(
        self,
        stored: Stored,
        home: Home | None,
        seat: Seat,
        whole: Tensor,
        dtype: torch.dtype,
        values: dict[str, Any],
        device: torch.device,
    ) -> None:
        part = part_at(stored.sizes, stored.placements, seat.mesh.shape, seat.coordinates)
        assert part is not None, "a rank stores nothing that is pinned elsewhere"
        self.stored, self.home, self.part = stored, home, part
        self._values, self._device = values, device
        self.given = self.cut(whole).to(dtype)
        self.master: Tensor | None = None
        self.optimizer = OptimizerState()
        self.gradient: Tensor | None = None

    @property
    def trained(self) -> bool:
        """Whether it is updated here."""
        return self.home is not None and self.home.trained

    @property
    def tensor(self) -> Tensor:
        """As it is now, in float32 where it is trained so."""
        tensor: Tensor = self._values[self.stored.value] if self.master is None else self.master
        return tensor

    def kept(self) -> dict[str, Tensor]:
        """What a run needs of it to go on, by kind: the parameter, and its optimizer's tensors."""
        return {PARAMETER: self.tensor, **self.optimizer.tensors}

    def cut(self, whole: Tensor) -> Tensor:
        """This part of a whole parameter: all of it, or a copy, which holds no more than that."""
        everything = tuple((0, size) for size in self.stored.sizes)
        box = cut(whole.detach().reshape(self.stored.sizes), everything, self.part.box)
        kept = box if self.part.span is None else box.reshape(-1)[slice(*self.part.span)]
        mine = kept.reshape(part_shape(self.stored.layout, self.part)).contiguous()
        return mine if mine.untyped_storage().nbytes() == num_bytes(mine) else mine.clone()

    def put(self, part: Tensor) -> None:
        """Take a new value, of as many elements, and what operators read of it."""
        shape, dtype = part_shape(self.stored.layout, self.part), torch_dtype(self.stored.dtype)
        part = part.reshape(shape).to(self._device).contiguous()
        self._values[self.stored.value] = part.to(dtype)
        if part.dtype != dtype and self.trained:
            self.master = part

    def undo(self, optimizer: OptimizerState) -> None:
        """Forget all training: the part is as it was given, and `optimizer` has no past."""
        self.put(self.given.clone())
        self.optimizer, self.gradient = optimizer, None

    def changed_by(self, gradient: Tensor) -> GradientChange:
        """An update: what is trained in float32 is changed there, and operators' value follows."""
        value: Tensor = self._values[self.stored.value]
        if self.master is None:
            return GradientChange(self.stored.parameter, value, gradient)
        return GradientChange(self.stored.parameter, self.master, gradient, value)

    def keep_gradient(self, gradient: Tensor, share: float) -> None:
        """Note what it is updated by; of several updates in a step each has a `share`."""
        if share != 1.0:
            before = 0.0 if self.gradient is None else self.gradient
            gradient = before + share * gradient
        self.gradient = gradient
