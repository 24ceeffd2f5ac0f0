"""What annotations ask of plans, as rules that a search holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.constraints import Rule
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Config,
    Partial,
    Shard,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.operator import Operator, factors
from stratagem.simulator.sharding.choice import Choice

Asked = Mapping[int, str | None]
"""By the place of an axis the dim that it splits; None: none."""


@dataclass(frozen=True)
class OnMesh:
    """Every stage has a mesh with axes of these sizes, in this order; axes of one do not count.

    Example:
        >>> OnMesh((2, 4)).sizes
        (2, 4)
    """

    sizes: tuple[int, ...]

    def __call__(self, skeleton: Skeleton) -> bool:
        """Whether a skeleton may be tried."""
        return all(_beyond_one(mesh.shape) == self.sizes for mesh in skeleton.meshes)


@dataclass(frozen=True)
class Lies:
    """Operators lie as asked, or as completion made them that from all annotations.

    Attributes:
        results: what is asked of operators, by name, of the dims of their first result.
        weights: what is asked of operators that use an annotated parameter, which of their weights
            it is, and of its dims.
        completed: the choice of each of these operators in the completed plan.
        sizes: of the annotated axes.
    """

    results: Mapping[str, Asked]
    weights: Mapping[str, tuple[int, Asked]]
    completed: Mapping[str, Choice]
    sizes: tuple[int, ...]

    def __call__(self, operator: Operator, choice: Choice, mesh: DeviceMesh) -> bool:
        """Whether an operator may have a choice."""
        if operator.name not in self.completed:
            return True
        config = _on_axes(choice.config, mesh.shape, self.sizes)
        if config is None:
            return False
        made = self.completed[operator.name]
        if config == made.config and (
            operator.name not in self.weights or choice.zero == made.zero
        ):
            return True
        asked = self.results.get(operator.name)
        if asked is not None and not _result_lies(operator, config, asked):
            return False
        weight = self.weights.get(operator.name)
        return weight is None or _weight_lies(operator, config, choice.zero, *weight)


def rule_of_annotation(
    graph: OperatorGraph,
    name: str,
    tensors: Sequence[str],
    asked: Asked,
    choices: Choices,
    sizes: tuple[int, ...],
) -> Rule:
    """The rule that tensors (of operators or parameters, by name) lie as they are annotated."""
    results = {tensor: asked for tensor in tensors if tensor in graph.index}
    weights: dict[str, tuple[int, Asked]] = {}
    for operator in graph.operators:
        for k, weight in enumerate(operator.weights):
            if weight.parameter in tensors and weight.parameter not in graph.index:
                weights.setdefault(operator.name, (k, asked))
    named = {*results, *weights}
    completed = {each: choices[each] for each in named}
    return Rule(name, choices=Lies(results, weights, completed, sizes))


def rule_of_dim(
    name: str, split: Mapping[str, str], axis: int, choices: Choices, sizes: tuple[int, ...]
) -> Rule:
    """The rule that an axis splits a dim of operators, by name, as a layout has it."""
    results = {operator: {axis: dim} for operator, dim in split.items()}
    completed = {each: choices[each] for each in results}
    return Rule(name, choices=Lies(results, {}, completed, sizes))


def _beyond_one(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def _on_axes(config: Config, shape: Sequence[int], sizes: tuple[int, ...]) -> Config | None:
    """A config by annotated axis, those of one device whole; None on a mesh of other axes."""
    if _beyond_one(shape) != _beyond_one(sizes):
        return None
    placed = iter([p for p, size in zip(config, shape, strict=True) if size > 1])
    return tuple(next(placed) if size > 1 else REPLICATE for size in sizes)


def _result_lies(operator: Operator, config: Config, asked: Asked) -> bool:
    made = factors(operator.outputs[0].layout)
    for axis, dim in asked.items():
        placement = config[axis]
        if dim is not None and placement != Shard(dim):
            return False
        if dim is None and isinstance(placement, Shard) and placement.dim in made:
            return False
    return True


def _weight_lies(operator: Operator, config: Config, zero: int, k: int, asked: Asked) -> bool:
    """Whether a weight is split as asked: by the config, or kept so and gathered (ZeRO-3)."""
    weight = operator.weights[k]
    dims = factors(weight.layout)
    used, made = weight_placements(weight, config), weight_gradient_placements(weight, config)
    for axis, dim in asked.items():
        split = isinstance(used[axis], Shard)
        kept = zero == 3 and isinstance(made[axis], Partial)
        if dim is None:
            if split or kept:
                return False
        elif not kept and not (split and dims[int(used[axis].dim)] == dim):  # type: ignore[union-attr]
            return False
    return True
