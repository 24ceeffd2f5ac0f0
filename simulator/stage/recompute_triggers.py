"""When the backward pass makes dropped tensors again.

An operator that is recomputed runs again when backward comes to the first operator that may need
its result: a reader, or a reader's reader in the same segment that is recomputed from it. For a
checkpointed layer that is the moment in which backward enters the layer.

An input that is only converted again is so beside the operator before its reader, as soon as one
is through that its reader waits for anyway.
"""

from __future__ import annotations

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
    may = [i for i in table.operators if table.row(i).may_recompute]
    return triggers(table.graph, table.operators, may)


def triggers(graph: OperatorGraph, operators: Sequence[int], may: Sequence[int]) -> Triggers:
    """The triggers of a stage that runs `operators`, of which those in `may` can be recomputed."""
    if not may:
        return Triggers({}, {})
    segment = graph.segments
    place = {i: p for p, i in enumerate(reversed(operators))}
    first: dict[int, int] = {}
    for i in reversed(operators):
        readers = {edge.consumer for edge in graph.readers[i]}
        inside = [first[j] for j in readers if j in first and segment[j] == segment[i]]
        first[i] = min([place[i], *inside])
    of = {i: first[i] for i in may}
    at: dict[int, tuple[int, ...]] = {}
    for i in may:
        at[of[i]] = (*at.get(of[i], ()), i)
    return Triggers(of, at)


def regather_releases(table: CostTable, chain: Mapping[int, int]) -> dict[int, int]:
    """By edge that may be converted again, the place in the backward order that releases it.

    It is the last place but the one before the reader whose pass this reader waits for, and so
    does everyone behind it in `chain` (each edge of a result that waits for another one of it).
    Then nobody waits for what is idle: a plan takes the same time whether or not its operators
    had a choice to convert again. Edges that begin with the block have no place.
    """
    if not any(row.may_regather for row in table.edge_rows):
        return {}
    edges, place = table.edges, {i: p for p, i in enumerate(reversed(table.operators))}
    before = dict.fromkeys(table.operators, 0)  # The places that each waits for, as bits.
    for edge in sorted(edges, key=lambda edge: -edge.producer):
        before[edge.producer] |= before[edge.consumer] | 1 << place[edge.consumer]
    common: dict[int, int] = {}
    found: dict[int, int] = {}
    for k in sorted(range(len(edges)), key=lambda k: (edges[k].consumer, -k)):
        reader = edges[k].consumer
        all_wait = common.get(k, -1) & before[reader]
        if k in chain:
            common[chain[k]] = common.get(chain[k], -1) & all_wait
        early = all_wait & (1 << max(0, place[reader] - 1)) - 1
        if early and table.edge_rows[table.edge_row_of[k]].may_regather:
            found[k] = early.bit_length() - 1
    return found
