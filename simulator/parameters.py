"""Where parameters live: what ZeRO and tied weights mean, in the one resharding algebra.

A parameter has a *home*: the placements of its optimizer state, where it is updated. Its first
user owns it. Per use there are three conversions, all plain resharding:

    gradient as made ──sync──▶ home ──update──▶ home ──publish──▶ as the operator uses it

Without ZeRO home is how the owner uses the parameter, sync is an all-reduce over the axes on which
the gradient is Partial, and there is nothing to publish. With ZeRO, home is also sharded over
those axes: sync becomes a reduce-scatter and publish an all-gather (stages 1 and 2, once a step),
or the parameter is gathered before every use (stage 3).

A tied parameter is updated at its owner's home. Another user in the same stage whose gradient lies
like the owner's just adds to it; else its gradient goes to the home by a path (or a transfer
between stages) of its own, and the new value comes back the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stratagem.simulator.graph import Operator, OperatorGraph, Weight, factor_sizes
from stratagem.simulator.placement import (
    REPLICATE,
    Partial,
    Placement,
    Placements,
    Shard,
    largest_shard,
    smallest_shard,
    splits_of,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.plan import Choice
from stratagem.simulator.rules import rule_of


def home_placements(
    weight: Weight, sizes: Mapping[str, int], choice: Choice, shape: Sequence[int]
) -> Placements:
    """Where the owner of a parameter keeps its optimizer state (factor positions of the weight).

    Under ZeRO each axis with a Partial gradient shards the factor whose local size is largest, the
    first among equals; it stays replicated where no factor can be cut without an empty shard.
    """
    home = list(weight_placements(weight, choice.config))
    if choice.zero == 0:
        return tuple(home)
    made = weight_gradient_placements(weight, choice.config)
    whole = factor_sizes(weight.layout, sizes)
    for axis, placement in enumerate(made):
        if isinstance(placement, Partial):
            home[axis] = _zero_shard(whole, home, axis, shape)
    return tuple(home)


def _zero_shard(
    whole: tuple[int, ...], home: list[Placement], axis: int, shape: Sequence[int]
) -> Placement:
    best: Placement = REPLICATE
    most = 0
    for factor, size in enumerate(whole):
        shard = Shard(factor)
        after = [*home[:axis], shard, *home[axis + 1 :]]
        splits = splits_of(after, factor, shape)
        left = largest_shard(size, splits)
        if shard not in home[axis + 1 :] and smallest_shard(size, splits) > 0 and left > most:
            best, most = shard, left
    return best


class Use(enum.Enum):
    """What an operator is to one of its weights."""

    __hash__ = object.__hash__  # Members are the same by identity; Enum hashes their names.

    BUFFER = "not trained"
    OWNED = "updates it"
    TIED_HERE = "adds its gradient to that of the owner in the same stage"
    TIED_ELSEWHERE = "sends its gradient to the owner in another stage"


def use_of(
    graph: OperatorGraph,
    owner: Mapping[str, str],
    operator: Operator,
    weight: Weight,
    inside: set[int],
) -> Use:
    """What `operator` is to its `weight` in a stage that runs the operators `inside`."""
    if not graph.parameter_index[weight.parameter].trainable:
        return Use.BUFFER
    owning = owner[weight.parameter]
    if owning == operator.name:
        return Use.OWNED
    return Use.TIED_HERE if graph.index[owning] in inside else Use.TIED_ELSEWHERE


def trainable_weights(graph: OperatorGraph, operator: Operator) -> tuple[Weight, ...]:
    """The weights of `operator` that are trained (buffers left out)."""
    return tuple(w for w in operator.weights if graph.parameter_index[w.parameter].trainable)


def makes_input_gradients(graph: OperatorGraph, i: int) -> bool:
    """Whether anybody waits for gradients of an operator's inputs: not of a first layer's."""
    return any(
        graph.needs_gradient[graph.index[read.source]] for read in graph.operators[i].inputs
    )


def weight_share(graph: OperatorGraph, i: int) -> float:
    """The part of an operator's backward pass that makes gradients of parameters."""
    operator = graph.operators[i]
    if not trainable_weights(graph, operator):
        return 0.0
    return rule_of(operator).weight_share if makes_input_gradients(graph, i) else 1.0


@dataclass(frozen=True)
class Residence:
    """The three placements of a trained weight: its gradient as made, its home, as it is used."""

    weight: Weight
    use: Use
    made: Placements
    home: Placements
    used: Placements


def residences(
    operator: Operator, uses: Sequence[Use], choice: Choice, shape: Sequence[int]
) -> Iterator[Residence]:
    """The weights of `operator` whose gradients it syncs itself; ZeRO is the owner's affair."""
    for weight, use in zip(operator.weights, uses, strict=True):
        if use not in (Use.BUFFER, Use.TIED_HERE):
            own = choice if use is Use.OWNED else replace(choice, zero=0)
            home = home_placements(weight, operator.sizes, own, shape)
            made = weight_gradient_placements(weight, choice.config)
            yield Residence(weight, use, made, home, weight_placements(weight, choice.config))


def gradient_buckets(
    order: Iterable[int], nbytes: Mapping[int, int], least: int
) -> list[list[int]]:
    """Operators by bucket: gradients are reduced together once there are `least` bytes of them.

    Example:
        >>> gradient_buckets([3, 2, 1, 0], {3: 10, 2: 5, 1: 0, 0: 10}, 12)
        [[3, 2], [1], [0]]

    Args:
        order: in which the gradients are made.
        nbytes: of the gradients of each operator; one without any is alone.
        least: bytes at which a bucket is closed; 0 gives every operator one of its own.
    """
    buckets: list[list[int]] = []
    filling: list[int] = []
    filled = least
    for i in order:
        if nbytes[i] == 0:
            buckets.append([i])
            continue
        if filled >= least:
            filling, filled = [], 0
            buckets.append(filling)
        filling.append(i)
        filled += nbytes[i]
    return buckets
