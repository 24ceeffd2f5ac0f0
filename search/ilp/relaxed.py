"""What a relaxation of a problem gives, however it was solved."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.search.ilp.dual import Dual
from stratagem.search.ilp.instance import Floats, Ints


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Weights by strategy of each node, the duals, and the choice that they suggest."""

    weights: dict[int, Floats]
    dual: Dual
    choice: Ints

    @property
    def num_fractional(self) -> int:
        """Nodes that no strategy has to itself."""
        return sum(bool(weights.max() < 1 - 1e-6) for weights in self.weights.values())
