"""Substitutions: graphs that compute the same in another way (TASO, Jia et al. 2019; Unity, Unger
et al. 2022).

A `Substitution` finds the places at which it fits and rewrites a graph there; `rewrite` applies a
list of them. What happened to operators and parameters is kept, so that a plan for a rewritten
graph still runs the user's model.

In:      a graph.
Out:     an equal one, and where its operators and parameters came from.
Imports: graph, operators.kinds, operators, base.
"""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions.edits import (
    Match,
    Rewritten,
    Substituted,
    Substitution,
)
from stratagem.simulator.graph.substitutions.merge_parallel import MergeParallel, SplitParts
from stratagem.simulator.graph.substitutions.merge_sums import SumLinears
from stratagem.simulator.graph.substitutions.merge_unequal import MergeUnequal
from stratagem.simulator.graph.substitutions.reduce_first import ReduceFirst

SUBSTITUTIONS: dict[str, Substitution] = {
    rule.name: rule
    for rule in (MergeParallel(), MergeUnequal(), SplitParts(), SumLinears(), ReduceFirst())
}
"""Every rule, by name."""

__all__ = ["SUBSTITUTIONS", "Match", "Rewritten", "Substituted", "Substitution", "rewrite"]


def rewrite(graph: OperatorGraph, steps: Sequence[Substituted]) -> Rewritten:
    """The graph after some substitutions, one after the other.

    Example:
        >>> from stratagem.simulator.graph.models import llama
        >>> graph = llama(num_layers=1, hidden=8, num_heads=2, ffn=16, vocabulary=32, batch=2)
        >>> both = Substituted("merge", (("layers.0.mlp.gate", "layers.0.mlp.up"),))
        >>> [name for name in rewrite(graph, [both]).graph.names if "mlp" in name]
        ['layers.0.mlp.gate+up', 'layers.0.mlp.act', 'layers.0.mlp.down']

    Args:
        graph: the model at its whole batch.
        steps: rules and where to apply them, each in terms of the graph after those before it.

    Raises:
        ValueError: an unknown rule, or a place where it does not fit.
    """
    found = Rewritten(graph)
    for step in steps:
        found = rewritten_by(found, step)
    return found


def rewritten_by(before: Rewritten, step: Substituted) -> Rewritten:
    """What one more step makes of a rewritten graph.

    Raises:
        ValueError: see `rewrite`.
    """
    graph = before.graph
    if step.rule not in SUBSTITUTIONS:
        raise unknown("substitution", step.rule, SUBSTITUTIONS, where=f"graph {graph.name!r}")
    rule = SUBSTITUTIONS[step.rule]
    known = set(rule.matches(graph))
    for match in step.matches:
        if match not in known:
            raise ValueError(
                f"graph {graph.name!r}: substitution {rule.name!r} does not fit operators "
                f"{', '.join(map(repr, match)) or 'none'}; it has {len(known)} other matches, see "
                f"SUBSTITUTIONS[{rule.name!r}].matches(graph)"
            )
    return before.then(step, rule.apply(graph, step.matches))
