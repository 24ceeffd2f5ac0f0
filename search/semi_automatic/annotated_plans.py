"""Plans from annotations of a few tensors, as GSPMD and Mesh-TensorFlow have them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stratagem.searcher.methods.literature.gspmd_propagation import Annotation, Inferred, complete
from stratagem.searcher.methods.literature.mesh_tensorflow import layout_choices
from stratagem.searcher.methods.literature.one_stage_prices import one_stage_plan
from stratagem.searcher.semi_automatic.annotation_rules import (
    OnMesh,
    rule_of_annotation,
    rule_of_dim,
)
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.constraints import Rule, Space
from stratagem.searcher.space.logical_dims import logical_dims
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.strategies import with_recompute
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import factors
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.parameter_homes import zero_stage

MESH_RULE = "the annotated mesh"


@dataclass(frozen=True)
class Asking:
    """What a user said: everything that a plan is completed from.

    Attributes:
        axes: sizes of the mesh's axes by name, outermost first; together all devices.
        annotations: per tensor, or pattern of tensors, the dims that axes split.
        layout: axis by logical dim.
        microbatches: of a step.
        recompute: a policy (see `checkpoint_segments`).
        zero: the ZeRO stage of parameters that no annotation splits.
    """

    axes: Mapping[str, int]
    annotations: Mapping[str, Annotation]
    layout: Mapping[str, str]
    microbatches: int = 1
    recompute: str = "none"
    zero: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What can be taken back one by one: patterns of tensors, or dims of the layout."""
        return tuple(self.annotations or self.layout)

    def without(self, name: str) -> Asking:
        """The same with one annotation, or dim of the layout, taken back."""
        left = {each: asked for each, asked in self.annotations.items() if each != name}
        rest = {each: axis for each, axis in self.layout.items() if each != name}
        return replace(self, annotations=left, layout=rest)


