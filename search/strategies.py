"""The strategies that people use today, as choices for any operator graph.

Each is a rule on dims, not on models: data parallelism shards what counts samples; Megatron's
tensor parallelism shards dims that begin as an output feature and end in a contraction, such as
heads and the hidden layer of an MLP, wherever such a chain is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.simulator.graph import DimKind, Operator, OperatorGraph, factors
from stratagem.simulator.parameters import trainable_weights
from stratagem.simulator.placement import (
    REPLICATE,
    Config,
    Placement,
    Shard,
    smallest_shard,
    splits_of,
)
from stratagem.simulator.plan import Choice
from stratagem.simulator.segments import recomputed_operators

Choices = dict[str, Choice]


def data_parallel(graph: OperatorGraph, shape: Sequence[int], *, zero: int = 0) -> Choices:
    """Every axis shards the samples; `zero` is the ZeRO stage (Rajbhandari et al. 2020)."""
    return {
        operator.name: _with_zero(graph, operator, _sample_config(operator, shape, ()), zero)
        for operator in graph.operators
    }


def tensor_parallel(
    graph: OperatorGraph,
    shape: Sequence[int],
    axis: int,
    *,
    sequence_parallel: bool = False,
    zero: int = 0,
) -> Choices:
    """Megatron-LM: tensor parallelism along `axis`, data parallelism along the others.

    With `sequence_parallel` operators that tensor parallelism leaves replicated shard another dim
    of their activations along `axis` (Shoeybi et al. 2019; Korthikanti et al. 2022).
    """
    sharded = tensor_dims(graph, shape[axis])
    choices: Choices = {}
    for operator in graph.operators:
        config = list(_sample_config(operator, shape, (axis,)))
        if operator.name in sharded:
            config[axis] = Shard(sharded[operator.name])
        elif sequence_parallel and operator.kind != "source":
            config[axis] = _activation_shard(operator, config, shape, axis)
        choices[operator.name] = _with_zero(graph, operator, tuple(config), zero)
    return choices


def with_recompute(graph: OperatorGraph, choices: Choices, policy: str) -> Choices:
    """The same choices with the operators of a recompute policy recomputed.

    Raises:
        ValueError: if there is no such policy (see `recomputed_operators`).
    """
    again = recomputed_operators(graph, policy)
    return {name: replace(choice, recompute=name in again) for name, choice in choices.items()}


def replicated(graph: OperatorGraph, shape: Sequence[int]) -> Choices:
    """Every device does everything."""
    config: Config = (REPLICATE,) * len(shape)
    return {operator.name: Choice(config) for operator in graph.operators}


def tensor_dims(graph: OperatorGraph, ways: int) -> dict[str, str]:
    """Per operator the dim that `ways`-fold tensor parallelism shards.

    Dims of different operators that index the same factor of a tensor (or of a tied parameter) are
    one chain. A chain is used when it shards parameters and ends in a sum (a contraction, or the
    loss over a vocabulary), no member must be whole or counts samples, all can be cut `ways`
    times, and none of its operators is in an earlier chain.
    """
    chosen: dict[str, str] = {}
    for chain in _chains(graph):
        members = [(graph.operators[i], name) for i, name in chain]
        if not any(_ends_chain(op, n) for op, n in members):
            continue
        if any(op.dim(n).whole or op.dim(n).kind is DimKind.SAMPLE for op, n in members):
            continue
        if any(smallest_shard(op.dim(n).size, [ways]) < 1 for op, n in members):
            continue
        names = [op.name for op, _ in members]
        if len(set(names)) < len(names) or any(name in chosen for name in names):
            continue
        if _saves_work(members):
            chosen.update({op.name: n for op, n in members})
    return chosen


def _ends_chain(operator: Operator, name: str) -> bool:
    """Whether sharding this dim turns the operator's output into a pending sum."""
    return name not in factors(operator.outputs[0].layout)


def _saves_work(members: list[tuple[Operator, str]]) -> bool:
    """Whether a chain shards parameters at all."""
    return any(n in factors(w.layout) for op, n in members for w in op.weights)


def _chains(graph: OperatorGraph) -> list[list[tuple[int, str]]]:
    """Dims joined by the tensors and tied parameters they index, in order of first operator."""
    parent: dict[tuple[int, str], tuple[int, str]] = {
        (i, dim.name): (i, dim.name) for i, op in enumerate(graph.operators) for dim in op.dims
    }

    def root(node: tuple[int, str]) -> tuple[int, str]:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(a: tuple[int, str], b: tuple[int, str]) -> None:
        first, second = sorted((root(a), root(b)))
        parent[second] = first

    for edge in graph.edges:
        producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
        if producer.kind == "source":
            continue
        read = consumer.inputs[edge.slot]
        made = factors(producer.outputs[edge.output].layout)
        for name, position in zip(factors(read.layout), read.order, strict=True):
            join((edge.producer, made[position]), (edge.consumer, name))
    users: dict[str, tuple[int, tuple[str, ...]]] = {}
    for i, op in enumerate(graph.operators):
        for weight in trainable_weights(graph, op):
            here = factors(weight.layout)
            first, names = users.setdefault(weight.parameter, (i, here))
            for a, b in zip(names, here, strict=True):
                join((first, a), (i, b))
    chains: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for node in parent:
        chains.setdefault(root(node), []).append(node)
    return [chains[key] for key in sorted(chains)]


def _sample_config(operator: Operator, shape: Sequence[int], skip: Sequence[int]) -> Config:
    """Shard the samples along every axis but those in `skip`, as far as they go."""
    config: list[Placement] = [REPLICATE] * len(shape)
    sample = next((d for d in operator.dims if d.kind is DimKind.SAMPLE and not d.whole), None)
    if sample is None:
        return tuple(config)
    for axis in range(len(shape)):
        if axis not in skip:
            config[axis] = Shard(sample.name)
            if smallest_shard(sample.size, splits_of(config, sample.name, shape)) < 1:
                config[axis] = REPLICATE
    return tuple(config)


def _activation_shard(
    operator: Operator, config: Sequence[Placement], shape: Sequence[int], axis: int
) -> Placement:
    """A dim of the output, other than the samples, that can be cut along `axis`."""
    for name in factors(operator.outputs[0].layout):
        dim = operator.dim(name)
        free = not dim.whole and dim.kind is DimKind.ATTRIBUTE and Shard(name) not in config
        if free and smallest_shard(dim.size, [shape[axis]]) > 0:
            return Shard(name)
    return REPLICATE


def _with_zero(graph: OperatorGraph, operator: Operator, config: Config, zero: int) -> Choice:
    return Choice(config, zero if trainable_weights(graph, operator) else 0)
