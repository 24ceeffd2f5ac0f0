"""Muon's orthogonalisation of a matrix, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stratagem.simulator.base.field_types import check_fields

ADJUSTMENTS = ("original", "match_rms_adamw")
"""How a step may be scaled by the shape of its matrix."""


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration X ← a X + (b A + c A²) X, A = X Xᵀ, which brings singular values near 1.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the settings are
    those of `torch.optim.Muon`, which computes in bfloat16.

    Example:
        >>> NewtonSchulz().flops(64, 256) == 5 * (4 * 64**2 * 256 + 2 * 64**3)
        True

    Attributes:
        coefficients: a, b and c.
        steps: how many.
        epsilon: the least norm by which a matrix is divided before.
        adjustment: of a step: ``original``, √max(1, rows / columns), or ``match_rms_adamw``,
            0.2 √max(rows, columns).

    Raises:
        ValueError: an unknown adjustment, or no step.
    """

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    epsilon: float = 1e-7
    adjustment: str = "original"

    def __post_init__(self) -> None:
        check_fields(self, "Newton–Schulz")
        if self.adjustment not in ADJUSTMENTS or self.steps < 1:
            raise ValueError(
                f"Newton–Schulz: adjustment is {self.adjustment!r} and steps are {self.steps}; "
                f"choose one of {', '.join(ADJUSTMENTS)}, and at least 1"
            )

    def flops(self, rows: int, columns: int) -> float:
        """Operations of all steps on a matrix: three products each."""
        short, long = sorted((rows, columns))
        return self.steps * (4.0 * short**2 * long + 2.0 * short**3)

    def ratio(self, rows: int, columns: int) -> float:
        """What the step of a matrix is multiplied by."""
        if self.adjustment == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


AS_TORCH = NewtonSchulz()
"""The settings that `torch.optim.Muon` has unless it is given others."""