@dataclass(frozen=True, eq=False)
class Annotated:
    """A plan completed from annotations, and what it takes to search on under them.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> done = annotate(mlp([8, 16, 4], batch=32), cluster, {"data": 8}, {
        ...     "layers.0": {"data": "sample"},
        ... })
        >>> done
        <Annotated plan of 'mlp': 1 annotation on data 8, 2 shardings inferred>
        >>> print(done.space.describe())
        pipeline=1, rules=(Rule(name='the annotated mesh'), Rule(name='layers.0: data → sample'))

    Attributes:
        plan: the plan.
        graph: the model, whole.
        asking: what the user said.
        inferred: what followed from which annotation; nothing from a layout, which says all.
        space: that the annotated tensors lie so, on such a mesh of all devices and so in one
            stage; for `search`.
    """

    plan: Plan
    graph: OperatorGraph
    asking: Asking
    inferred: tuple[Inferred, ...]
    space: Space

    @property
    def table(self) -> Table:
        """What follows from which annotation."""
        columns = dict.fromkeys(("tensor", "axis", "dim", "annotation"), Unit.TEXT)
        rows = tuple(tuple(row) for row in self.inferred)
        return Table("shardings inferred from annotations", columns, rows)

    def __repr__(self) -> str:
        what = "annotation" if self.asking.annotations else "dim"
        count = len(self.asking.names)
        inferred = f", {len(self.inferred)} shardings inferred" if self.inferred else ""
        return (
            f"<Annotated plan of {self.graph.name!r}: {count} {what}{'s' if count != 1 else ''} "
            f"on {_in_words(self.asking.axes)}{inferred}>"
        )

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def annotate(
    graph: OperatorGraph,
    cluster: Cluster,
    axes: Mapping[str, int],
    annotations: Mapping[str, Annotation] | None = None,
    *,
    layout: Mapping[str, str] | None = None,
    training: Training | None = None,
    microbatches: int = 1,
    recompute: str = "none",
    zero: int = 0,
) -> Annotated:
    """Complete a plan from how a few tensors lie (GSPMD), or from named dims (Mesh-TensorFlow).

    The plan runs the whole model as one stage on all devices. It is a plan as any other; under its
    `space` a search betters what was left open, and `annotation_regret` says what the
    annotations cost.

    Example: data parallelism with the tensor parallelism of Megatron-LM, said of three tensors.
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=256, batch=16)
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> axes = {"data": 2, "model": 4}
        >>> done = annotate(graph, cluster, axes, {
        ...     "*": {"data": "sample"},
        ...     "h.*.mlp.up": {"model": "out"},
        ...     "h.*.attn.qkv": {"model": "head"},
        ... })
        >>> done.plan.stages[0].choices["h.0.mlp.down"].config
        (Shard(dim='sample'), Shard(dim='in'))

    Named dims say the same of wherever they stand:
        >>> layout = {"batch": "data", "heads": "model", "hidden": "model"}
        >>> annotate(graph, cluster, axes, layout=layout).plan.num_devices
        8

    Args:
        graph: the model at its whole batch.
        cluster: whose devices are all used.
        axes: sizes of the mesh's axes by name, outermost first.
        annotations: by the name of an operator (for its first result) or of a parameter, the dim
            that an axis splits; None: it splits none, and so it stays. A pattern (``h.*.mlp.up``)
            means all such tensors that have these dims. What is not named follows by propagation.
        layout: instead of annotations, the axis that splits a logical dim wherever it stands (see
            `logical_dims`); what is left out stays whole.
        training: precision and optimizer; float32 and Adam when left out.
        microbatches: of a step.
        recompute: a policy (see `checkpoint_segments`).
        zero: the ZeRO stage of parameters that no annotation splits.

    Raises:
        ValueError: an argument of another type; both annotations and a layout or neither; axes
            that are not all devices; no such tensor, dim or axis; two patterns that say different
            things of one tensor.
    """
    check_arguments(
        "annotate",
        graph=(graph, OperatorGraph),
        cluster=(cluster, Cluster),
        axes=(axes, Mapping[str, int]),
        annotations=(annotations, Mapping[str, Mapping[str, str | None]] | None),
        layout=(layout, Mapping[str, str] | None),
        training=(training, Training | None),
        microbatches=(microbatches, int),
        recompute=(recompute, str),
        zero=(zero, int),
    )
    asking = Asking(
        dict(axes), dict(annotations or {}), dict(layout or {}), microbatches, recompute, zero
    )
    if bool(annotations) == bool(layout):
        raise ValueError(
            f"annotate {graph.name!r}: give annotations of tensors or a layout of dims, one of "
            "the two"
        )
    return complete_plan(graph, cluster, asking, training or Training())


def complete_plan(
    graph: OperatorGraph, cluster: Cluster, asking: Asking, training: Training
) -> Annotated:
    """The plan and the space of what a user said; with nothing said, all is whole."""
    mesh = _mesh(cluster, asking.axes)
    one = graph.microbatch(asking.microbatches)
    tensors = _matched(one, asking.annotations)
    inferred: tuple[Inferred, ...] = ()
    if asking.layout:
        choices = layout_choices(one, mesh.axes, asking.layout, zero=asking.zero)
    else:
        completion = complete(one, mesh.axes, _by_tensor(tensors, asking.annotations))
        choices, inferred = completion.choices, completion.inferred
        zero_of = {op.name: zero_stage(one, op, asking.zero) for op in one.operators}
        choices = {
            name: choice if choice.zero else replace(choice, zero=zero_of[name])
            for name, choice in choices.items()
        }
    situation = Situation(graph, cluster, training, default_costs())
    recomputed = with_recompute(one, choices, asking.recompute)
    plan = one_stage_plan(
        f"annotated on {_in_words(asking.axes)}", situation, mesh, recomputed, asking.microbatches
    )
    rules = _rules(one, asking, tensors, choices)
    return Annotated(plan, graph, asking, inferred, Space(pipeline=1, rules=rules))


