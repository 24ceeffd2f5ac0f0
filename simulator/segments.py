"""Segments of a graph: the stretches between which activations are checkpointed.

Recomputing an operator drops what it makes and computes it again in the backward pass (Chen et
al. 2016, arXiv 1604.06174). Dropped is only what is read inside the operator's own segment, a
layer as a rule; what a segment hands on is always kept, so that each can be computed again from
there:

    kept ──▶ │ norm ▸ linear ▸ gelu ▸ linear ▸ add │ ──▶ kept ──▶ │ norm ▸ …
                └──── dropped, and made again ───┘
"""

from __future__ import annotations

import difflib
import itertools
import math

from stratagem.simulator.graph import OperatorGraph, RepeatedBlock, factor_sizes, repeated_blocks

RECOMPUTE_POLICIES = ("none", "selective", "full")
"""Names that `recomputed_operators` knows."""

ATTENTION_CORE = frozenset({"attention", "softmax"})
"""Kinds that the selective policy recomputes, beside matrix products without parameters."""


def segments_of(graph: OperatorGraph) -> tuple[int, ...]:
    """The segment of every operator, numbered by its first operator.

    Each repeat of a block is one, cut where the least bytes go from one repeat to the next.
    Elsewhere a segment ends where a single tensor goes on, as between residual blocks.

    Example:
        >>> from stratagem.simulator.models import gpt
        >>> graph = gpt(num_layers=3, hidden=8, num_heads=2, sequence=4, batch=2)
        >>> segment = dict(zip((op.name for op in graph.operators), segments_of(graph)))
        >>> segment["h.1.ln_1"] == segment["h.1.add_1"] != segment["h.2.ln_1"]
        True
    """
    starts = {i for i, narrow in enumerate(_narrow_cuts(graph)) if narrow}
    for block in repeated_blocks(graph):
        first = block.start + _best_cut(graph, block)
        count = (block.start + block.length * block.count - first) // block.length
        last = first + count * block.length
        starts -= set(range(first, last))
        starts |= set(range(first, last + 1, block.length))
    number, segment = [], 0
    for i in range(len(graph.operators)):
        segment = i if i in starts else segment
        number.append(segment)
    return tuple(number)


def _narrow_cuts(graph: OperatorGraph) -> list[bool]:
    """Per operator whether at most one tensor goes from those before it to it and those behind."""
    last: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        if graph.operators[edge.producer].kind != "source":
            tensor = (edge.producer, edge.output)
            last[tensor] = max(last.get(tensor, 0), edge.consumer)
    change = [0] * (len(graph.operators) + 1)
    for (producer, _), consumer in last.items():
        change[producer + 1] += 1
        change[consumer + 1] -= 1
    return [crossing <= 1 for crossing in itertools.accumulate(change[:-1])]


def _best_cut(graph: OperatorGraph, block: RepeatedBlock) -> int:
    """How many operators behind the start of a block the cut with the least bytes is."""
    crossing = [0] * block.length
    for edge in graph.edges:
        producer = graph.operators[edge.producer]
        if producer.kind == "source":
            continue
        made = producer.outputs[edge.output]
        size = math.prod(factor_sizes(made.layout, producer.sizes))
        # Cuts in the second repeat stand for all: what the first reads may come from elsewhere.
        base = block.start + block.length
        for cut in range(block.length):
            if edge.producer < base + cut <= edge.consumer:
                crossing[cut] += size
    return min(range(block.length), key=lambda cut: (crossing[cut], cut))


def check_policy(policy: str) -> None:
    """Raise ValueError if there is no recompute policy of that name."""
    if policy not in RECOMPUTE_POLICIES:
        near = difflib.get_close_matches(policy, RECOMPUTE_POLICIES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"no recompute policy {policy!r}: {hint}there are {', '.join(RECOMPUTE_POLICIES)}"
        )


def recomputed_operators(graph: OperatorGraph, policy: str) -> frozenset[str]:
    """The operators that a policy recomputes, by name.

    * ``none``: nothing.
    * ``full``: everything in repeated blocks whose result stays inside its segment.
    * ``selective``: of those, the attention core only: scores, softmax and their product with the
      values (Korthikanti et al. 2022, arXiv 2205.05198).

    Raises:
        ValueError: if there is no such policy.
    """
    check_policy(policy)
    if policy == "none":
        return frozenset()
    segment = segments_of(graph)
    outside = {
        edge.producer for edge in graph.edges if segment[edge.producer] != segment[edge.consumer]
    }
    sizes: dict[int, int] = {}
    for number in segment:
        sizes[number] = sizes.get(number, 0) + 1
    found = [
        operator.name
        for i, operator in enumerate(graph.operators)
        if sizes[segment[i]] > 1 and i not in outside and operator.kind != "source"
        if policy == "full"
        or operator.kind in ATTENTION_CORE
        or (operator.kind == "matmul" and not operator.weights)
    ]
    return frozenset(found)
