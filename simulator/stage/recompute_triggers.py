"""When the backward pass makes dropped tensors again.

An operator that is recomputed runs again when backward comes to the first operator that may need
its result: a reader, or a reader's reader in the same segment that is recomputed from it. For a
checkpointed layer that is the moment in which backward enters the layer.

An input that is only converted again is so beside the operator before its reader.

Both wait for no more than those do that wait for them (`Releases`). So nobody waits for what is
idle: a plan takes the same time whether or not its operators had the choice to run again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.pricing.cost_table import CostTable


@dataclass(frozen=True)
class Triggers:
    """Places in the backward order (0 is the last operator) at which operators run again.

    `of` is per operator that may be recomputed, `at` lists them by place, in graph order.
    """

    of: Mapping[int, int]
    at: Mapping[int, tuple[int, ...]]


def recompute_triggers(table: CostTable) -> Triggers:
    """The triggers of a stage; none where no choice recomputes."""
    return table.derive(_triggers_of)


def _triggers_of(table: CostTable) -> Triggers:
    may = [i for i in table.operators if table.row(i).may_recompute]
    return triggers(table.graph, table.operators, may)


def triggers(graph: OperatorGraph, operators: Sequence[int], may: Sequence[int]) -> Triggers:
    """The triggers of a stage that runs `operators`, of which those in `may` can be recomputed."""
    if not may:
        return Triggers({}, {})
    first = _first_needed(graph, operators)
    of = {i: first[i] for i in may}
    at: dict[int, tuple[int, ...]] = {}
    for i in may:
        at[of[i]] = (*at.get(of[i], ()), i)
    return Triggers(of, at)


def _first_needed(graph: OperatorGraph, operators: Sequence[int]) -> dict[int, int]:
    """By operator of a stage, the place at which its dropped result may be needed first."""
    segment, first = graph.segments, dict[int, int]()
    for place, i in enumerate(reversed(operators)):
        readers = {edge.consumer for edge in graph.readers[i]}
        inside = [first[j] for j in readers if j in first and segment[j] == segment[i]]
        first[i] = min([place, *inside])
    return first


@dataclass(frozen=True)
class Releases:
    """Places in the backward order behind which something is made again; what lacks one begins
    with the block.

    Each is the last one, behind its own moment, that all who wait for the task wait for anyway.

    Attributes:
        recompute: by operator that may run again: not before its trigger is reached.
        gather: by operator: when its parameters are gathered for that, so many ahead.
        regather: by edge that may be converted again: one place ahead of its reader.
    """

    recompute: Mapping[int, int]
    gather: Mapping[int, int]
    regather: Mapping[int, int]


def releases_of(
    table: CostTable,
    again: Triggers,
    regathered: Mapping[int, tuple[int, ...]],
    prefetch: int,
) -> Releases:
    """The releases of a stage.

    Args:
        table: prices it.
        again: when its operators run again.
        regathered: by edge that may be converted again, those of the same result that are so
            before it and that it waits for.
        prefetch: how many operators with parameters ahead of its own a gather begins.
    """
    regathers = any(row.may_regather for row in table.edge_rows)
    if not again.of and not regathers:
        return Releases({}, {}, {})
    place = {i: p for p, i in enumerate(reversed(table.operators))}
    waited = _waited_for(table, place)
    recompute, gather = (
        _recomputed(table, again, place, waited, prefetch) if again.of else ({}, {})
    )
    regather = _regathered(table, regathered, place, waited) if regathers else {}
    return Releases(recompute, gather, regather)


def _waited_for(table: CostTable, place: Mapping[int, int]) -> dict[int, int]:
    """By operator, the places that its backward pass waits for, as bits."""
    before = dict.fromkeys(table.operators, 0)
    for edge in sorted(table.edges, key=lambda edge: -edge.producer):
        before[edge.producer] |= before[edge.consumer] | 1 << place[edge.consumer]
    return before


def _recomputed(
    table: CostTable,
    again: Triggers,
    place: Mapping[int, int],
    waited: Mapping[int, int],
    prefetch: int,
) -> tuple[dict[int, int], dict[int, int]]:
    """The releases of what runs again, and of the gathers of its parameters.

    Who waits for operator i that runs again: its own backward pass and those of its readers that
    come behind; readers that run again behind it, and who waits for those; and who converts the
    same input again behind it. The last two count whether or not they run again, so that what is
    found depends on the graph alone.
    """
    first = _first_needed(table.graph, table.operators)
    readers: dict[int, set[int]] = defaultdict(set)
    shared: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for edge in table.edges:
        readers[edge.producer].add(edge.consumer)
        shared[edge.producer, edge.output, first[edge.consumer]].append(edge.consumer)
    behind: dict[int, set[int]] = defaultdict(set)
    for i, found in readers.items():
        behind[i] |= {j for j in found if first[j] >= first[i]}
    for group in shared.values():
        for k, i in enumerate(group):
            behind[i] |= {j for j in group[k + 1 :] if j > i}
    common: dict[int, int] = {}
    for i in reversed(table.operators):
        common[i] = waited[i]
        for j in readers[i]:
            common[i] &= waited[j] if place[j] >= first[i] else -1
        for j in behind[i]:
            common[i] &= common[j]
    weighted = [place[i] for i in table.operators[::-1] if table.graph.operators[i].weights]
    parameters = sum(1 << each for each in weighted)
    recompute: dict[int, int] = {}
    gather: dict[int, int] = {}
    for i, trigger in again.of.items():
        ran = weighted[: bisect_left(weighted, trigger)]
        until = ran[-prefetch] + 1 if len(ran) >= prefetch else 0
        if early := common[i] & (1 << trigger) - 1:
            recompute[i] = early.bit_length() - 1
        if early := common[i] & (1 << until) - 1 & parameters:
            gather[i] = early.bit_length() - 1
    return recompute, gather


def _regathered(
    table: CostTable,
    chain: Mapping[int, tuple[int, ...]],
    place: Mapping[int, int],
    waited: Mapping[int, int],
) -> dict[int, int]:
    """The releases of inputs that are converted again.

    Whoever reads the same result behind the reader waits for that, too (`chain`).
    """
    edges, common, found = table.edges, dict[int, int](), dict[int, int]()
    for k in sorted(range(len(edges)), key=lambda k: (edges[k].consumer, -k)):
        reader = edges[k].consumer
        all_wait = common.get(k, -1) & waited[reader]
        for before in chain.get(k, ()):
            common[before] = common.get(before, -1) & all_wait
        early = all_wait & (1 << max(0, place[reader] - 1)) - 1
        if early and table.edge_rows[table.edge_row_of[k]].may_regather:
            found[k] = early.bit_length() - 1
    return found
