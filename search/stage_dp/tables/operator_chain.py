"""A graph as a chain: operators in order, edges by their producers, where it may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.searcher.stage_dp.tables.compact_graph import CompactGraph, compact_graph
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.sharding.choice import Choice

ALL_CUTS = 40
"""Graphs of up to so many operators are cut between any two."""


@dataclass(frozen=True, eq=False)
class OperatorChain:
    """The operators of a graph in graph order, without sources, and the edges between them.

    A graph that is no chain is linearised: what it says is true of stages of consecutive
    operators, and an edge that jumps over a stage is charged where it leaves.

    Attributes:
        compact: the graph and its compact form, in which prices are looked up.
        operators: [N], indices into the graph.
        cuts: places among the operators where a stage may begin or end, 0 and N included.
        edge_offsets: [N + 1], edges are sorted by producer.
        edge_starts: [E], place of the producer.
        edge_ends: [E], place of the consumer.
        edge_numbers: [E], which edge of the compact graph it is like.
        ties: [T, 2], places of the owner and of another user of a parameter.
        tied: [T], the names of these parameters.
    """

    compact: CompactGraph
    operators: Ints
    cuts: Ints
    edge_offsets: Ints
    edge_starts: Ints
    edge_ends: Ints
    edge_numbers: Ints
    ties: Ints
    tied: tuple[str, ...]

    @property
    def graph(self) -> OperatorGraph:
        """The whole graph."""
        return self.compact.whole

    @cached_property
    def representatives(self) -> Ints:
        """[N], the operator of the compact graph that stands for each."""
        return self.compact.stands_for[self.operators]

    def choice(self, choices: Mapping[str, Choice], place: int) -> Choice:
        """What the operator at a place chooses, of choices by operator of the compact graph."""
        return choices[self.compact.graph.names[self.representatives[place]]]

    @cached_property
    def by_consumer(self) -> tuple[Ints, Ints, Ints]:
        """The edges by consumer: which they are, offsets by consumer, places of producers."""
        order = np.argsort(self.edge_ends, kind="stable")
        counts = np.bincount(self.edge_ends, minlength=len(self.operators))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return order, offsets, np.ascontiguousarray(self.edge_starts[order])

    @cached_property
    def crossings(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per cut (producer's place, edge of the compact graph) of all edges across it."""
        places = [set[tuple[int, int]]() for _ in self.cuts]
        first = np.searchsorted(self.cuts, self.edge_starts, side="right")
        behind = np.searchsorted(self.cuts, self.edge_ends, side="right")
        for e in np.flatnonzero(first < behind):
            for cut in range(int(first[e]), int(behind[e])):
                places[cut].add((int(self.edge_starts[e]), int(self.edge_numbers[e])))
        return tuple(tuple(sorted(found)) for found in places)


def chain_of(graph: OperatorGraph) -> OperatorChain:
    """Linearise a graph in its own order.

    Short graphs are cut anywhere, others where segments begin (see `OperatorGraph.segments`):
    between repeated layers, and where a single tensor goes on.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> chain = chain_of(gpt(num_layers=12, hidden=64, num_heads=4, sequence=16, batch=8))
        >>> len(chain.operators), len(chain.cuts)
        (126, 18)
    """
    compact = compact_graph(graph)
    operators = [i for i, op in enumerate(graph.operators) if not op.is_source]
    place = {i: k for k, i in enumerate(operators)}
    numbers = {(e.consumer, e.slot): k for k, e in enumerate(compact.graph.edges)}
    edges = sorted(
        (
            (place[e.producer], place[e.consumer], numbers[like, e.slot])
            for e in graph.edges
            if e.producer in place
            for like in [int(compact.stands_for[e.consumer])]
        ),
    )
    producers, ends, like = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    counts = np.bincount(producers, minlength=len(operators))
    owner = graph.owners
    ties = sorted(
        (place[graph.index[owner[weight.parameter]]], place[i], weight.parameter)
        for i in operators
        for weight in graph.operators[i].weights
        if graph.parameter_index[weight.parameter].trainable
        and owner[weight.parameter] != graph.names[i]
    )
    return OperatorChain(
        compact=compact,
        operators=np.array(operators, dtype=np.int64),
        cuts=_cuts(graph, operators),
        edge_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        edge_starts=np.ascontiguousarray(producers),
        edge_ends=np.ascontiguousarray(ends),
        edge_numbers=np.ascontiguousarray(like),
        ties=np.array([tie[:2] for tie in ties], dtype=np.int64).reshape(-1, 2),
        tied=tuple(parameter for _, _, parameter in ties),
    )


def _cuts(graph: OperatorGraph, operators: list[int]) -> Ints:
    count = len(operators)
    if count <= ALL_CUTS:
        return np.arange(count + 1, dtype=np.int64)
    segments = [graph.segments[i] for i in operators]
    inner = [k for k in range(1, count) if segments[k] != segments[k - 1]]
    return np.array([0, *inner, count], dtype=np.int64)
