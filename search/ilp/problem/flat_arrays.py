"""A problem laid out as arrays, for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.searcher.ilp.problem._reduction_kernels import EdgeArrays
from stratagem.searcher.ilp.problem.reductions import ReducedInstance
from stratagem.simulator.base.arrays import Floats, Ints

FORBIDDEN_FACTOR = 100.0
"""What a forbidden pair costs, as a multiple of the dearest allowed one: sums stay finite."""


@dataclass(frozen=True, eq=False)
class FlatInstance:
    """Costs and edges of the nodes that are alive.

    `num_nodes` counts those of the problem that are not alive, too.
    """

    num_nodes: int
    nodes: list[int]
    starts: Ints
    costs: Floats
    edges: EdgeArrays

    @classmethod
    def of(cls, problem: ReducedInstance) -> FlatInstance:
        """Lay out a problem."""
        nodes = problem.alive
        place = {node: number for number, node in enumerate(nodes)}
        number = {}
        offsets: dict[int, int] = {}
        pool: list[Floats] = []
        size = 0
        adjacency = [0]
        neighbours: list[int] = []
        tables: list[int] = []
        sizes: list[int] = []
        for node in nodes:
            for other, table in problem.links[node].items():
                if id(table) not in offsets:
                    offsets[id(table)] = size
                    pool.append(table.ravel())
                    size += table.size
                number[node, other] = len(neighbours)
                neighbours.append(place[other])
                tables.append(offsets[id(table)])
                sizes.append(len(table))
            adjacency.append(len(neighbours))
        costs = [problem.costs[node] for node in nodes]
        flat = np.concatenate([*pool, np.empty(0)])
        finite = np.isfinite(flat)
        dearest = max(
            float(np.max(np.abs(flat), initial=1.0, where=finite)),
            max((float(np.abs(each).max()) for each in costs), default=1.0),
        )
        flat[~finite] = FORBIDDEN_FACTOR * dearest
        return cls(
            num_nodes=len(problem.costs),
            nodes=nodes,
            starts=np.concatenate(([0], np.cumsum([len(each) for each in costs]))).astype(
                np.int64
            ),
            costs=np.concatenate([*costs, np.empty(0)]),
            edges=EdgeArrays(
                adjacency=np.array(adjacency, np.int64),
                neighbours=np.array(neighbours, np.int64),
                reverse=np.array([number[other, node] for node, other in number], np.int64),
                tables=np.array(tables, np.int64),
                pool=flat,
                places=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
            ),
        )

    def full(self, choice: Ints) -> Ints:
        """A choice of the nodes that are alive, as one of all nodes of the problem."""
        full = np.zeros(self.num_nodes, np.int64)
        full[self.nodes] = choice
        return full

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Both nodes of every directed edge."""
        sources = np.repeat(np.arange(len(self.nodes)), np.diff(self.edges.adjacency)).tolist()
        targets = self.edges.neighbours.tolist()
        return [(self.nodes[i], self.nodes[j]) for i, j in zip(sources, targets, strict=True)]
