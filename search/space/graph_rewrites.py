"""Searching among the graphs that compute the same: the outer loop of Unity.

Best first (Jia et al. 2019, TASO; Unger et al. 2022, Unity): the best graph known is rewritten in
every way, what comes out is scored, and a graph that is much worse than the best is not rewritten
further. Repeated layers are rewritten alike: 96 of them have as many ways as one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions import (
    SUBSTITUTIONS,
    Match,
    Rewritten,
    Substituted,
    rewritten_by,
)
from stratagem.simulator.graph.substitutions.edits import nameless

Score = Callable[[OperatorGraph], float]
"""How good a graph is, less is better: the seconds of its best plan, or a quick guess of them."""


@dataclass(frozen=True)
class Rewriting:
    """A graph that computes the same, how it was made, and its score."""

    rewritten: Rewritten
    score: float

    @property
    def graph(self) -> OperatorGraph:
        """The graph."""
        return self.rewritten.graph


def rewritings(
    graph: OperatorGraph, score: Score, *, limit: int = 32, slack: float = 1.05
) -> list[Rewriting]:
    """Graphs that compute the same as `graph`, the best first; `graph` itself is among them.

    Example: a graph with fewer operators counts as better.
        >>> from stratagem.simulator.graph.models import llama
        >>> graph = llama(num_layers=2, hidden=8, num_heads=2, ffn=16, vocabulary=32, batch=2)
        >>> best = rewritings(graph, lambda g: len(g.operators))[0]
        >>> len(graph.operators) - len(best.graph.operators)
        6

    Args:
        graph: the model at its whole batch.
        score: what is to be small; infinite for graphs that are out of the question.
        limit: how many graphs to score.
        slack: a graph whose score is more than so many times the best is not rewritten further
            (Unity's α).

    Returns:
        At most `limit` graphs, equal scores in the order in which they were found.

    Raises:
        ValueError: `limit` is below 1, or `slack` is.
    """
    if limit < 1 or slack < 1:
        raise ValueError(
            f"limit={limit}, slack={slack:g}: at least the graph itself is scored, and rewritten "
            "however good it is; both must be 1 or more"
        )
    first = Rewriting(Rewritten(graph), score(graph))
    found, seen = [first], {_structure(graph)}
    waiting = [(first.score, 0)]
    best = first.score
    while waiting and len(found) < limit:
        reached, number = heapq.heappop(waiting)
        if reached > slack * best:
            break
        for step in steps(found[number].graph):
            if len(found) == limit:
                break
            made = rewritten_by(found[number].rewritten, step)
            structure = _structure(made.graph)
            if structure in seen:
                continue
            seen.add(structure)
            found.append(Rewriting(made, score(made.graph)))
            best = min(best, found[-1].score)
            if found[-1].score < inf:
                heapq.heappush(waiting, (found[-1].score, len(found) - 1))
    return sorted(found, key=lambda each: each.score)


def steps(graph: OperatorGraph) -> Iterator[Substituted]:
    """Every way to rewrite a graph once: a rule at all places that are alike.

    Places are alike if their operators are but for names, as in repeated layers. Of places that
    share an operator the first counts.
    """
    for rule in SUBSTITUTIONS.values():
        alike: dict[Any, list[Match]] = {}
        for match in rule.matches(graph):
            key = tuple(nameless(graph.operator(name)) for name in match)
            alike.setdefault(key, []).append(match)
        for matches in alike.values():
            yield Substituted(rule.name, tuple(_apart(matches)))


def _apart(matches: list[Match]) -> Iterator[Match]:
    taken: set[str] = set()
    for match in matches:
        if taken.isdisjoint(match):
            taken.update(match)
            yield match


def _structure(graph: OperatorGraph) -> Any:
    """Equal for graphs that differ in names only: merging and splitting again is no news."""
    number: dict[str, int] = {}
    return tuple(
        (
            nameless(operator),
            tuple((graph.index[read.source], read.output) for read in operator.inputs),
            tuple(number.setdefault(w.parameter, len(number)) for w in operator.weights),
        )
        for operator in graph.operators
    )
