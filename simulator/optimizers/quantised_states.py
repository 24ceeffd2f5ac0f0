"""States of optimizers in 8 bits, by blocks that share a scale."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.simulator.base.field_types import check_fields

SCALES = {"mean": "mean_scale", "square": "square_scale"}
"""What is kept of the blocks of each mean."""


@dataclass(frozen=True)
class Blocks:
    """Which parameters have means in 8 bits, and how many of their elements share a scale.

    Dettmers et al. 2022, "8-bit optimizers via block-wise quantization" (arXiv 2110.02861); the
    settings are those of torchao and bitsandbytes.

    Example:
        >>> Blocks().count(8192), Blocks().count(4095), Blocks().count(5000)
        (32, 0, 0)

    Attributes:
        size: elements of a block.
        least: parameters with fewer elements keep their means as they are.

    Raises:
        ValueError: one is below 1.
    """

    size: int = 256
    least: int = 4096

    def __post_init__(self) -> None:
        check_fields(self, "blocks")
        if self.size < 1 or self.least < 1:
            raise ValueError(
                f"blocks have size {self.size} and parameters {self.least} elements at least; "
                "both must be 1 or more"
            )

    def count(self, elements: int) -> int:
        """How many blocks a parameter has; 0 where it is small, or no whole number of them."""
        blocked = elements >= self.least and elements % self.size == 0
        return elements // self.size if blocked else 0


AS_TORCHAO = Blocks()
"""The settings that torchao's optimizers have unless they are given others."""
