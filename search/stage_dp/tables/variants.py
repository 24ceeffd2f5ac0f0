"""Variants: the strategies that a stage on a mesh of data × tensor ways may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.strategies import (
    expert_dims,
    expert_parallel,
    recomputing,
    tensor_dims,
    tensor_parallel,
)
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.simulator.graph.checkpoint_segments import recomputed_operators
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import zero_stage

MakeChoices = Callable[[OperatorGraph, Sequence[int]], "Choices | None"]
"""Choices by operator of (part of) a graph on a mesh of a shape; None where there are none."""


@dataclass(frozen=True)
class VariantLayout:
    """Configs of every operator, without ZeRO and recompute: a name and who makes them.

    `make` is given a graph at one microbatch, perhaps with fewer repeats of equal layers but
    under their names, and the shape (data ways, tensor ways) of a mesh. So a caller may bring
    choices of a solver:

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.searcher.space.strategies import data_parallel
        >>> layout = VariantLayout("data", data_parallel)
        >>> layout.make(mlp([8, 8], batch=4), (4, 1))["layers.0"].zero
        0
    """

    name: str
    make: MakeChoices


@dataclass(frozen=True)
class Variant:
    """What a stage does beside its size: layout, ZeRO stage, recompute policy, and its choices."""

    layout: str
    zero: int
    recompute: str
    choices: Choices

    def __str__(self) -> str:
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        again = f", {self.recompute} recompute" if self.recompute != "none" else ""
        return f"{self.layout}{zero}{again}"


def _tensor(*, sequence: bool, experts: bool, regather: bool) -> MakeChoices:
    def make(graph: OperatorGraph, shape: Sequence[int]) -> Choices | None:
        if shape[1] > 1 and not tensor_dims(graph, shape[1]):
            return None
        if sequence and shape[1] == 1:
            return None
        again = sequence and regather
        choices = tensor_parallel(graph, shape, 1, sequence_parallel=sequence, regather=again)
        if experts:
            shared = expert_dims(graph)
            if not shared or shape[0] == 1:
                return None
            spread = expert_parallel(graph, shape)
            if all(spread[name].config[0] != Shard(dim) for name, dim in shared.items()):
                return None
            choices |= {name: spread[name] for name in shared}
        return choices

    return make


def standard_layouts(*, regather: bool) -> tuple[VariantLayout, ...]:
    """Data parallelism along the first axis and Megatron-LM's tensor parallelism along the second.

    Without and with sequence parallelism, and with experts shared out over the data-parallel ranks
    where there are experts.

    Args:
        regather: whether sequence parallelism keeps shards of gathered inputs and gathers them
            again in backward, as Megatron-LM does.
    """
    return (
        VariantLayout("plain", _tensor(sequence=False, experts=False, regather=False)),
        VariantLayout("sequence", _tensor(sequence=True, experts=False, regather=regather)),
        VariantLayout("experts", _tensor(sequence=False, experts=True, regather=False)),
        VariantLayout(
            "experts, sequence", _tensor(sequence=True, experts=True, regather=regather)
        ),
    )


LAYOUTS = standard_layouts(regather=True)
"""What stages follow unless told."""


def _sharded(choice: Choice, zero: int) -> Choice:
    return choice if choice.zero == zero else replace(choice, zero=zero)


def variants(
    graph: OperatorGraph, shape: Sequence[int], layout: VariantLayout, limits: PipelineLimits
) -> Iterator[Variant]:
    """All variants of a layout: ZeRO stages where something is data parallel, recompute policies.

    Both are set here, whatever the layout's choices say. Of policies that recompute the same
    operators only the first is listed.
    """
    base = layout.make(graph, shape)
    if base is None:
        return
    policies: dict[frozenset[str], str] = {}
    for policy in limits.recompute:
        policies.setdefault(recomputed_operators(graph, policy), policy)
    for zero in limits.zero_stages if shape[0] > 1 else limits.zero_stages[:1]:
        sharded = {
            name: _sharded(choice, zero_stage(graph, graph.operator(name), zero))
            for name, choice in base.items()
        }
        for again, policy in policies.items():
            yield Variant(layout.name, zero, policy, recomputing(sharded, again))
