"""The annotations of two papers, as rules on dims that hold for any model with such dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stratagem.searcher.methods.literature.gspmd_propagation import Annotation
from stratagem.searcher.space.logical_dims import LogicalDim, logical_dims
from stratagem.searcher.space.strategies import expert_dims
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import smallest_shard
from stratagem.simulator.hardware.device_mesh import MeshAxis
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator, factors

TRANSFORMER_RECIPES = ("2d attempt 1", "2d attempt 2", "2d finalized")
"""GSPMD's ways to split a dense transformer, from the first tried to the one kept."""

_INNER = ("heads", "hidden", "expert_hidden", "vocab")
"""Dims inside a layer; `features` lie between layers."""


def transformer_annotations(
    graph: OperatorGraph, axes: Sequence[MeshAxis], recipe: str = "2d finalized"
) -> dict[str, Annotation]:
    """GSPMD's annotations of a dense transformer on a mesh X × Y (Xu et al. 2021, section 5.1).

    Weights are split along both axes, features (M) along X, heads and the hidden layer (H) along
    Y. The recipes differ in activations:

    ==============  =====================  =====================
    recipe          between layers (BSM)   inside a layer (BSH)
    ==============  =====================  =====================
    2d attempt 1    features along X       hidden along Y
    2d attempt 2    batch along X          batch X, hidden Y
    2d finalized    batch X, features Y    batch X, hidden Y
    ==============  =====================  =====================

    Annotated are weights of products and tables, and what products and tables make. Norms keep
    their features whole, so they gather what the last recipe splits.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=1, batch=8)
        >>> axes = (MeshAxis("X", 2), MeshAxis("Y", 2))
        >>> transformer_annotations(graph, axes)["h.0.mlp.down"]
        {'X': 'sample', 'Y': 'out'}

    Args:
        graph: a model whose layers meet in features (see `logical_dims`).
        axes: X and Y.
        recipe: one of `TRANSFORMER_RECIPES`.

    Raises:
        ValueError: an unknown recipe, or a mesh that has not two axes.
    """
    if recipe not in TRANSFORMER_RECIPES:
        raise unknown("recipe", recipe, TRANSFORMER_RECIPES)
    if len(axes) != 2:
        raise ValueError(f"recipe {recipe!r} is for a mesh of 2 axes; this one has {len(axes)}")
    x, y = axes
    place = _Places(graph)
    found: dict[str, Annotation] = {}
    for operator in graph.operators:
        kind = kind_of(operator)
        if kind.role is not OperatorRole.LOOKUP and kind.product is None:
            continue
        for weight in operator.weights:
            dims = factors(weight.layout)
            features = place.one(operator, dims, ("features",), x)
            inner = place.one(operator, dims, _INNER, y)
            if features and inner:
                found.setdefault(weight.parameter, {x.name: features, y.name: inner})
        dims = factors(operator.outputs[0].layout)
        batch = place.one(operator, dims, ("batch",), x)
        if recipe == "2d attempt 1":
            along_x = place.one(operator, dims, ("features",), x)
            along_y = place.one(operator, dims, _INNER, y)
        else:
            split = ("features", *_INNER) if recipe == "2d finalized" else _INNER
            along_x, along_y = batch, place.one(operator, dims, split, y)
        annotation = {x.name: along_x, y.name: along_y}
        if along_x or along_y:
            found[operator.name] = {axis: dim for axis, dim in annotation.items() if dim}
    return found


def gshard_annotations(graph: OperatorGraph, axes: Sequence[MeshAxis]) -> dict[str, Annotation]:
    """GShard's annotations of a mixture of experts (Lepikhin et al. 2020, arXiv 2006.16668).

    Experts are split along every axis, the inner ones first, as far as they go: the weights that
    each has, and what is made for each. Groups of tokens (our samples) are split along every axis
    where they enter. All else, such as the all-to-alls between both, follows.

    Example:
        >>> from stratagem.simulator.graph.models import moe
        >>> graph = moe(num_layers=2, experts=8, batch=8)
        >>> annotations = gshard_annotations(graph, [MeshAxis("device", 8)])
        >>> annotations["wte"], annotations["h.1.moe.up"]
        ({'device': 'sample'}, {'device': 'expert'})
    """
    place = _Places(graph)
    experts = expert_dims(graph)
    found: dict[str, Annotation] = {}
    for name, dim in experts.items():
        operator = graph.operator(name)
        chosen: list[MeshAxis] = []
        for axis in reversed(axes):
            if smallest_shard(operator.sizes[dim], [a.size for a in (axis, *chosen)]) > 0:
                chosen.insert(0, axis)
        outer = [axis for axis in axes if axis not in chosen]
        annotation = {axis.name: dim for axis in chosen} | place.samples(operator, outer)
        found[name] = annotation
        for weight in operator.weights:
            found.setdefault(weight.parameter, {axis.name: dim for axis in chosen})
    for operator in _first_readers(graph):
        if operator.name not in found:
            found[operator.name] = place.samples(operator, axes)
    return {name: annotation for name, annotation in found.items() if annotation}


def _first_readers(graph: OperatorGraph) -> Iterator[Operator]:
    """Operators that read nothing but sources."""
    for operator in graph.operators:
        if not operator.is_source and all(
            graph.operator(read.source).is_source for read in operator.inputs
        ):
            yield operator


class _Places:
    """Which of an operator's dims play which part in the model."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._dims: Mapping[str, LogicalDim] = logical_dims(graph)
        self._part: dict[tuple[str, str], str] = {
            member: name.split(".")[0]
            for name, dim in self._dims.items()
            for chain in dim.chains
            for member in chain
        }

    def one(
        self, operator: Operator, dims: Sequence[str], parts: Sequence[str], axis: MeshAxis
    ) -> str | None:
        """The first of some dims that plays one of the parts and can be cut along the axis."""
        for dim in dims:
            found = self._part.get((operator.name, dim)) in parts
            if found and smallest_shard(operator.sizes[dim], [axis.size]) >= 1:
                return dim
        return None

    def samples(self, operator: Operator, axes: Sequence[MeshAxis]) -> dict[str, str]:
        """The samples of an operator's result, along as many axes as they can be cut."""
        found: dict[str, str] = {}
        ways: list[int] = []
        for dim in factors(operator.outputs[0].layout):
            if self._part.get((operator.name, dim)) != "batch":
                continue
            for axis in axes:
                if smallest_shard(operator.sizes[dim], [*ways, axis.size]) >= 1:
                    found[axis.name] = dim
                    ways.append(axis.size)
        return found
