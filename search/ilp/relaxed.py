"""What a relaxation of a problem gives, however it was solved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stratagem.search.ilp.dual import Dual
from stratagem.search.ilp.instance import Floats, Ints


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution of the relaxation: weights by strategy of each node, and the duals."""

    weights: dict[int, Floats]
    dual: Dual

    @property
    def num_fractional(self) -> int:
        """Nodes that no strategy has to itself."""
        return sum(bool(weights.max() < 1 - 1e-6) for weights in self.weights.values())

    def rounded(self, num_nodes: int) -> Ints:
        """The heaviest strategy of every node."""
        choice = np.zeros(num_nodes, np.int64)
        for node, weights in self.weights.items():
            choice[node] = weights.argmax()
        return choice
