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

from stratagem.simulator.graph import OperatorGraph

RECOMPUTE_POLICIES = ("none", "selective", "full")
"""Names that `recomputed_operators` knows."""

ATTENTION_CORE = frozenset({"attention", "softmax"})
"""Kinds that the selective policy recomputes, beside matrix products without parameters."""


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
    segment = graph.segments
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
