"""What a relaxation of a problem gives, however it was solved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stratagem.searcher.ilp.bounds.dual_bound import Dual
from stratagem.simulator.base.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Weights by strategy of each node, the duals, and the choice that they suggest."""

    weights: dict[int, Floats]
    dual: Dual
    choice: Ints

    def keep(self, node: int, strategies: Ints) -> None:
        """Let a node have only these of its strategies."""
        self.weights[node] = self.weights[node][strategies]
        place = np.flatnonzero(strategies == self.choice[node])
        self.choice[node] = place[0] if len(place) else self.weights[node].argmax()

    @property
    def num_fractional(self) -> int:
        """Nodes that no strategy has to itself."""
        return sum(bool(weights.max() < 1 - 1e-6) for weights in self.weights.values())
