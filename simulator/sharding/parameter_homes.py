"""Where parameters live: what ZeRO and tied weights mean, in the one resharding algebra.

A parameter has a *home*: the placements of its optimizer state, where it is updated. Its first
user owns it. Per use there are three conversions, all plain resharding:

    gradient as made ──sync──▶ home ──update──▶ home ──publish──▶ as the operator uses it

Without ZeRO home is how the owner uses the parameter, sync is an all-reduce over the axes on which
the gradient is Partial, and there is nothing to publish. With ZeRO, home is flat over those axes:
each device has a range of the elements, whatever their number (Rajbhandari et al. 2020, arXiv
1910.02054). Sync becomes a reduce-scatter and publish an all-gather (stages 1 and 2, once a step),
or the parameter is gathered before every use (stage 3). A frozen parameter has a home under
stage 3 only, and is just gathered. Operators of a stage that share one have one copy of it, which
is counted as the first of them has it.

A tied parameter is updated at its owner's home. Another user in the same stage whose gradient lies
like the owner's just adds to it; else its gradient goes to the home by a path (or a transfer
between stages) of its own, and the new value comes back the same way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from stratagem.simulator.base.precision import DTYPE_BYTES, Precision
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Config,
    Placements,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator, Weight, factor_sizes
from stratagem.simulator.sharding.choice import Choice, ParameterMessage, sent_format


def home_placements(weight: Weight, choice: Choice, shape: Sequence[int]) -> Placements:
    """Where the owner of a parameter keeps its optimizer state (factor positions of the weight).

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.graph.placement import Shard
        >>> layer = mlp([8, 6], batch=10).operator("layers.0")
        >>> choice = Choice((Shard("sample"), Shard("out")), zero=1)
        >>> home_placements(layer.weights[0], choice, (5, 2))
        (Flat(), Shard(dim=0))

    Under ZeRO a parameter is flat over every axis along which there are whole copies of it: those
    that sum its gradient and, unless it is a vector, those that leave it as it is: to gather norms
    and biases over these would take more time than it saves memory. An axis of one device is none.
    """
    home = weight_placements(weight, choice.config)
    if choice.zero == 0:
        return home
    made = weight_gradient_placements(weight, choice.config)
    shared = {PARTIAL, REPLICATE} if len(weight.layout) > 1 else {PARTIAL}
    return tuple(
        FLAT if gradient in shared and ways > 1 else placement
        for placement, gradient, ways in zip(home, made, shape, strict=True)
    )


class ParameterUse(enum.Enum):
    """What an operator is to one of its weights."""

    __hash__ = object.__hash__  # Members are the same by identity; Enum hashes their names.

    BUFFER = "not trained, and kept whole"
    FROZEN = "not trained, and gathered under ZeRO-3"
    FROZEN_HERE = "the same, of which an operator before it in the stage has the home"
    OWNED = "updates it"
    TIED_HERE = "adds its gradient to that of the owner in the same stage"
    TIED_ELSEWHERE = "sends its gradient to the owner in another stage"


def use_of(
    graph: OperatorGraph,
    owner: Mapping[str, str],
    operator: Operator,
    weight: Weight,
    inside: set[int],
) -> ParameterUse:
    """What `operator` is to its `weight` in a stage that runs the operators `inside`."""
    if not graph.parameter_index[weight.parameter].trainable:
        if not is_frozen(graph, operator, weight):
            return ParameterUse.BUFFER
        readers = graph.frozen_readers[weight.parameter]
        first = next((i for i in readers if i in inside), None)
        return (
            ParameterUse.FROZEN
            if first in (None, graph.index[operator.name])
            else ParameterUse.FROZEN_HERE
        )
    owning = owner[weight.parameter]
    if owning == operator.name:
        return ParameterUse.OWNED
    return ParameterUse.TIED_HERE if graph.index[owning] in inside else ParameterUse.TIED_ELSEWHERE


def is_frozen(graph: OperatorGraph, operator: Operator, weight: Weight) -> bool:
    """Whether a weight is constant; statistics of batch norms change without being trained."""
    return not kind_of(operator).buffers and not graph.parameter_index[weight.parameter].trainable


def parameter_weights(graph: OperatorGraph, operator: Operator) -> tuple[Weight, ...]:
    """The weights of `operator` that ZeRO may shard: those that are trained or frozen."""
    trained = trainable_weights(graph, operator)
    return tuple(w for w in operator.weights if w in trained or is_frozen(graph, operator, w))


def zero_stage(graph: OperatorGraph, operator: Operator, zero: int) -> int:
    """What ZeRO stage `zero` is for an operator: frozen parameters alone know but the third."""
    if trainable_weights(graph, operator):
        return zero
    return 3 if zero == 3 and parameter_weights(graph, operator) else 0


def zero_stages_of(
    graph: OperatorGraph,
    operator: Operator,
    config: Config,
    shape: Sequence[int],
    stages: Iterable[int],
) -> tuple[int, ...]:
    """Of some ZeRO stages those that differ for an operator with a config, in order.

    Only stage 0 is left where there is one copy of each parameter, or copies of vectors alone that
    need no sum (see `home_placements`).
    """
    stages = tuple(stages)
    if not any(stages):
        return stages[:1]
    sharded = Choice(config, zero=1)
    shared = any(
        FLAT in home_placements(weight, sharded, shape)
        for weight in parameter_weights(graph, operator)
    )
    found = (zero_stage(graph, operator, zero) if shared else 0 for zero in stages)
    return tuple(dict.fromkeys(found))


def trainable_weights(graph: OperatorGraph, operator: Operator) -> tuple[Weight, ...]:
    """The weights of `operator` that are trained (buffers left out)."""
    return tuple(w for w in operator.weights if graph.parameter_index[w.parameter].trainable)


def makes_input_gradients(graph: OperatorGraph, i: int) -> bool:
    """Whether anybody waits for gradients of an operator's inputs: not of a first layer's."""
    known: tuple[bool, ...] | None = graph.derived.get(makes_input_gradients)
    if known is None:
        needed = {name: graph.needs_gradient[j] for name, j in graph.index.items()}
        known = graph.derived[makes_input_gradients] = tuple(
            any(needed[read.source] for read in operator.inputs) for operator in graph.operators
        )
    return known[i]


def weight_share(graph: OperatorGraph, i: int) -> float:
    """The part of an operator's backward pass that makes gradients of parameters."""
    operator = graph.operators[i]
    if not trainable_weights(graph, operator):
        return 0.0
    return kind_of(operator).weight_share if makes_input_gradients(graph, i) else 1.0


