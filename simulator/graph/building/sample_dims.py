"""Which dims count samples, where inputs leave it open.

Every input whose first dim is as long as the batch is taken to have a sample a row. That may be
wrong: a batch of 8 beside 8 positions, which are an input too; or too much: a batch seen in pairs,
8 = 4 × 2, has 4 parts that can be told apart. Whether parts of the batch make the whole can be
worked out (`sums_over_samples`), so factors that stand in the way are not counted as samples, if
the rest then may be cut. What is computed of them is computed by every microbatch, so no more than
`LARGEST_REPEATED` of the work may be done for them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from stratagem.simulator.graph.building.factor_unification import Linked, leaves_of
from stratagem.simulator.graph.building.operator_drafts import OperatorDraft
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.kinds.sums_over_samples import parts_of, sample_cuts

LARGEST_REPEATED = 0.05
"""Share of a graph's operations that every microbatch may do again."""

MOST_TRIED = 6
"""Groups of factors that may be looked at one by one."""


def settle_samples(
    drafts: Sequence[OperatorDraft],
    inputs: Sequence[OperatorDraft],
    finish: Callable[[], OperatorGraph],
) -> OperatorGraph:
    """The graph with as many samples as may be cut, or as were declared if nothing may be.

    Args:
        drafts: live ones, in order.
        inputs: those whose dims were declared to count samples, the one that says what the batch
            is first.
        finish: makes the graph of the drafts as their factors say.
    """
    graph = finish()
    if not parts_of(graph, sample_cuts(graph)).problem:
        return graph
    declared = _groups(inputs)
    if len(declared) > MOST_TRIED:
        return graph
    total = _operations(graph)
    for kept in _candidates(drafts, declared, len(_groups(inputs[:1]))):
        _count_only(declared, kept)
        tried = finish()
        fewer = parts_of(tried, sample_cuts(tried))
        if not fewer.problem and _repeated(graph, tried) <= LARGEST_REPEATED * total:
            return tried
    _count_only(declared, declared)
    return finish()


def _groups(inputs: Sequence[OperatorDraft]) -> list[Linked]:
    """Linked factors that count samples, each once."""
    found: dict[int, Linked] = {}
    for draft in inputs:
        for loop in draft.loops:
            for leaf in leaves_of(loop.factors):
                if leaf.sample:
                    found.setdefault(id(leaf.group), leaf.group)
    return list(found.values())


def _candidates(
    drafts: Sequence[OperatorDraft], declared: Sequence[Linked], leading: int
) -> Iterator[list[Linked]]:
    """Fewer groups, no two of which meet in an operator, around each of the `leading` ones."""
    position = {id(group): at for at, group in enumerate(declared)}
    meet: set[tuple[int, int]] = set()
    for draft in drafts:
        here = sorted(
            {
                position[id(leaf.group)]
                for loop in draft.loops
                for leaf in leaves_of(loop.factors)
                if id(leaf.group) in position
            }
        )
        meet.update(combinations(here, 2))
    seen: list[list[int]] = [list(range(len(declared)))]
    for first in range(leading):
        kept = [first]
        for other in range(len(declared)):
            if other != first and not any((min(o, other), max(o, other)) in meet for o in kept):
                kept.append(other)
        for chosen in (sorted(kept), [first]):
            if chosen not in seen:
                seen.append(chosen)
                yield [declared[at] for at in chosen]


def _count_only(declared: Sequence[Linked], kept: Sequence[Linked]) -> None:
    for group in declared:
        group.sample = any(group is each for each in kept)


def _operations(graph: OperatorGraph) -> float:
    return sum(kind_of(op).flops(op, op.sizes) for op in graph.operators)


def _repeated(before: OperatorGraph, after: OperatorGraph) -> float:
    """Operations for what counted samples before and does so no more."""
    had, have = sample_cuts(before), sample_cuts(after)
    return sum(
        kind_of(operator).flops(operator, operator.sizes)
        for operator, old, new in zip(after.operators, had, have, strict=True)
        if old and not new and not operator.is_source
    )
