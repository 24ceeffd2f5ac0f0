"""What an optimizer remembers of a parameter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class OptimizerState:
    """What an optimizer remembers of a rank's part of a parameter.

    Example:
        >>> update = make_optimizer(Training(optimizer="adam"))  # doctest: +SKIP
        >>> update("weight", weight, gradient)  # doctest: +SKIP
        >>> state = update.state("weight")  # doctest: +SKIP
        >>> state.updates, sorted(state.tensors)  # doctest: +SKIP
        (1, ['mean', 'square'])

    Attributes:
        tensors: by their kind, of the shape of the part or, what `WHOLE_STATES` names, of all of
            the parameter, whole on every rank; none before it is updated for the first time.
        updates: how often it has been updated.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.updates = 0

    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Go on from what another one has."""
        self.tensors = {kind: each.contiguous() for kind, each in tensors.items()}
        self.updates = updates
