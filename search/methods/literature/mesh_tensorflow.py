"""Mesh-TensorFlow layouts: a dictionary from dims of the model to axes of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stratagem.searcher.methods.literature.one_stage_prices import Price, StagePrices
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.logical_dims import NAMED_PARTS, LogicalDim, logical_dims
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Config, Placement, Shard, smallest_shard
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Layout, Operator, factors
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import zero_stage

MAX_LAYOUTS = 20_000
"""Layouts that a search tries at most; it refuses to leave some out."""


def layout_choices(
    graph: OperatorGraph, axes: Sequence[MeshAxis], layout: Mapping[str, str], *, zero: int = 0
) -> Choices:
    """Every operator split as a layout says (Shazeer et al. 2018, arXiv 1811.02084).

    Example: Megatron-LM's tensor parallelism with data parallelism, in one line.
        >>> from stratagem.searcher.space.strategies import tensor_parallel
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=2, batch=8, vocabulary=512)
        >>> axes = (MeshAxis("data", 2), MeshAxis("model", 4))
        >>> layout = {"batch": "data", "heads": "model", "hidden": "model", "vocab": "model"}
        >>> layout_choices(graph, axes, layout) == tensor_parallel(graph, (2, 4), 1)
        True

    An operator that must keep a dim whole (a norm its features) does so, and gathers it; where two
    dims of an operator are the same logical dim (queries and keys), the first is split, which
    Mesh-TensorFlow says by renaming the other.

    Args:
        graph: the model.
        axes: of the mesh.
        layout: axis names by logical dim (see `logical_dims`); what is left out stays whole.
        zero: the ZeRO stage of the parameters.

    Raises:
        ValueError: no such dim or axis; two dims of one tensor over the same axis; a dim that no
            operator can split, or that has too few elements.
    """
    dims = logical_dims(graph)
    for name, axis in layout.items():
        _check_rule(graph, dims, axes, name, axis)
    return _laid_out(graph, dims, axes, layout, zero)


def _laid_out(
    graph: OperatorGraph,
    dims: Mapping[str, LogicalDim],
    axes: Sequence[MeshAxis],
    layout: Mapping[str, str],
    zero: int,
) -> Choices:
    place = {axis.name: k for k, axis in enumerate(axes)}
    split: dict[str, dict[int, str]] = {}
    for name, axis in layout.items():
        for operator, dim in dims[name].split.items():
            taken = split.setdefault(operator, {})
            if place[axis] in taken:
                _refuse_pair(graph.operator(operator), taken[place[axis]], dim, axis)
            taken[place[axis]] = dim
    return {
        operator.name: _choice(graph, operator, split.get(operator.name, {}), len(axes), zero)
        for operator in graph.operators
    }


@dataclass(frozen=True)
class LayoutResult:
    """The best layout of a mesh, its price, and how many were tried."""

    layout: Mapping[str, str]
    choices: Choices
    price: Price
    num_tried: int


def best_layout(
    situation: Situation,
    mesh: DeviceMesh,
    *,
    dims: Iterable[str] | None = None,
    num_microbatches: int = 1,
    zero: int = 0,
) -> LayoutResult:
    """The layout with the shortest simulated step among all that fit: every legal one is tried.

    Where none fits, the one closest to it. Mesh-TensorFlow leaves the layout to its user; its
    ``auto_mtf`` chooses one by memory alone.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([512, 512], batch=65536), Cluster.preset("dgx-a100", num_nodes=1)
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> mesh = DeviceMesh((MeshAxis("all", 8),), tuple(range(8)))
        >>> dict(best_layout(situation, mesh).layout)
        {'batch': 'all'}

    Args:
        situation: model, cluster and costs.
        mesh: the devices.
        dims: the logical dims to lay out; `searched_dims` when left out.
        num_microbatches: of a step.
        zero: the ZeRO stage of the parameters.

    Raises:
        ValueError: there are more than `MAX_LAYOUTS` legal layouts, or no such dim.
    """
    graph = situation.graph.microbatch(num_microbatches)
    known = logical_dims(graph)
    names = searched_dims(graph) if dims is None else tuple(dims)
    for name in names:
        _check_name(graph, known, name)
    layouts: list[dict[str, str]] = []
    for layout in _legal_layouts(graph, [known[name] for name in names], mesh.axes):
        layouts.append(layout)
        if len(layouts) > MAX_LAYOUTS:
            raise ValueError(
                f"{graph.name!r} has more than {MAX_LAYOUTS} layouts of {len(names)} dims on "
                f"{len(mesh.axes)} axes: name fewer dims than {', '.join(names)}"
            )
    strategies = [_laid_out(graph, known, mesh.axes, layout, zero) for layout in layouts]
    listed = {name: [choices[name] for choices in strategies] for name in graph.names}
    prices = StagePrices(situation, mesh, listed, num_microbatches)
    found = [prices.of(choices) for choices in strategies]
    best = min(range(len(found)), key=lambda k: (found[k].rank, k))
    return LayoutResult(layouts[best], strategies[best], found[best], len(layouts))


def searched_dims(graph: OperatorGraph) -> tuple[str, ...]:
    """The logical dims worth laying out: those with a name along which all products can be split.

    A product that keeps the dim whole, or a dim that only one operator has, makes it useless.
    """
    found = []
    for dim in logical_dims(graph).values():
        operators = [graph.operator(name) for chain in dim.chains for name, _ in chain]
        products = [op for op in operators if kind_of(op).product is not None]
        alone = all(len({name for name, _ in chain}) == 1 for chain in dim.chains)
        named = dim.name.split(".")[0] in NAMED_PARTS
        if named and products and not alone and not any(op.name in dim.whole for op in products):
            found.append(dim.name)
    return tuple(found)


def _legal_layouts(
    graph: OperatorGraph, dims: Sequence[LogicalDim], axes: Sequence[MeshAxis]
) -> Iterator[dict[str, str]]:
    """Every layout that `layout_choices` takes, the empty one first."""

    def extend(start: int, layout: dict[str, str], taken: set[Member]) -> Iterator[dict[str, str]]:
        yield dict(layout)
        for k in range(start, len(dims)):
            for axis in axes:
                here = {(operator, axis.name) for operator in dims[k].split}
                cut = axis.size > 1 and _smallest(graph, dims[k], axis.size) >= 1
                if cut and here and not here & taken:
                    yield from extend(k + 1, {**layout, dims[k].name: axis.name}, taken | here)

    return extend(0, {}, set())


Member = tuple[str, str]


def _smallest(graph: OperatorGraph, dim: LogicalDim, ways: int) -> int:
    """Elements of the smallest shard that any operator gets."""
    sizes = {graph.operator(operator).dim(name).size for operator, name in dim.split.items()}
    return min((smallest_shard(size, [ways]) for size in sizes), default=0)


def _choice(
    graph: OperatorGraph, operator: Operator, split: Mapping[int, str], num_axes: int, zero: int
) -> Choice:
    placed: list[Placement] = [
        Shard(split[axis]) if axis in split else REPLICATE for axis in range(num_axes)
    ]
    config: Config = tuple(placed)
    return Choice(config, zero_stage(graph, operator, zero))


def _check_name(graph: OperatorGraph, dims: Mapping[str, LogicalDim], name: str) -> None:
    if name not in dims:
        raise ValueError(
            f"{graph.name!r} has no logical dim {name!r}; it has {', '.join(dims)} (see dim_table)"
        )


def _check_rule(
    graph: OperatorGraph,
    dims: Mapping[str, LogicalDim],
    axes: Sequence[MeshAxis],
    name: str,
    axis: str,
) -> None:
    _check_name(graph, dims, name)
    ways = {a.name: a.size for a in axes}
    if axis not in ways:
        raise ValueError(
            f"the layout maps {name!r} to axis {axis!r}, but the mesh has {', '.join(ways)}"
        )
    dim = dims[name]
    if not dim.split:
        operator, reason = next(iter(dim.whole.items()))
        raise ValueError(
            f"logical dim {name!r} cannot be split anywhere; operator {operator!r}: {reason}"
        )
    for operator, local in dim.split.items():
        size = graph.operator(operator).dim(local).size
        if smallest_shard(size, [ways[axis]]) < 1:
            raise ValueError(
                f"the layout maps {name!r} to axis {axis!r} of size {ways[axis]}, but operator "
                f"{operator!r} has {size} of it, which leaves an empty shard: map it to a smaller "
                "axis"
            )


def _refuse_pair(operator: Operator, first: str, second: str, axis: str) -> None:
    """Say which tensor of an operator has both dims."""
    tensors: list[tuple[str, Layout]] = [
        (f"parameter {weight.parameter!r}", weight.layout) for weight in operator.weights
    ]
    tensors += [(f"the result of {operator.name!r}", made.layout) for made in operator.outputs]
    tensors += [(f"the input from {read.source!r}", read.layout) for read in operator.inputs]
    both = [what for what, layout in tensors if {first, second} <= set(factors(layout))]
    where = both[0] if both else "the loop nest"
    raise ValueError(
        f"the layout maps two dims of one tensor to axis {axis!r}: {first!r} and {second!r} of "
        f"{where} at operator {operator.name!r}; map one of them elsewhere"
    )
