"""The linear relaxation of a problem, through HiGHS.

Columns are strategies x_i(k) and allowed pairs y_ij(k, l); the pairs add up to the strategies on
either side (the local polytope); rows of memory add up bytes. Rows come in only when a solution
breaks them. The bound does not rest on the solver's tolerances: it is computed from the duals
(see `dual_bound.Dual`), for which any values will do.
"""

from __future__ import annotations

import numpy as np
import scipy

from stratagem.searcher.ilp.bounds.dual_bound import Dual
from stratagem.searcher.ilp.bounds.relaxation_result import Relaxed
from stratagem.searcher.ilp.problem.reductions import ReducedInstance
from stratagem.simulator.base.arrays import Floats

FIRST_ROWS = 32
"""Rows of memory that come in at a time."""
BROKEN = 1e-7
"""Share of a limit beyond which a row counts as broken."""


class LinearProgram:
    """The program of a problem as sparse matrices; rows of memory are added by number."""

    def __init__(self, problem: ReducedInstance, scale: float) -> None:
        assert problem.memory is not None
        self.problem, self.scale = problem, scale
        self.nodes = problem.alive
        sizes = [len(problem.costs[node]) for node in self.nodes]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        self.start = dict(zip(self.nodes, starts.tolist(), strict=False))
        self.num_strategies = int(starts[-1])
        self.edges = [
            (node, other) for node in self.nodes for other in problem.links[node] if node < other
        ]
        self._lay_out()
        self.rows: list[int] = []
        self.infeasible = False

    def _lay_out(self) -> None:
        problem = self.problem
        costs = [problem.costs[node] for node in self.nodes]
        lines, columns, values = [], [], []
        for line, node in enumerate(self.nodes):
            count = len(problem.costs[node])
            lines.append(np.full(count, line))
            columns.append(self.start[node] + np.arange(count))
            values.append(np.ones(count))
        line, column = len(self.nodes), self.num_strategies
        self.edge_lines = []
        for one, other in self.edges:
            table = problem.links[one][other]
            first, second = np.nonzero(np.isfinite(table))
            pairs = column + np.arange(len(first))
            ends = np.concatenate(
                (
                    self.start[one] + np.arange(table.shape[0]),
                    self.start[other] + np.arange(table.shape[1]),
                )
            )
            lines += [line + first, line + table.shape[0] + second, line + np.arange(len(ends))]
            columns += [pairs, pairs, ends]
            values += [np.ones(2 * len(pairs)), -np.ones(len(ends))]
            costs.append(table[first, second])
            self.edge_lines.append(line)
            line += len(ends)
            column += len(pairs)
        shape = (line, column)
        place = (np.concatenate(lines), np.concatenate(columns))
        self.equalities = scipy.sparse.csr_matrix((np.concatenate(values), place), shape=shape)
        self.right = np.zeros(line)
        self.right[: len(self.nodes)] = 1.0
        self.costs = np.concatenate(costs) / self.scale

    def memory_rows(self) -> tuple[scipy.sparse.csr_matrix, Floats, Floats]:
        """The rows in use, their limits, and what each was divided by."""
        memory = self.problem.memory
        assert memory is not None
        lines = [np.empty(0, np.int64)]
        columns, values = list(lines), list(lines)
        wanted = np.array(self.rows, np.int64)
        for node in self.nodes:
            window = memory.windows[node]
            lo, hi = np.searchsorted(wanted, (window.first, window.end))
            nbytes = window.nbytes[:, wanted[lo:hi] - window.first]
            strategy, row = np.nonzero(nbytes)
            lines.append(lo + row)
            columns.append(self.start[node] + strategy)
            values.append(nbytes[strategy, row])
        scale = np.maximum(memory.limits[wanted].astype(np.float64), 1.0)
        place = (np.concatenate(lines), np.concatenate(columns))
        shape = (len(wanted), self.equalities.shape[1])
        matrix = scipy.sparse.csr_matrix(
            (np.concatenate(values) / scale[place[0]], place), shape=shape
        )
        return matrix, memory.limits[wanted] / scale, scale

    def add_broken(self, weights: dict[int, Floats]) -> bool:
        """Take in the rows that a solution breaks most; whether there were any."""
        memory = self.problem.memory
        assert memory is not None
        used = np.zeros(memory.num_rows)
        for node, each in weights.items():
            window = memory.windows[node]
            if window.nbytes.shape[1]:
                used[window.first : window.end] += each @ window.nbytes
        over = used / np.maximum(memory.limits, 1) - 1
        over[self.rows] = 0
        worst = np.argsort(-over, kind="stable")[:FIRST_ROWS]
        new = [int(row) for row in worst if over[row] > BROKEN]
        self.rows = sorted(self.rows + new)
        return bool(new)

    def relax(self, seconds: float | None = None) -> Relaxed | None:
        """Solve the relaxation with the rows in use; None where it has no solution in time."""
        memory = self.problem.memory
        assert memory is not None
        options = {} if seconds is None else {"time_limit": max(seconds, 0.1)}
        matrix, limits, scale = self.memory_rows()
        found = scipy.optimize.linprog(
            self.costs,
            A_ub=matrix,
            b_ub=limits,
            A_eq=self.equalities,
            b_eq=self.right,
            bounds=(0, None),
            method="highs-ds",
            options=options,
        )
        self.infeasible = found.status == 2
        if found.status != 0:
            return None
        weights = {
            node: found.x[self.start[node] : self.start[node] + len(self.problem.costs[node])]
            for node in self.nodes
        }
        prices = np.zeros(memory.num_rows)
        prices[self.rows] = np.maximum(-found.ineqlin.marginals, 0.0) * self.scale / scale
        choice = np.zeros(len(self.problem.costs), np.int64)
        for node, each in weights.items():
            choice[node] = each.argmax()
        return Relaxed(weights, self._dual(found.eqlin.marginals * self.scale, prices), choice)

    def _dual(self, marginals: Floats, prices: Floats) -> Dual:
        dual = Dual(self.problem, prices)
        for (one, other), line in zip(self.edges, self.edge_lines, strict=True):
            rows, columns = self.problem.links[one][other].shape
            dual.messages[one, other] = marginals[line : line + rows]
            dual.messages[other, one] = marginals[line + rows : line + rows + columns]
        return dual
