"""Segments of a graph: the stretches between which activations are checkpointed.

Recomputing an operator drops what it makes and computes it again in the backward pass (Chen et
al. 2016, arXiv 1604.06174). Dropped is only what is read inside the operator's own segment, a
layer as a rule; what a segment hands on is always kept, so that each can be computed again from
there:

    kept ──▶ │ norm ▸ linear ▸ gelu ▸ linear ▸ add │ ──▶ kept ──▶ │ norm ▸ …
                └──── dropped, and made again ───┘

What nobody reads in backward is dropped and not made again: here the result of the second linear,
which only the sum reads. Such an operator has its inputs brought back, and does not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import (
    role_of,
    saved_inside,
    saved_slots,
    saves_output,
)
from stratagem.simulator.operators.operator import Edge

RECOMPUTE_POLICIES = ("none", "selective", "full")
"""Names that `recomputed_operators` knows."""


def check_policy(policy: str) -> None:
    """Raise ValueError if there is no recompute policy of that name."""
    if policy not in RECOMPUTE_POLICIES:
        raise unknown("recompute policy", policy, RECOMPUTE_POLICIES)


def recomputed_operators(graph: OperatorGraph, policy: str) -> frozenset[str]:
    """The operators that a policy recomputes, by name.

    * ``none``: nothing.
    * ``full``: everything in repeated blocks, but for what would only make again a result that its
      segment hands on.
    * ``selective``: of those, the attention core only: a fused attention, or the scores, their
      softmax and the chains between. The product with the values is kept, as its reader keeps it
      (Korthikanti et al. 2022, arXiv 2205.05198).

    Raises:
        ValueError: if there is no such policy.
    """
    check_policy(policy)
    if policy == "none":
        return frozenset()
    segment = graph.segments
    outside = {
        edge.producer for edge in graph.edges if segment[edge.producer] != segment[edge.consumer]
    }
    size = Counter(segment)
    core = _attention_core(graph) if policy == "selective" else None
    return frozenset(
        operator.name
        for i, operator in enumerate(graph.operators)
        if size[segment[i]] > 1 and not operator.is_source
        if i not in outside or any(saved_inside(operator))
        if core is None or i in core
    )


def run_again(
    graph: OperatorGraph, inside: Collection[int], may: Collection[int]
) -> frozenset[int]:
    """The operators that a stage runs again in backward, of those that it drops.

    Others drop their results too, but neither a backward pass nor what runs again reads them.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=3, hidden=8, num_heads=2, sequence=4, batch=2)
        >>> dropped = [graph.index[name] for name in recomputed_operators(graph, "full")]
        >>> again = run_again(graph, range(len(graph.operators)), dropped)
        >>> graph.index["h.1.mlp.up"] in again, graph.index["h.1.mlp.down"] in again
        (True, False)

    Args:
        graph: the model.
        inside: the operators of the stage.
        may: those of them that some choice recomputes.
    """
    inside, may, found = set(inside), set(may), set[int]()
    known: dict[int, _Dropped] = graph.derived.setdefault(run_again, {})
    for i in sorted(may, reverse=True):
        dropped = known.get(i)
        if dropped is None:
            dropped = known[i] = _dropped(graph, i)
        if dropped.keeps or any(
            reader in found or is_saved for reader, is_saved in dropped.reads if reader in inside
        ):
            found.add(i)
    return frozenset(found)


class _Dropped(NamedTuple):
    """What a stage needs of an operator whose results it drops, wherever its ends are.

    `keeps` says whether its own backward pass needs what it made, `reads` who reads a dropped
    result and whether backward of that reader needs it.
    """

    keeps: bool
    reads: tuple[tuple[int, bool], ...]


def _dropped(graph: OperatorGraph, i: int) -> _Dropped:
    operator = graph.operators[i]
    keeps_own = role_of(operator) is OperatorRole.LOSS or any(saved_inside(operator))
    reads = tuple((edge.consumer, _is_saved(graph, edge)) for edge in _dropped_reads(graph, i))
    return _Dropped(keeps_own or saves_output(operator), reads)


def _dropped_reads(graph: OperatorGraph, i: int) -> list[Edge]:
    """The edges along which dropped results of an operator are read: its segment's own."""
    segment = graph.segments
    kept = {e.output for e in graph.readers[i] if segment[e.consumer] != segment[i]}
    return [edge for edge in graph.readers[i] if edge.output not in kept]


def _is_saved(graph: OperatorGraph, edge: Edge) -> bool:
    """Whether backward of a reader needs what it read, be its chains one kernel or several."""
    reader = graph.operators[edge.consumer]
    needed = saved_slots(reader) | saved_slots(reader, fused=True)
    return graph.needs_gradient[edge.consumer] and edge.slot in needed


def _attention_core(graph: OperatorGraph) -> set[int]:
    """Fused attentions; and scores, their softmax, and the chains between two products.

    product ─▶ chain (mask, position bias) ─▶ softmax ─▶ chain (dropout) ─▶ product
    """
    scores: set[int] = set()
    weights: set[int] = set()
    for i, operator in enumerate(graph.operators):
        made_by = {graph.index[read.source] for read in operator.inputs}
        role = role_of(operator)
        chain = role is OperatorRole.CHAIN
        if made_by & (weights if chain else scores) and (chain or role is OperatorRole.SOFTMAX):
            weights.add(i)
        elif role is OperatorRole.PRODUCT or (chain and made_by & scores):
            scores.add(i)
    core = weights | {
        i for i, o in enumerate(graph.operators) if role_of(o) is OperatorRole.ATTENTION
    }
    for i in sorted(scores, reverse=True):
        readers = {edge.consumer for edge in graph.readers[i]}
        if readers and readers <= core:
            core.add(i)
    return core
