"""When the backward pass makes dropped tensors again.

An operator that is recomputed runs again when backward comes to the first operator that may need
its result: a reader, or a reader's reader in the same segment that is recomputed from it. For a
checkpointed layer that is the moment in which backward enters the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratagem.simulator.cost_table import CostTable


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
    if not may:
        return Triggers({}, {})
    segment = table.graph.segments
    place = {i: p for p, i in enumerate(reversed(table.operators))}
    readers: dict[int, list[int]] = {}
    for edge in table.edges:
        readers.setdefault(edge.producer, []).append(edge.consumer)
    first: dict[int, int] = {}
    for i in reversed(table.operators):
        inside = [first[j] for j in readers.get(i, ()) if segment[j] == segment[i]]
        first[i] = min([place[i], *inside])
    of = {i: first[i] for i in may}
    at: dict[int, tuple[int, ...]] = {}
    for i in may:
        at[of[i]] = (*at.get(of[i], ()), i)
    return Triggers(of, at)
