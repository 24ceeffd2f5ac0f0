"""Lower bounds by duality, and what they rule out.

Messages move costs between nodes and their edges; prices charge rows of memory. For any messages
m and prices p ≥ 0,

    Σ_i min_k θ_i(k) + Σ_ij min_kl θ_ij(k, l) − Σ_r p_r · limit_r   is at most the optimum, with
    θ_i(k) = c_i(k) + Σ_r p_r · u_ir(k) + Σ_j m_ij(k),
    θ_ij(k, l) = c_ij(k, l) − m_ij(k) − m_ji(l)

(Wainwright et al. 2005; Werner 2007). A strategy whose own least, given the bound of everything
else, is not under the incumbent cannot be in a better solution and is dropped.
"""

from __future__ import annotations

import numpy as np

from stratagem.searcher.ilp.problem.reductions import ReducedInstance, keep
from stratagem.simulator.base.arrays import Floats, Ints


class Dual:
    """Messages and prices of a problem. `messages[i, j]` go from the edge ij to node i.

    Signs are those of the duals of the marginal constraints of `linear_relaxation.Program`.
    """

    def __init__(self, problem: ReducedInstance, prices: Floats) -> None:
        self.problem = problem
        self.prices = prices
        self.messages: dict[tuple[int, int], Floats] = {}

    def node_costs(self, node: int) -> Floats:
        """θ of a node."""
        problem = self.problem
        assert problem.memory is not None
        costs = problem.costs[node].copy()
        window = problem.memory.windows[node]
        if window.nbytes.shape[1]:
            costs += window.nbytes @ self.prices[window.first : window.end]
        for other in problem.links[node]:
            costs += self.messages[node, other]
        return costs

    def edge_costs(self, one: int, other: int) -> Floats:
        """θ of an edge, rows by the strategies of `one`."""
        table = self.problem.links[one][other]
        return table - self.messages[one, other][:, None] - self.messages[other, one][None, :]

    def bound(self) -> float:
        """A lower bound of the problem's cost, its constant included."""
        problem = self.problem
        assert problem.memory is not None
        total = problem.constant - float(self.prices @ problem.memory.limits)
        for node in problem.alive:
            total += float(self.node_costs(node).min())
            total += sum(
                float(self.edge_costs(node, other).min())
                for other in problem.links[node]
                if node < other
            )
        return total

    def fix(self, cutoff: float) -> tuple[int, dict[int, Ints]]:
        """Drop all strategies and pairs that no solution at or under `cutoff` can have.

        Gives how many, and what is left of nodes that lost some.

        Raises:
            ContradictionError: there is no such solution.
        """
        problem = self.problem
        slack = cutoff - self.bound()
        nodes = {node: self.node_costs(node) for node in problem.alive}
        dropped = 0
        left: dict[int, Ints] = {}
        star = {node: costs - costs.min() for node, costs in nodes.items()}
        for node in problem.alive:
            for other in list(problem.links[node]):
                if other < node:
                    continue
                edge = self.edge_costs(node, other)
                edge -= edge.min()
                one, two = nodes[node] - nodes[node].min(), nodes[other] - nodes[other].min()
                pair = edge + one[:, None] + two[None, :]
                star[node] += (edge + two[None, :]).min(axis=1)
                star[other] += (edge + one[:, None]).min(axis=0)
                table = problem.links[node][other]
                beyond = (pair > slack) & np.isfinite(table)
                if beyond.any():
                    dropped += int(beyond.sum())
                    table = problem.tables.intern(np.where(beyond, np.inf, table))
                    problem.links[node][other] = table
                    problem.links[other][node] = problem.tables.transpose(table)
        for node, costs in star.items():
            kept = np.flatnonzero(costs <= slack)
            if len(kept) < len(costs):
                dropped += len(costs) - len(kept)
                left[node] = kept
                keep(problem, node, kept)
                for other in problem.links[node]:
                    self.messages[node, other] = self.messages[node, other][kept]
        return dropped, left
