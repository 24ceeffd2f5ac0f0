"""The strategies that people use today, as choices for any operator graph.

Each is a rule on dims, not on models: data parallelism shards what counts samples; Megatron's
tensor parallelism shards dims that begin as an output feature and end in a contraction, such as
heads and the hidden layer of an MLP, wherever such a chain is found.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from stratagem.searcher.space.choices import Choices
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Placement,
    Shard,
    smallest_shard,
    splits_of,
)
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import DimKind, Operator, factor_sizes, factors
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import trainable_weights, zero_stage


class LeftWhole(UserWarning):
    """Tensor parallelism leaves operators whole that it should shard."""


def data_parallel(graph: OperatorGraph, shape: Sequence[int], *, zero: int = 0) -> Choices:
    """Every axis shards the samples; `zero` is the ZeRO stage (Rajbhandari et al. 2020)."""
    return {op.name: sharding_samples(graph, op, shape, zero=zero) for op in graph.operators}


def sharding_samples(
    graph: OperatorGraph, operator: Operator, shape: Sequence[int], *, zero: int = 0
) -> Choice:
    """The choice of one operator under `data_parallel`.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8], batch=4)
        >>> str(sharding_samples(graph, graph.operator("layers.0"), (2,)).config[0])
        'S(sample)'
    """
    return _with_zero(graph, operator, _sample_config(operator, shape, ()), zero)


AxisRule = Callable[[OperatorGraph, int], Mapping[str, Placement]]
"""What an axis of so many ways does to operators, by name; others are data parallel there."""

NO_RULES: Mapping[int, AxisRule] = MappingProxyType({})


def sharing_experts(graph: OperatorGraph, ways: int) -> dict[str, Placement]:
    """Experts are shared out: what runs for each of them has its share.

    Samples are shared out everywhere else, so tokens change devices by all-to-all (Lepikhin et al.
    2020, arXiv 2006.16668).
    """
    return {name: Shard(dim) for name, dim in expert_dims(graph).items()}


def tensor_parallel(
    graph: OperatorGraph,
    shape: Sequence[int],
    axis: int,
    *,
    sequence_parallel: bool = False,
    regather: bool = False,
    zero: int = 0,
    along: Mapping[int, AxisRule] = NO_RULES,
    inside_experts: bool = False,
) -> Choices:
    """Megatron-LM: tensor parallelism along `axis`, data parallelism along the others.

    With `sequence_parallel` operators that tensor parallelism leaves replicated shard another dim
    of their activations along `axis` (Shoeybi et al. 2019; Korthikanti et al. 2022). With
    `regather` layers keep of their gathered inputs the shard only, as Megatron-LM does, and gather
    again in backward.

    `along` has what other axes do, by axis: operators that its rule says nothing of are data
    parallel there. With `inside_experts` tensor parallelism cuts inside every expert.
    """
    sharded = tensor_dims(graph, shape[axis], inside_experts=inside_experts)
    ruled = {k: rule(graph, shape[k]) for k, rule in along.items()}
    choices: Choices = {}
    for operator in graph.operators:
        placed = {k: by[operator.name] for k, by in ruled.items() if operator.name in by}
        config = list(_sample_config(operator, shape, (axis, *placed)))
        for k, placement in placed.items():
            config[k] = placement
        if operator.name in sharded:
            config[axis] = Shard(sharded[operator.name])
        elif sequence_parallel and not operator.is_source:
            config[axis] = _activation_shard(operator, config, shape, axis)
        choice = _with_zero(graph, operator, tuple(config), zero)
        again = regather and operator.name in sharded and operator.weights
        choices[operator.name] = replace(choice, regather=True) if again else choice
    return choices


def expert_parallel(graph: OperatorGraph, shape: Sequence[int], *, zero: int = 0) -> Choices:
    """GShard: data parallelism, but for experts, which are shared out over the same devices.

    What runs for each expert shards the experts along every axis, innermost first, as far as they
    go, and samples along the others. What sends tokens to experts and brings them back shards
    samples, so tokens change devices by all-to-all (Lepikhin et al. 2020, arXiv 2006.16668).
    """
    experts = expert_dims(graph)
    choices: Choices = {}
    for operator in graph.operators:
        config = _sample_config(operator, shape, ())
        if operator.name in experts:
            config = _expert_config(operator, experts[operator.name], shape)
        choices[operator.name] = _with_zero(graph, operator, config, zero)
    return choices


def shares_experts(graph: OperatorGraph, shape: Sequence[int]) -> bool:
    """Whether `expert_parallel` on a mesh of `shape` shares experts out over several devices."""
    return any(
        math.prod(splits_of(_expert_config(graph.operator(name), dim, shape), dim, shape)) > 1
        for name, dim in expert_dims(graph).items()
    )


def with_recompute(graph: OperatorGraph, choices: Choices, policy: str) -> Choices:
    """The same choices with the operators of a recompute policy recomputed.

    Raises:
        ValueError: if there is no such policy (see `recomputed_operators`).
    """
    return recomputing(choices, recomputed_operators(graph, policy))


def recomputing(choices: Choices, names: Container[str]) -> Choices:
    """The same choices with the operators called `names`, and no others, recomputed."""
    return {
        name: replace(choice, recompute=again) if choice.recompute != again else choice
        for name, choice in choices.items()
        for again in [name in names]
    }


def known_strategies(
    graph: OperatorGraph,
    shape: Sequence[int],
    *,
    zero_stages: Sequence[int],
    model_zero_stages: Sequence[int],
) -> list[Choices]:
    """Data parallelism with every axis; tensor and expert parallelism along the last one.

    Args:
        graph: of a microbatch.
        shape: of the mesh.
        zero_stages: those of data parallelism.
        model_zero_stages: those of tensor and expert parallelism.
    """
    made = [data_parallel(graph, shape, zero=zero) for zero in zero_stages]
    axis = len(shape) - 1
    if shape[axis] > 1 and tensor_dims(graph, shape[axis]):
        made += [
            tensor_parallel(graph, shape, axis, sequence_parallel=sequence, zero=zero)
            for sequence in (False, True)
            for zero in model_zero_stages
        ]
    if shares_experts(graph, shape):
        made += [expert_parallel(graph, shape, zero=zero) for zero in model_zero_stages]
    return made


def replicated(graph: OperatorGraph, shape: Sequence[int]) -> Choices:
    """Every device does everything."""
    config: Config = (REPLICATE,) * len(shape)
    return {operator.name: Choice(config) for operator in graph.operators}


def tensor_dims(
    graph: OperatorGraph, ways: int, *, inside_experts: bool = False
) -> dict[str, str]:
    """Per operator the dim that `ways`-fold tensor parallelism shards.

    Dims of different operators that index the same factor of a tensor (or of a tied parameter) are
    one chain. A chain is used when it shards parameters and ends in a sum (a contraction, or the
    loss over a vocabulary), no member must be whole or counts samples, all can be cut `ways`
    times. Of chains that have an operator in common those are used that shard many parameters (see
    `independent`): in a bottleneck of a residual network the two around its widest channels.
    `inside_experts` leaves out chains that count experts.
    """
    known: dict[tuple[int, bool], dict[str, str]] = graph.derived.setdefault(tensor_dims, {})
    key = ways, inside_experts
    if key not in known:
        known[key] = _tensor_dims(graph, ways, expert_dims(graph) if inside_experts else {})
    return known[key]


def left_whole(
    graph: OperatorGraph, ways: int, *, inside_experts: bool = False
) -> dict[str, tuple[str, int]]:
    """Operators that tensor parallelism would shard, were their dims not too small for it.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> left_whole(gpt(num_layers=1), 8)["h.0.attn.qkv"]  # GPT-2 has 12 heads
        ('head', 12)

    Returns:
        Per operator the dim, and its size.
    """
    wanted = tensor_dims(graph, 1, inside_experts=inside_experts)
    sharded = tensor_dims(graph, ways, inside_experts=inside_experts)
    return {
        name: (dim, graph.operator(name).dim(dim).size)
        for name, dim in wanted.items()
        if name not in sharded
    }


def warn_of_whole(graph: OperatorGraph, ways: int, *, inside_experts: bool = False) -> None:
    """Tell whoever called one's caller which operators tensor parallelism leaves whole.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> warn_of_whole(gpt(num_layers=1), 6)  # 12 heads can be cut 6 ways.

    Warns:
        LeftWhole: names the first of `left_whole`, how many there are, and both numbers.
    """
    whole = left_whole(graph, ways, inside_experts=inside_experts)
    if whole:
        name, (dim, size) = next(iter(whole.items()))
        also = f" and {len(whole) - 1} more are" if len(whole) > 1 else " is"
        warnings.warn(
            f"tensor is {ways}, but operator {name!r}{also} left whole on every tensor-parallel "
            f"rank: dim {dim!r} of size {size} cannot be cut so often without an empty shard; "
            "take fewer tensor-parallel ways",
            LeftWhole,
            stacklevel=3,
        )


def _tensor_dims(graph: OperatorGraph, ways: int, experts: Mapping[str, str]) -> dict[str, str]:
    chains = [c for c in _named_chains(graph) if _can_be_cut(c, ways, experts)]
    using: dict[str, set[int]] = defaultdict(set)
    for number, members in enumerate(chains):
        for operator, _ in members:
            using[operator.name].add(number)
    rivals = [set().union(*(using[op.name] for op, _ in m)) - {n} for n, m in enumerate(chains)]
    chosen = independent(rivals, [_parameters_cut(members) for members in chains])
    return {op.name: name for number in chosen for op, name in chains[number]}


_Chain = list[tuple[Operator, str]]
"""Operators, and which dim of each indexes one factor that they share."""


def _named_chains(graph: OperatorGraph) -> Iterator[_Chain]:
    for chain in dim_chains(graph):
        yield [(graph.operators[i], name) for i, name in chain]


def _can_be_cut(members: _Chain, ways: int, experts: Mapping[str, str]) -> bool:
    """Whether tensor parallelism can use a chain by itself."""
    if any(experts.get(op.name) == name for op, name in members):
        return False
    if not any(_ends_chain(op, name) for op, name in members):
        return False
    dims = [op.dim(name) for op, name in members]
    if any(dim.whole or dim.kind is DimKind.SAMPLE for dim in dims):
        return False
    if any(smallest_shard(dim.size, [ways]) < 1 for dim in dims):
        return False
    return len({op.name for op, _ in members}) == len(members) and _saves_work(members)


def _parameters_cut(members: _Chain) -> int:
    """How many parameters the ranks share that split a chain."""
    return sum(
        math.prod(factor_sizes(weight.layout, operator.sizes))
        for operator, name in members
        for weight in operator.weights
        if name in factors(weight.layout)
    )


def independent(rivals: Sequence[set[int]], weights: Sequence[int]) -> list[int]:
    """Items that are no rivals, of much weight together; in order.

    The one of the largest weight by rivals left (and itself) is taken, time and again: together
    they weigh at least Σ wᵥ / (rivals of v + 1) (GWMIN, Sakai, Togasaki and
    Yamazaki 2003, Discrete Applied Mathematics 126). Of equal ones the first is taken.

    Example:
        >>> independent([{1}, {0, 2}, {1}], [2, 3, 2])
        [0, 2]
    """
    left = {number: set(each) for number, each in enumerate(rivals)}
    chosen = [number for number, each in left.items() if not each]
    for number in chosen:
        del left[number]
    while left:
        best = max(left, key=lambda n: (weights[n] / (len(left[n]) + 1), -n))
        chosen.append(best)
        gone = {best, *left[best]}
        for number in gone:
            for rival in left.pop(number) - gone:
                left[rival].discard(number)
    return sorted(chosen)


def expert_dims(graph: OperatorGraph) -> dict[str, str]:
    """Per operator that runs for each expert alone the dim that counts the experts.

    These are contractions that have weights of their own at every index of a dim of their input
    and output, and what lies between two such.
    """
    known: dict[str, str] | None = graph.derived.get(expert_dims)
    if known is None:
        known = graph.derived[expert_dims] = _expert_dims(graph)
    return known


def _expert_dims(graph: OperatorGraph) -> dict[str, str]:
    found: dict[int, str] = {}
    for i, operator in enumerate(graph.operators):
        name = _own_weights_dim(operator)
        if name is not None:
            found[i] = name
    before, behind = _joined(graph, found, forward=True), _joined(graph, found, forward=False)
    found |= {i: name for i, name in before.items() if behind.get(i) == name}
    return {graph.operators[i].name: name for i, name in sorted(found.items())}


def expert_ways(graph: OperatorGraph, data: int) -> tuple[int, ...]:
    """Divisors of `data` ways that experts can be shared out by, so that no device has none.

    Example:
        >>> from stratagem.simulator.graph.models import moe
        >>> expert_ways(moe(experts=8), 12)
        (1, 2, 3, 4)
    """
    counts = [graph.operator(name).dim(dim).size for name, dim in expert_dims(graph).items()]
    divisors = (ways for ways in range(1, data + 1) if data % ways == 0)
    return tuple(
        ways for ways in divisors if ways == 1 or smallest_shard(min(counts, default=0), [ways])
    )


def _own_weights_dim(operator: Operator) -> str | None:
    """A dim of a contraction's input, output and weights that may be sharded."""
    if not (operator.weights and operator.inputs) or all(
        d.kind is not DimKind.REDUCTION for d in operator.dims
    ):
        return None
    shared = set(factors(operator.inputs[0].layout)) & set(factors(operator.outputs[0].layout))
    for name in factors(operator.weights[0].layout):
        if name in shared and not operator.dim(name).whole:
            return name
    return None


