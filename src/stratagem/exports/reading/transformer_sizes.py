"""The sizes of a transformer, read from its graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stratagem.searcher.space.logical_dims import logical_dims
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import Operator, factors


@dataclass(frozen=True)
class TransformerSizes:
    """What a decoder-only language model is made of, as Megatron-LM asks for it.

    Attributes:
        layers: attentions.
        hidden: features of a token.
        feed_forward: features between the two products of a layer.
        heads: of an attention.
        query_groups: heads of keys and values.
        sequence: tokens of a sample.
        vocabulary: words.
        tied: whether the head is the table of embeddings.
        rms_norm: whether norms are root mean squares.
        gated: whether two products feed the hidden features of a layer.
        rotary: whether positions are rotations; otherwise they are learned.
        biases: whether products have biases.
    """

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    query_groups: int
    sequence: int
    vocabulary: int
    tied: bool
    rms_norm: bool
    gated: bool
    rotary: bool
    biases: bool


def transformer_sizes(graph: OperatorGraph) -> TransformerSizes | None:
    """The sizes of a causal transformer without experts; None for any other model.

    Positions are rotations or learned, and layers alike.

    Example:
        >>> from stratagem.simulator.graph.models import gpt, resnet
        >>> sizes = transformer_sizes(gpt(num_layers=3, batch=8))
        >>> sizes.layers, sizes.hidden, sizes.feed_forward, sizes.heads, sizes.vocabulary
        (3, 768, 3072, 12, 50257)
        >>> transformer_sizes(resnet(18, batch=8)) is None
        True
    """
    dims = logical_dims(graph)
    attentions, tables, losses = (
        _of_role(graph, role)
        for role in (OperatorRole.ATTENTION, OperatorRole.LOOKUP, OperatorRole.LOSS)
    )
    if not (attentions and tables and losses and "features" in dims) or "experts" in dims:
        return None
    if not all(op.attributes.get("causal") for op in attentions):
        return None
    hidden = dims["hidden"].sizes if "hidden" in dims else ()
    heads = dims["heads"].sizes
    if len(hidden) != 1 or len(heads) != 1 or len(dims["features"].sizes) != 1:
        return None
    rotary = bool(_of_role(graph, OperatorRole.ROTATION))
    if not rotary and len(tables) < 2:
        return None
    products = _of_role(graph, OperatorRole.LAYER)
    inner = {name for chain in dims["hidden"].chains for name, _ in chain}
    return TransformerSizes(
        layers=len(attentions),
        hidden=dims["features"].sizes[0],
        feed_forward=hidden[0],
        heads=heads[0] * _queries_a_group(attentions[0]),
        query_groups=heads[0],
        sequence=attentions[0].sizes["query"],
        vocabulary=tables[0].sizes["vocabulary"],
        tied=any(op.weights[0].parameter == tables[0].weights[0].parameter for op in products),
        rms_norm=bool(_of_role(graph, OperatorRole.RMS_NORM)),
        gated=sum(op.name in inner for op in products) == 3 * len(attentions),
        rotary=rotary,
        biases=any(len(op.weights) > 1 for op in products),
    )


def _of_role(graph: OperatorGraph, role: OperatorRole) -> list[Operator]:
    return [operator for operator in graph.operators if role_of(operator) is role]


def _queries_a_group(attention: Operator) -> int:
    """Heads of queries that share one of keys: what the queries have beside it and the keys lack.

    Queries are (sample, heads…, query, features), keys likewise.
    """
    queries, keys = (attention.inputs[k].layout for k in (0, 1))
    lacking = set(factors(queries[:-2])) - set(factors(keys[:-2]))
    return math.prod(attention.sizes[name] for name in lacking)
