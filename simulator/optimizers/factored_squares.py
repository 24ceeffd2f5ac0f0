"""How Adafactor holds the squares of gradients, and how long its steps are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.simulator.base.field_types import check_fields


@dataclass(frozen=True)
class FactoredSquares:
    """Settings of Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), as `torch.optim` has them.

    Example:
        >>> FactoredSquares().means((2, 30, 40))
        140

    Attributes:
        decay: the means at step t are left (1 − t^decay) of what they were; −1 to 0.
        epsilon: what is divided by at least; None for that of the dtype.
        scale: by which a step is as long as the parameter at least.
        threshold: root mean square beyond which a step is made shorter.

    Raises:
        ValueError: a decay above 0, an epsilon or scale below, or a threshold that is not above.
    """

    decay: float = -0.8
    epsilon: float | None = None
    scale: float = 1e-3
    threshold: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "Adafactor")
        if self.decay > 0 or self.scale < 0 or self.threshold <= 0 or (self.epsilon or 0) < 0:
            raise ValueError(
                f"Adafactor: decay is {self.decay}, epsilon {self.epsilon}, scale {self.scale} "
                f"and threshold {self.threshold}; decay must be 0 or less, epsilon and scale 0 or "
                "more, the threshold above 0"
            )

    def means(self, shape: Sequence[int]) -> int:
        """Scalars that are kept of a parameter with two dims or more: of rows, and of columns."""
        elements = math.prod(shape)
        return elements // shape[-1] + elements // shape[-2]


AS_TORCH = FactoredSquares()
"""The settings that `torch.optim.Adafactor` has unless it is given others."""