def _joined(graph: OperatorGraph, found: dict[int, str], *, forward: bool) -> dict[int, str]:
    """What the experts' results lead to, or come from, and which of its dims counts them.

    It goes on through elementwise operators, which have the dim on both sides.
    """
    seen = dict(found)
    edges = sorted(graph.edges, key=lambda e: e.consumer if forward else -e.producer)
    for edge in edges:
        start, end = edge.producer, edge.consumer
        made = factors(graph.operators[start].outputs[edge.output].layout)
        read = graph.operators[end].inputs[edge.slot]
        pairs = {made[at]: n for n, at in zip(factors(read.layout), read.order, strict=True)}
        if not forward:
            start, end = end, start
            pairs = {ours: theirs for theirs, ours in pairs.items()}
        chain = role_of(graph.operators[end]) is OperatorRole.CHAIN
        if chain and start in seen and seen[start] in pairs:
            seen.setdefault(end, pairs[seen[start]])
    return seen


def _expert_config(operator: Operator, name: str, shape: Sequence[int]) -> Config:
    """Experts along as many inner axes as they can be cut for, samples along the outer ones."""
    size = operator.dim(name).size
    inner: list[int] = []
    for axis in reversed(range(len(shape))):
        if smallest_shard(size, [shape[k] for k in [axis, *inner]]) > 0:
            inner.insert(0, axis)
    config = list(_sample_config(operator, shape, inner))
    for axis in inner:
        config[axis] = Shard(name)
    return tuple(config)


def _ends_chain(operator: Operator, name: str) -> bool:
    """Whether sharding this dim turns the operator's output into a pending sum."""
    return name not in factors(operator.outputs[0].layout)


def _saves_work(members: _Chain) -> bool:
    """Whether a chain shards parameters at all."""
    return any(n in factors(w.layout) for op, n in members for w in op.weights)


def dim_chains(graph: OperatorGraph) -> list[list[tuple[int, str]]]:
    """Dims joined by the tensors and tied parameters they index, in order of first operator.

    A member is (operator, name of its dim); the dims of sources stand alone.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 16, 4], batch=2)
        >>> [(graph.names[i], dim) for i, dim in dim_chains(graph)[4]]
        [('layers.0', 'out'), ('relu', 'feature'), ('layers.1', 'in')]
    """
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
        if producer.is_source:
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
    return Choice(config, zero_stage(graph, operator, zero))
