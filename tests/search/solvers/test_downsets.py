"""Down-sets against their definition, and partitions along them against trying all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.planners.inputs.down_sets import (
    Pairs,
    StageProblem,
    TooManyDownSetsError,
    cut_from_every_set,
    cut_into_stages,
    down_sets,
    linear_down_sets,
    linearisations,
)
from tests.support.examples import examples


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> list[list[int]]:
    """Predecessors of each node; numbers are no order."""
    count = draw(st.integers(1, most))
    order = draw(st.permutations(range(count)))
    return [
        [other for other in range(count) if order[other] < order[node] and draw(st.booleans())]
        for node in range(count)
    ]


def by_definition(predecessors: Sequence[Sequence[int]]) -> set[frozenset[int]]:
    nodes = range(len(predecessors))
    subsets = itertools.chain.from_iterable(
        itertools.combinations(nodes, size) for size in range(len(predecessors) + 1)
    )
    return {
        frozenset(subset)
        for subset in subsets
        if all(set(predecessors[node]) <= set(subset) for node in subset)
    }


@settings(max_examples=examples(100))
@given(graphs(most=8))
def test_all_down_sets_are_found_once_smaller_ones_first(predecessors: list[list[int]]) -> None:
    sets = down_sets(predecessors)
    found = [frozenset(sets.members(i)) for i in range(len(sets))]
    assert len(found) == len(set(found))
    assert set(found) == by_definition(predecessors)
    assert [len(s) for s in found] == sorted(len(s) for s in found)
    assert sets.sizes.tolist() == [len(s) for s in found]


@given(graphs(most=7), st.integers(1, 30))
def test_pairs_are_all_that_are_light_enough(predecessors: list[list[int]], limit: int) -> None:
    sets = down_sets(predecessors)
    weight = sets.sums([1 + 3 * (node % 3) for node in range(len(predecessors))])
    members = [set(sets.members(i)) for i in range(len(sets))]
    expected = {
        (i, j)
        for i, j in itertools.permutations(range(len(sets)), 2)
        if members[i] < members[j] and weight[j] - weight[i] <= limit
    }
    found = [
        (int(i), int(j))
        for pairs in sets.pairs(weight, limit, at_once=3)
        for i, j in zip(pairs.inner, pairs.outer, strict=True)
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_words_beyond_the_first_hold_nodes_too() -> None:
    chain = [[v - 1] if v else [] for v in range(150)]
    sets = down_sets(chain)
    assert len(sets) == 151
    assert sets.members(140) == tuple(range(140))
    assert sets.between(60, 70) == tuple(range(60, 70))


def test_a_large_lattice_outgrows_every_first_table() -> None:
    # Two chains of 120 side by side: 121² down-sets.
    sets = down_sets([[v - 1] if v % 120 else [] for v in range(240)])
    assert len(sets) == 121**2
    assert sets.sums(np.ones(240))[-1] == 240


def test_too_many_down_sets_name_the_limit_and_a_way_out() -> None:
    with pytest.raises(TooManyDownSetsError, match=r"12 nodes has more than 100 .*linear"):
        down_sets([[]] * 12, limit=100)


def test_a_cycle_and_an_unknown_node_are_refused() -> None:
    with pytest.raises(ValueError, match="2 of 3 nodes are on or behind a cycle, node 1"):
        down_sets([[], [0, 2], [1]])
    with pytest.raises(ValueError, match="node 1 has a predecessor 7; the graph has nodes 0 to 1"):
        linearisations([[], [7]])


def test_an_order_against_the_edges_is_refused() -> None:
    with pytest.raises(ValueError, match="node 1 comes before its predecessor 0"):
        linear_down_sets([[], [0]], [1, 0])
    with pytest.raises(ValueError, match="names 1 different nodes of 2"):
        linear_down_sets([[], [0]], [0])


@settings(max_examples=examples(100))
@given(graphs(most=8))
def test_every_linearisation_keeps_predecessors_first(predecessors: list[list[int]]) -> None:
    for order in linearisations(predecessors):
        sets = linear_down_sets(predecessors, order)
        assert {frozenset(sets.members(i)) for i in range(len(sets))} <= by_definition(
            predecessors
        )


Cost = Callable[[frozenset[int], int], float]


def stage_cost(seed: int) -> Cost:
    """Some cost of a stage under an option, without any structure; now and then forbidden."""

    def cost(stage: frozenset[int], option: int) -> float:
        value = hash((tuple(sorted(stage)), option, seed)) % 97
        return math.inf if value > 90 else float(value)

    return cost


def cheapest(
    predecessors: Sequence[Sequence[int]],
    done: frozenset[int],
    counts: tuple[int, ...],
    needs: Sequence[Sequence[int]],
    cost: Cost,
    problem: StageProblem,
) -> float:
    """The best partition of what is not done, by trying all of them."""
    every = by_definition(predecessors)
    if len(done) == len(predecessors):
        return math.inf if problem.exactly and any(counts) else 0.0
    best = math.inf
    for larger in every:
        if not done < larger:
            continue
        for option, need in enumerate(needs):
            left = tuple(have - taken for have, taken in zip(counts, need, strict=True))
            if min(left) < 0:
                continue
            stage = cost(larger - done, option)
            rest = cheapest(predecessors, larger, left, needs, cost, problem)
            best = min(best, stage + rest if problem.add else max(stage, rest))
    return best


@settings(max_examples=examples(60))
@given(graphs(most=5), st.integers(0, 1000), st.booleans(), st.booleans())
def test_partitions_on_two_kinds_of_devices_equal_trying_all(
    predecessors: list[list[int]], seed: int, add: bool, exactly: bool
) -> None:
    sets, cost = down_sets(predecessors), stage_cost(seed)
    needs, counts = [(1, 0), (2, 0), (0, 1)], (2, 1)

    def costs(pairs: Pairs) -> np.ndarray:
        stages = [
            frozenset(sets.between(int(i), int(j)))
            for i, j in zip(pairs.inner, pairs.outer, strict=True)
        ]
        return np.array([[cost(stage, o) for o in range(len(needs))] for stage in stages])

    problem = StageProblem(sets, costs, needs, counts, add=add, exactly=exactly)
    table = cut_into_stages(problem)
    expected = cheapest(predecessors, frozenset(), counts, needs, cost, problem)
    assert table.value == expected
    if math.isinf(expected):
        with pytest.raises(ValueError, match="no partition"):
            table.cuts()
        return
    cuts = table.cuts()
    loads = [cost(frozenset(sets.between(c.inner, c.outer)), c.option) for c in cuts]
    assert (sum(loads) if add else max(loads)) == expected
    used = np.sum([needs[cut.option] for cut in cuts], axis=0)
    assert (used == counts).all() if exactly else (used <= counts).all()
    assert cut_into_stages(problem, bound=expected).value == math.inf
    assert cut_into_stages(problem, bound=expected + 1).value == expected


@settings(max_examples=examples(30))
@given(graphs(most=5), st.integers(0, 1000))
def test_tables_from_every_set_are_those_from_each_alone(
    predecessors: list[list[int]], seed: int
) -> None:
    sets = down_sets(predecessors)
    needs, counts = [(1,), (2,)], (3,)

    def costs_of(kind: int, pairs: Pairs) -> np.ndarray:
        cost = stage_cost(seed + kind)
        return np.array(
            [
                [cost(frozenset(sets.between(int(i), int(j))), o) for o in range(2)]
                for i, j in zip(pairs.inner, pairs.outer, strict=True)
            ]
        )

    later = StageProblem(sets, lambda p: costs_of(0, p), needs, counts, exactly=True)
    together = cut_from_every_set(later, lambda p: costs_of(1, p))
    for start, table in enumerate(together):

        def costs(pairs: Pairs, start: int = start) -> np.ndarray:
            return costs_of(int(pairs.inner[0] == start), pairs)

        # Batches are of one size, so only the batch of the start itself holds first stages.
        for target in range(len(sets)):
            if not set(sets.members(start)) < set(sets.members(target)):
                assert target == start or math.isinf(table.value_of(target))
        reference = StageProblem(sets, costs, needs, counts, exactly=True)
        alone = cut_into_stages(reference, start=start)
        assert table.value == alone.value
        if math.isfinite(table.value):
            assert table.cuts()[0].inner == alone.cuts()[0].inner == start