def _mesh(cluster: Cluster, axes: Mapping[str, int]) -> DeviceMesh:
    for name, size in axes.items():
        if size < 1:
            raise ValueError(f"the annotated mesh: axis {name!r} is {size}; it must be 1 or more")
    devices = math.prod(axes.values())
    if not axes or devices != cluster.num_devices:
        raise ValueError(
            f"the annotated mesh {_in_words(axes) or '()'} has {devices} devices, the cluster "
            f"{cluster.name!r} {cluster.num_devices}: name axes that together are all of them"
        )
    named = tuple(MeshAxis(name, size) for name, size in axes.items())
    return DeviceMesh(named, tuple(range(devices)))


def _in_words(axes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in axes.items())


def _matched(
    graph: OperatorGraph, annotations: Mapping[str, Annotation]
) -> dict[str, tuple[str, ...]]:
    """The tensors that each name or pattern means: those of them that have the dims."""
    known = _dims_of_tensors(graph)
    found: dict[str, tuple[str, ...]] = {}
    for pattern, annotation in annotations.items():
        matched = fnmatch.filter(known, pattern)
        if not matched:
            raise unknown(f"tensor of {graph.name!r} to annotate called", pattern, known)
        asked = {dim for dim in annotation.values() if dim is not None}
        having = [tensor for tensor in matched if asked <= set(known[tensor])]
        if not having:
            here = sorted({dim for tensor in matched for dim in known[tensor]})
            raise unknown(
                "dim called", min(asked - set(here), default=min(asked)), here, where=repr(pattern)
            )
        found[pattern] = tuple(having)
    return found


def _dims_of_tensors(graph: OperatorGraph) -> dict[str, tuple[str, ...]]:
    """The dims of every operator's first result, and of every parameter in its first user."""
    found: dict[str, tuple[str, ...]] = {}
    for operator in graph.operators:
        if not operator.is_source:
            found[operator.name] = factors(operator.outputs[0].layout)
    for operator in graph.operators:
        for weight in operator.weights:
            found.setdefault(weight.parameter, factors(weight.layout))
    return found


def _by_tensor(
    tensors: Mapping[str, tuple[str, ...]], annotations: Mapping[str, Annotation]
) -> dict[str, dict[str, str | None]]:
    """The annotations of each tensor, of all patterns that mean it."""
    found: dict[str, dict[str, str | None]] = {}
    origin: dict[tuple[str, str], str] = {}
    for pattern, annotation in annotations.items():
        for tensor in tensors[pattern]:
            for axis, dim in annotation.items():
                asked = found.setdefault(tensor, {})
                if asked.get(axis, dim) != dim:
                    raise ValueError(
                        f"the annotations {origin[tensor, axis]!r} and {pattern!r} both mean "
                        f"{tensor!r}: along {axis!r} it splits {asked[axis]!r} by the one and "
                        f"{dim!r} by the other; let one of them mean fewer tensors"
                    )
                asked[axis], origin[tensor, axis] = dim, pattern
    return found


def _rules(
    graph: OperatorGraph,
    asking: Asking,
    tensors: Mapping[str, tuple[str, ...]],
    choices: Choices,
) -> tuple[Rule, ...]:
    sizes = tuple(asking.axes.values())
    place = {name: k for k, name in enumerate(asking.axes)}
    rules = [Rule(MESH_RULE, skeletons=OnMesh(tuple(size for size in sizes if size > 1)))]
    for pattern, annotation in asking.annotations.items():
        asked = {place[axis]: dim for axis, dim in annotation.items()}
        said = ", ".join(f"{axis} → {dim or 'none'}" for axis, dim in annotation.items())
        rules.append(
            rule_of_annotation(
                graph, f"{pattern}: {said}", tensors[pattern], asked, choices, sizes
            )
        )
    if asking.layout:
        dims = logical_dims(graph)
        for name, axis in asking.layout.items():
            rules.append(
                rule_of_dim(f"{name} → {axis}", dims[name].split, place[axis], choices, sizes)
            )
    return tuple(rules)
