"""When the backward pass makes dropped tensors again.

An operator that is recomputed runs again when backward comes to the first operator that may need
its result: a reader, or a reader's reader in the same segment that is recomputed from it. For a
checkpointed layer that is the moment in which backward enters the layer.
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
