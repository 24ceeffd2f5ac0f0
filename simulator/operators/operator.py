"""Operators with every dimension named: loops, and which of them index which tensor dimension."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

Layout = tuple[tuple[str, ...], ...]
"""Per tensor dimension the operator dims whose product it is, outermost first; () is size 1."""


class DimKind(enum.Enum):
    """What splitting a dim means (SOAP; "O" is that every operator has a config of its own)."""

    SAMPLE = "sample"
    ATTRIBUTE = "attribute"
    PARAMETER = "parameter"
    REDUCTION = "reduction"


@dataclass(frozen=True)
class Dim:
    """One loop of an operator.

    Example:
        >>> Dim("out", 3072, DimKind.PARAMETER)
        Dim(name='out', size=3072, kind=<DimKind.PARAMETER: 'parameter'>, whole='')

    `whole` is empty when the dim may be sharded, else the reason why it may not.
    """

    name: str
    size: int
    kind: DimKind
    whole: str = ""


@dataclass(frozen=True)
class Input:
    """A tensor that an operator reads.

    `order[j]` is the factor of the source tensor that the j-th factor of `layout` reads, and
    `select` fixes the source factors that are not read: ``((2, 0),)`` takes index 0 of source
    factor 2. `windows` pairs dims of the result that slide over this input with the dims of
    `layout` that they slide over: sharding the first shards the second too (see `image_splits`).
    """

    source: str
    layout: Layout
    output: int = 0
    order: tuple[int, ...] = ()
    select: tuple[tuple[int, int], ...] = ()
    windows: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(factors(self.layout)))))


@dataclass(frozen=True)
class Weight:
    """A parameter (or buffer) that an operator reads, and how its dims index it."""

    parameter: str
    layout: Layout


@dataclass(frozen=True)
class Output:
    """A tensor that an operator makes."""

    layout: Layout
    dtype: str = "float32"
    differentiable: bool = True


@dataclass(frozen=True)
class Parameter:
    """A named tensor that outlives the step; `trainable` is False for buffers."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True


@dataclass(frozen=True)
class GraphInput:
    """A tensor that the user feeds each step; its dim `sample_dim` counts samples."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sample_dim: int | None = 0


@dataclass(frozen=True)
class GraphOutput:
    """What a forward pass gives back: the first output of `operator`, under the user's `name`."""

    name: str
    operator: str


OUTPUT_PREFIX = "output."
"""In front of the name of an output, that of the operator which hands it on."""

SOURCE_KIND = "source"
"""Kind of the operators that no gradient goes through: programs over the graph's inputs."""


@dataclass(frozen=True)
class Operator:
    """One operator: a kind from the rule table, its dims, and what it reads and makes."""

    name: str
    kind: str
    dims: tuple[Dim, ...]
    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    outputs: tuple[Output, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Global size of each dim, by name."""
        return {dim.name: dim.size for dim in self.dims}

    @property
    def is_source(self) -> bool:
        """Whether every rank makes it of the batch alone; all other kinds are trained through."""
        return self.kind == SOURCE_KIND

    def dim(self, name: str) -> Dim:
        """The dim called `name`; ValueError names the operator and its dims otherwise."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        known = ", ".join(dim.name for dim in self.dims)
        raise ValueError(
            f"operator {self.name!r} ({self.kind}) has no dim {name!r}; it has {known}"
        )

    @cached_property
    def windows(self) -> dict[str, str]:
        """Per dim that slides over an input, the dim of that input (see `Input.windows`)."""
        return {loop: inside for read in self.inputs for loop, inside in read.windows}

    @cached_property
    def cut_by(self) -> dict[str, tuple[str, ...]]:
        """Per dim, those that sharding it shards: itself, or what it slides over as well."""
        slides: dict[str, str] = {}
        for loop, inside in self.windows.items():
            slides.setdefault(inside, loop)
        found: dict[str, tuple[str, ...]] = {}
        for dim in self.dims:
            by = slides.get(dim.name, dim.name)
            found[by] = (*found.get(by, ()), dim.name)
        return found

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for two operators that cost the same under equal configs (names left out)."""
        return (
            self.kind,
            self.dims,
            tuple((i.layout, i.order, i.select, *i.windows) for i in self.inputs),
            tuple(w.layout for w in self.weights),
            self.outputs,
            repr(sorted(self.attributes.items())),
        )


class Edge(NamedTuple):
    """Operator `consumer` reads output `output` of `producer` as its input `slot` (indices)."""

    producer: int
    output: int
    consumer: int
    slot: int


@cache
def factors(layout: Layout) -> tuple[str, ...]:
    """The dims of a layout, outermost first.

    Example:
        >>> factors((("a",), ("b", "c")))
        ('a', 'b', 'c')
    """
    return tuple(name for group in layout for name in group)


def shape_of(layout: Layout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The tensor shape that `layout` has when its dims have `sizes`."""
    return tuple(math.prod(sizes[name] for name in group) for group in layout)


def factor_sizes(layout: Layout, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of a layout's factors, outermost first."""
    return tuple(sizes[name] for name in factors(layout))


class Operators(Protocol):
    """What a graph is to those who walk through its operators: `OperatorGraph` is one."""

    @property
    def operators(self) -> tuple[Operator, ...]:
        """In topological order."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What operators read that outlives the step."""

    @property
    def loss(self) -> str:
        """The operator that makes the loss; empty in a forward pass."""

    @property
    def outputs(self) -> tuple[GraphOutput, ...]:
        """What a forward pass gives back; empty where there is a loss."""

    @property
    def index(self) -> dict[str, int]:
        """Position of each operator, by name."""

    @property
    def parameter_index(self) -> dict[str, Parameter]:
        """Each parameter, by name."""

    @property
    def readers(self) -> tuple[tuple[Edge, ...], ...]:
        """Per operator the edges that read its results."""

    @property
    def needs_gradient(self) -> tuple[bool, ...]:
        """Per operator, whether the gradient of its outputs may be needed."""

    @property
    def runs_backward(self) -> tuple[bool, ...]:
        """Per operator, whether it has a backward pass."""

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Operators that normalise by the statistics of a microbatch."""

    def operator(self, name: str) -> Operator:
        """The operator called `name`."""

    def edge_needs_gradient(self, edge: Edge) -> bool:
        """Whether a gradient flows back along `edge`."""