class Sending(NamedTuple):
    """What links carry of a parameter: the formats in which devices and links have it, its way."""

    held: str
    sent: str
    source: Placements
    target: Placements

    @property
    def nbytes(self) -> int:
        """Of a scalar, on links."""
        return DTYPE_BYTES[self.sent]


@dataclass(frozen=True)
class Residence:
    """The placements of a weight: its gradient as made, its home, as it is used.

    The gradient of what is not trained lies at home from the start: it is never brought there.
    """

    weight: Weight
    use: ParameterUse
    choice: Choice
    made: Placements
    home: Placements
    used: Placements

    def sending(self, what: ParameterMessage, formats: Precision) -> Sending:
        """How its gradient is sent home, or its value from there to where it is used."""
        held, source, target = formats.gradients, self.made, self.home
        if what is ParameterMessage.VALUE:
            held, source, target = formats.storage, self.home, self.used
        return Sending(held, sent_format(self.choice, what, held), source, target)


def residences(
    operator: Operator, uses: Sequence[ParameterUse], choice: Choice, shape: Sequence[int]
) -> Iterator[Residence]:
    """The weights of `operator` that it syncs or gathers itself; ZeRO is the owner's affair."""
    for weight, use in zip(operator.weights, uses, strict=True):
        frozen = use in (ParameterUse.FROZEN, ParameterUse.FROZEN_HERE)
        if use in (ParameterUse.BUFFER, ParameterUse.TIED_HERE) or (frozen and choice.zero < 3):
            continue
        own = replace(choice, zero=0) if use is ParameterUse.TIED_ELSEWHERE else choice
        home = home_placements(weight, own, shape)
        made = weight_gradient_placements(weight, choice.config)
        used = weight_placements(weight, choice.config)
        yield Residence(weight, use, choice, home if frozen else made, home, used)


def unsharded_gradient_bytes(
    operator: Operator, uses: Sequence[ParameterUse], bytes_each: int
) -> int:
    """Bytes of the gradients that an operator sends to a home, were they whole on every device.

    Buckets are measured by these: which gradients are reduced together depends on the model
    alone, so that a plan has the buckets of every search that it is part of.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> layer = mlp([8, 6], batch=10).operator("layers.0")
        >>> unsharded_gradient_bytes(layer, [ParameterUse.OWNED] * len(layer.weights), 4)
        216

    Args:
        operator: one that has weights, or none.
        uses: what it is to each of its weights.
        bytes_each: of an element of a gradient.
    """
    sent = ParameterUse.OWNED, ParameterUse.TIED_ELSEWHERE
    return bytes_each * sum(
        math.prod(factor_sizes(weight.layout, operator.sizes))
        for weight, use in zip(operator.weights, uses, strict=True)
        if use in sent
    )


def gradient_buckets(
    order: Iterable[int], nbytes: Mapping[int, int], least: int
) -> list[list[int]]:
    """Operators by bucket: gradients are reduced together once there are `least` bytes of them.

    Example:
        >>> gradient_buckets([3, 2, 1, 0], {3: 10, 2: 5, 1: 0, 0: 10}, 12)
        [[3, 2], [1], [0]]

    Args:
        order: in which the gradients are made.
        nbytes: of the gradients of each operator (see `unsharded_gradient_bytes`); one without
            any is alone.
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


def gather_buckets(
    order: Iterable[int], nbytes: Mapping[int, int], segment: Sequence[int], least: int
) -> list[list[int]]:
    """Operators by bucket of a segment: what ZeRO-3 gathers is so together, a layer at most.

    Example:
        >>> gather_buckets([3, 2, 1, 0], {3: 10, 2: 5, 1: 0, 0: 10}, [0, 0, 0, 1], 12)
        [[3], [2, 0], [1]]

    A bucket that goes beyond a layer would be held while others compute: two of them are there at
    a time. So layers are the units of FSDP, each in as many parts as it fills buckets.

    Args:
        order: in which the gradients are made.
        nbytes: of the gradients of each operator, of which buckets are filled.
        segment: of each operator of the graph (see `OperatorGraph.segments`).
        least: bytes at which a bucket is closed; 0 gives every operator one of its own.
    """
    buckets: list[list[int]] = []
    for _, run in groupby(order, key=lambda i: segment[i]):
        buckets += gradient_buckets(run, nbytes, least)
    return buckets
