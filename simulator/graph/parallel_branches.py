"""Branches of a model that lie beside one another: none reads what another makes.

    f ──▶ a1 ──▶ a2 ──▶ j          the branches of j: (a1, a2) and (b)
    └───▶ b ────────────▶

An operator's *immediate post-dominator* is the first one that all paths from it lead through. The
operators that share one, each with all whose paths lead through it, are the branches of that one,
but for what others of them read, as f above.
"""

from __future__ import annotations

from collections import defaultdict

from stratagem.simulator.graph.operator_graph import OperatorGraph

Branches = tuple[tuple[int, ...], ...]
"""Operators by branch, ascending."""


def parallel_branches(graph: OperatorGraph) -> tuple[Branches, ...]:
    """By operator that joins them, two or more branches that lie beside one another.

    Sources, which every device computes for itself, are in no branch. Branches within branches are
    found as well.

    Example:
        >>> from stratagem.simulator.graph.models import gpt, mlp
        >>> parallel_branches(mlp([8, 8, 8], batch=4))
        ()
        >>> graph = gpt(num_layers=1, hidden=8, num_heads=2, sequence=4, batch=2)
        >>> [[[graph.names[i] for i in branch] for branch in each]
        ...     for each in parallel_branches(graph)]
        [[['wte'], ['wpe']]]

    Returns:
        By joining operator, in their order; branches in the order of their last operators.
    """
    inside = [i for i, operator in enumerate(graph.operators) if not operator.is_source]
    behind = {i: {e.consumer for e in graph.readers[i]} for i in inside}
    # Sets of operators as bits of a number: of 1,000 operators a union is a few machine words.
    after: dict[int, int] = {}
    joins: dict[int, list[int]] = defaultdict(list)
    trees: dict[int, int] = {}
    for i in reversed(inside):
        common = -1
        for j in behind[i]:
            common &= after[j]
        common = common if behind[i] else 0
        after[i] = common | 1 << i
        if common:
            joins[(common & -common).bit_length() - 1].append(i)
    for i in inside:  # What leads through an operator comes before it.
        trees[i] = 1 << i
        for j in joins[i]:
            trees[i] |= trees[j]
    reached: dict[int, int] = {}
    for i in inside:
        reached[i] = 1 << i
        for edge in graph.reads[i]:
            reached[i] |= reached.get(edge.producer, 0)
    found = []
    for join in sorted(joins):
        ends = sorted(joins[join])
        above = {end: _union(reached, trees[end]) for end in ends}
        beside = [
            end
            for end in ends
            if not any(above[other] & trees[end] for other in ends if other != end)
        ]
        if len(beside) > 1:
            found.append(tuple(_members(trees[end]) for end in beside))
    return tuple(found)


def _union(sets: dict[int, int], of: int) -> int:
    found = 0
    for i in _members(of):
        found |= sets[i]
    return found


def _members(bits: int) -> tuple[int, ...]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return tuple(found)
