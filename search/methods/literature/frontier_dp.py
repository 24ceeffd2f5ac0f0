"""The least sum of costs of single operators and of pairs, exactly, by dynamic programming.

Operators are taken in order. A table holds the least cost of all before, for every combination of
options of those that still have a partner to come (the *frontier*). Graphs of neural networks are
long and narrow, so it stays small: a residual stream, the operator at hand, a tied table.

    frontier {add} ─▶ + norm ─▶ {add, norm} ─▶ + linear ─▶ norm has no partner left: minimise over
    it and remember the best for every combination of the others ─▶ {add, linear}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stratagem.simulator.base.arrays import Floats

MAX_TABLE = 10**7
"""Combinations of the frontier's options that are held at most."""


def least_sum(
    costs: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats]
) -> tuple[list[int], float]:
    """The option of each item that makes the sum least; of equals the first found.

    Example:
        >>> same = np.array([[0.0, 3.0], [3.0, 0.0]])
        >>> least_sum([np.array([1.0, 0.0]), np.array([0.0, 5.0])], {(0, 1): same})
        ([0, 0], 1.0)

    Args:
        costs: per item the cost of each of its options.
        pairs: by (earlier, later) item what each pair of their options costs.

    Raises:
        ValueError: a frontier has more than `MAX_TABLE` combinations.
    """
    partners: list[list[int]] = [[] for _ in costs]
    last = list(range(len(costs)))
    for first, second in pairs:
        partners[second].append(first)
        last[first] = max(last[first], second)
    table, frontier = np.zeros(()), list[int]()
    closed: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
    for i, own in enumerate(costs):
        if table.size * own.size > MAX_TABLE:
            raise ValueError(
                f"at item {i} of {len(costs)} there are {table.size * own.size} combinations of "
                f"{len(frontier) + 1} items that wait for a partner; at most {MAX_TABLE} are held"
            )
        table = table[..., None] + own
        frontier.append(i)
        for first in partners[i]:
            shape = [1] * len(frontier)
            where = frontier.index(first)
            shape[where], shape[-1] = pairs[first, i].shape
            table = table + pairs[first, i].reshape(shape)
        for done in [item for item in frontier if last[item] <= i]:
            axis = frontier.index(done)
            frontier.remove(done)
            closed.append((done, tuple(frontier), table.argmin(axis=axis)))
            table = table.min(axis=axis)
    chosen = [0] * len(costs)
    for item, others, best in reversed(closed):
        chosen[item] = int(best[tuple(chosen[other] for other in others)])
    return chosen, float(table)


def tied_costs(
    costs: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    tied: Iterable[Sequence[int]],
) -> tuple[list[Floats], dict[tuple[int, int], Floats], list[int]]:
    """The same sum over fewer items, where those of a group are to have the same option.

    Example:
        >>> costs, pairs = [np.array([1.0, 0.0])] * 3, {(0, 1): np.eye(2), (1, 2): np.eye(2)}
        >>> own, between, item_of = tied_costs(costs, pairs, [(0, 2)])
        >>> own[0], between[0, 1][0], item_of
        (array([2., 0.]), array([2., 0.]), [0, 1, 0])

    Args:
        costs, pairs: as `least_sum` takes them.
        tied: groups of items with equally many options, none in two of them.

    Returns:
        Costs and pairs of the new items, and per old item the number of the new one.
    """
    first = {item: min(group) for group in tied for item in group}
    roots = [first.get(item, item) for item in range(len(costs))]
    numbers = {root: number for number, root in enumerate(dict.fromkeys(roots))}
    item_of = [numbers[root] for root in roots]
    own = [np.zeros_like(costs[root]) for root in numbers]
    for item, cost in zip(item_of, costs, strict=True):
        own[item] = own[item] + cost
    between: dict[tuple[int, int], Floats] = {}
    for (one, other), matrix in pairs.items():
        a, b = item_of[one], item_of[other]
        if a == b:
            own[a] = own[a] + matrix.diagonal()
            continue
        key, turned = ((a, b), matrix) if a < b else ((b, a), matrix.T)
        between[key] = between[key] + turned if key in between else turned
    return own, between, item_of
