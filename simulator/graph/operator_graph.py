"""The operator graph: what a step computes, with every dimension named.

An operator is a loop nest. Its `Dim`s are the loops, each of a SOAP kind, and a `Layout` says
which loops index which tensor dimension. A tensor dimension may be the product of several loops,
outermost
first: the 2304 columns of a fused query-key-value projection are ``("qkv", "head", "head_dim")``.
Those loops are the tensor's *factors*. Views (reshape, transpose, select) only regroup factors, so
they are kept on the edges (`Input.order`, `Input.select`) and never are operators of their own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.numbers_in_json import marked, unmarked
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.operators.chain_shares import Share
from stratagem.simulator.operators.gradient_paths import backward_runs, owners_of
from stratagem.simulator.operators.kinds.sums_over_samples import (
    Added,
    Parts,
    add_shares,
    fewest_values,
    parts_of,
    sample_cuts,
    sizes_cut,
)
from stratagem.simulator.operators.operator import (
    DimKind,
    Edge,
    GraphInput,
    GraphOutput,
    Input,
    Layout,
    Operator,
    Parameter,
    factor_sizes,
    factors,
    shape_of,
)
from stratagem.simulator.operators.repeats import Repeat, repeats

GRAPH_FORM = FileForm(version=1, remedy="capture the model again", format="stratagem graph")


@dataclass(frozen=True)
class OperatorGraph(SavedValue):
    """A step: operators in topological order, ending in a scalar loss, or in what is given back.

    A graph with a `loss` is a training step. One with `outputs` instead is a forward pass: none of
    its parameters is trained, so nothing runs backward.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8], batch=4)
        >>> OperatorGraph.from_json(graph.to_json()) == graph
        True

    Raises:
        ValueError: on a broken graph: an unknown source, dim or parameter, a size below 1, a view
            that does not fit its source, or a name used twice. The message names the operator.
    """

    FILE: ClassVar[str] = "graph file"

    name: str
    inputs: tuple[GraphInput, ...]
    parameters: tuple[Parameter, ...]
    operators: tuple[Operator, ...]
    loss: str
    outputs: tuple[GraphOutput, ...] = ()

    def __post_init__(self) -> None:
        _check_names(self)
        for operator in self.operators:
            _check_operator(self, operator)
        _check_ties(self)
        if not self.outputs and self.loss not in self.index:
            raise ValueError(
                f"graph {self.name!r}: the loss {self.loss!r} is not one of its operators"
            )
        if self.outputs:
            _check_forward(self)

    def __repr__(self) -> str:
        return (
            f"<OperatorGraph {self.name!r}: {len(self.operators)} operators, "
            f"{self.num_parameters:,} parameters>"
        )

    def to_json(self) -> str:
        """The text of a graph file, which `capture` of the command line writes too."""
        return encode({**GRAPH_FORM.head, "graph": _with_attributes(self, marked)})

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> OperatorGraph:
        """Read the text of a graph file."""
        what = what or cls.FILE
        file = GRAPH_FORM.read(text, _GraphFile, what)
        with reading(what):
            return _with_attributes(file.graph, unmarked)

    @property
    def is_forward(self) -> bool:
        """Whether this is a forward pass, which trains nothing, and not a training step.

        Example:
            >>> from stratagem.simulator.graph.models import mlp
            >>> mlp([8, 8], batch=4).is_forward
            False
        """
        return bool(self.outputs)

    @cached_property
    def ends(self) -> frozenset[str]:
        """The operators whose results are asked for: of the loss, or of what is given back."""
        return frozenset(each.operator for each in self.outputs) or frozenset((self.loss,))

    @cached_property
    def readers(self) -> tuple[tuple[Edge, ...], ...]:
        """Per operator the edges that read its results."""
        found: list[list[Edge]] = [[] for _ in self.operators]
        for edge in self.edges:
            found[edge.producer].append(edge)
        return tuple(map(tuple, found))

    @cached_property
    def reads(self) -> tuple[tuple[Edge, ...], ...]:
        """Per operator the edges that it reads, by slot."""
        found: list[list[Edge]] = [[] for _ in self.operators]
        for edge in self.edges:
            found[edge.consumer].append(edge)
        return tuple(map(tuple, found))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the operators, in order."""
        return tuple(operator.name for operator in self.operators)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each operator, by name."""
        return {operator.name: i for i, operator in enumerate(self.operators)}

    @cached_property
    def parameter_index(self) -> dict[str, Parameter]:
        """Each parameter, by name."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every (producer, consumer) pair, ordered by consumer and slot."""
        return tuple(
            Edge(self.index[read.source], read.output, i, slot)
            for i, operator in enumerate(self.operators)
            for slot, read in enumerate(operator.inputs)
        )

    @cached_property
    def needs_gradient(self) -> tuple[bool, ...]:
        """Per operator, whether the gradient of its outputs is ever needed (backward runs)."""
        needs: list[bool] = []
        for operator in self.operators:
            own = any(self.parameter_index[w.parameter].trainable for w in operator.weights)
            fed = any(needs[self.index[read.source]] for read in operator.inputs)
            needs.append((own or fed) and any(out.differentiable for out in operator.outputs))
        return tuple(needs)

    @cached_property
    def runs_backward(self) -> tuple[bool, ...]:
        """Which operators have a backward pass (see `backward_runs`)."""
        return backward_runs(self)

    def edge_needs_gradient(self, edge: Edge) -> bool:
        """Whether a gradient flows back along `edge`."""
        made = self.operators[edge.producer].outputs[edge.output]
        return self.needs_gradient[edge.producer] and made.differentiable

    @cached_property
    def gradient_edges(self) -> frozenset[tuple[int, int]]:
        """(producer, consumer) of the edges along which a gradient flows back."""
        flowing = (edge for edge in self.edges if self.edge_needs_gradient(edge))
        return frozenset((edge.producer, edge.consumer) for edge in flowing)

    def operator(self, name: str) -> Operator:
        """The operator called `name`."""
        if name not in self.index:
            raise unknown(f"operator of graph {self.name!r}", name, self.index)
        return self.operators[self.index[name]]

    @property
    def batch(self) -> int:
        """Number of samples in one step."""
        for given in self.inputs:
            if given.sample_dim is not None:
                return given.shape[given.sample_dim]
        raise ValueError(f"graph {self.name!r} has no input with a sample dim")

    @property
    def num_parameters(self) -> int:
        """Number of trainable scalars, tied ones counted once; in a forward pass of all."""
        counted = (p for p in self.parameters if p.trainable or self.is_forward)
        return sum(math.prod(p.shape) for p in counted)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides what the graph computes (not its name)."""
        ends = (self.loss, *self.outputs)  # A training step has its loss alone.
        text = repr((self.inputs, self.parameters, *ends, *(_identity(o) for o in self.operators)))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """The segment of every operator, numbered by its first operator (see
        `checkpoint_segments`).

        Each repeat of a block is one, cut where the least bytes go from one repeat to the next.
        Elsewhere a segment ends where a single tensor goes on, as between residual blocks.

        Example:
            >>> from stratagem.simulator.graph.models import gpt
            >>> graph = gpt(num_layers=3, hidden=8, num_heads=2, sequence=4, batch=2)
            >>> segment = dict(zip(graph.names, graph.segments))
            >>> segment["h.1.ln_1"] == segment["h.1.add_1"] != segment["h.2.ln_1"]
            True
        """
        starts = {i for i, narrow in enumerate(_narrow_cuts(self)) if narrow}
        for block in repeated_blocks(self):
            first = block.start + _best_cut(self, block)
            count = (block.start + block.length * block.count - first) // block.length
            last = first + count * block.length
            starts -= set(range(first, last))
            starts |= set(range(first, last + 1, block.length))
        number, segment = [], 0
        for i in range(len(self.operators)):
            segment = i if i in starts else segment
            number.append(segment)
        return tuple(number)

    @cached_property
    def owners(self) -> dict[str, str]:
        """The operator that owns each trainable parameter (see `owners_of`)."""
        return owners_of(self)

    @cached_property
    def frozen_readers(self) -> dict[str, tuple[int, ...]]:
        """The operators that read each parameter that is not trained, in order."""
        found: dict[str, list[int]] = {}
        for i, operator in enumerate(self.operators):
            for weight in operator.weights:
                if not self.parameter_index[weight.parameter].trainable:
                    found.setdefault(weight.parameter, []).append(i)
        return {name: tuple(readers) for name, readers in found.items()}

    def microbatch(self, num_microbatches: int) -> OperatorGraph:
        """The graph of one of `num_microbatches` equal microbatches: sample dims divided.

        What is the same for every microbatch and is added to a sum over samples, such as a penalty
        on weights, is divided too (see `sums_over_samples`).

        Raises:
            ValueError: if the batch is not a multiple of `num_microbatches`, or if the losses of
                microbatches do not add up to that of the batch.
        """
        if num_microbatches == 1:
            return self
        if num_microbatches > 1 and self.whole_batch:
            raise ValueError(
                f"batch {self.batch} of {self.name!r} cannot be cut into {num_microbatches} "
                f"microbatches: {self.whole_batch}, and microbatches would train something else; "
                "choose 1 microbatch"
            )
        if num_microbatches not in self.microbatch_counts:
            raise ValueError(
                f"batch {self.batch} of {self.name!r} cannot be cut into {num_microbatches} equal "
                f"microbatches; {self._allowed_counts()}"
            )
        if num_microbatches not in self._microbatches:
            cut = tuple(
                _cut_samples(operator, num_microbatches, self._parts.added.get(operator.name))
                for operator in self.operators
            )
            self._microbatches[num_microbatches] = replace(self, operators=cut)
        return self._microbatches[num_microbatches]

    def _allowed_counts(self) -> str:
        most = max(self.microbatch_counts)
        if self.batch_norms and most < self.batch:
            return f"choose a divisor of {most}, as batch norms need 2 values of a channel"
        apart = "" if most == self.batch else f" (samples belong together in {most} groups)"
        return f"choose a divisor of {most}{apart}"

    @cached_property
    def whole_batch(self) -> str:
        """Why a step must run the whole batch as one microbatch; empty if it may be cut.

        Example:
            >>> from stratagem.simulator.graph.models import mlp
            >>> mlp([8, 8], batch=4).whole_batch
            ''
        """
        dims = ((each.shape, each.sample_dim) for each in self.inputs)
        batches = (shape[dim] for shape, dim in dims if dim is not None)
        return self._parts.problem if max(batches, default=1) > 1 else ""

    @cached_property
    def microbatch_counts(self) -> tuple[int, ...]:
        """Into how many equal microbatches the batch can be cut, ascending.

        Example:
            >>> from stratagem.simulator.graph.models import mlp
            >>> mlp([8, 8], batch=12).microbatch_counts
            (1, 2, 3, 4, 6, 12)
        """
        most = 1 if self.whole_batch else sizes_cut(self, sample_cuts(self))
        small = [n for n in range(1, math.isqrt(most) + 1) if most % n == 0]
        divisors = sorted({*small, *(most // n for n in small)})
        values = fewest_values(self)
        return tuple(n for n in divisors if n == 1 or values is None or values // n > 1)

    def share_of(self, output: GraphOutput) -> Share:
        """How a result comes together from those of microbatches: see `sums_over_samples`.

        Where the whole batch is one microbatch, nothing has to.
        """
        return (
            Share.SAME if self.whole_batch else self._parts.shares[self.index[output.operator]][0]
        )

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Operators that normalise a microbatch by its own mean and variance."""
        return self._parts.batch_norms

    @cached_property
    def _parts(self) -> Parts:
        return parts_of(self, sample_cuts(self))

    @cached_property
    def _microbatches(self) -> dict[int, OperatorGraph]:
        return {}

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What others have worked out of this graph, by keys of their own: kept as long as it."""
        return {}


def repeated_blocks(graph: OperatorGraph) -> tuple[Repeat, ...]:
    """Runs of equal consecutive operator sequences, such as the layers of a transformer.

    Two sequences of two operators or more are equal when their operators have equal signatures
    and read from equally distant producers, or all from the same before them (see `repeats`), as
    layers of a decoder read what the encoder made.
    """
    operators = graph.operators
    # Sources are alike wherever they are.
    sources = [None if each.inputs else each.signature for each in operators]
    made = [[graph.index[r.source] for r in each.inputs] for each in operators]
    kinds = [
        (each.signature, tuple(sources[p] for p in read))
        for each, read in zip(operators, made, strict=True)
    ]
    reads = [[p for p in read if sources[p] is None] for read in made]
    return tuple(repeats(kinds, reads=reads, shortest=2))


def _narrow_cuts(graph: OperatorGraph) -> list[bool]:
    """Per operator whether at most one tensor goes from those before it to it and those behind."""
    last: dict[tuple[int, int], int] = {}
    for edge in graph.edges:
        if not graph.operators[edge.producer].is_source:
            tensor = (edge.producer, edge.output)
            last[tensor] = max(last.get(tensor, 0), edge.consumer)
    change = [0] * (len(graph.operators) + 1)
    for (producer, _), consumer in last.items():
        change[producer + 1] += 1
        change[consumer + 1] -= 1
    return [crossing <= 1 for crossing in itertools.accumulate(change[:-1])]


def _best_cut(graph: OperatorGraph, block: Repeat) -> int:
    """How many operators behind the start of a block the cut with the least bytes is."""
    crossing = [0] * block.length
    for edge in graph.edges:
        producer = graph.operators[edge.producer]
        if producer.is_source:
            continue
        made = producer.outputs[edge.output]
        size = math.prod(factor_sizes(made.layout, producer.sizes))
        # Cuts in the second repeat stand for all: what the first reads may come from elsewhere.
        base = block.start + block.length
        for cut in range(block.length):
            if edge.producer < base + cut <= edge.consumer:
                crossing[cut] += size
    return min(range(block.length), key=lambda cut: (crossing[cut], cut))


def _identity(operator: Operator) -> tuple[Any, ...]:
    reads = tuple((r.source, r.output) for r in operator.inputs)
    weights = tuple(w.parameter for w in operator.weights)
    return (operator.name, *operator.signature, reads, weights)


def _cut_samples(operator: Operator, parts: int, added: Added | None) -> Operator:
    dims = tuple(
        replace(d, size=d.size // parts) if d.kind is DimKind.SAMPLE else d for d in operator.dims
    )
    return replace(add_shares(operator, added, parts) if added else operator, dims=dims)


def _check_forward(graph: OperatorGraph) -> None:
    """A forward pass has no loss, gives back what its operators make, and trains nothing."""
    where = f"graph {graph.name!r}"
    if graph.loss:
        raise ValueError(f"{where} has the loss {graph.loss!r} and outputs; leave out one of them")
    for output in graph.outputs:
        if output.operator not in graph.index:
            raise ValueError(
                f"{where}: output {output.name!r} is made by {output.operator!r}, which is not "
                "one of its operators"
            )
    twice = [name for name, n in Counter(o.name for o in graph.outputs).items() if n > 1]
    if twice:
        raise ValueError(f"{where}: output name {twice[0]!r} is used twice")
    trained = [parameter.name for parameter in graph.parameters if parameter.trainable]
    if trained:
        raise ValueError(
            f"{where} has no loss, but parameter {trained[0]!r} is to be trained; say "
            "trainable=False"
        )


def _check_names(graph: OperatorGraph) -> None:
    for what, names in (
        ("operator", [o.name for o in graph.operators]),
        ("parameter", [p.name for p in graph.parameters]),
    ):
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise ValueError(f"graph {graph.name!r}: {what} name {twice[0]!r} is used twice")
    if not graph.operators:
        raise ValueError(f"graph {graph.name!r} has no operators")


@dataclass(frozen=True)
class _GraphFile:
    """What a graph file holds."""

    format: str
    version: int
    graph: OperatorGraph


def _with_attributes(graph: OperatorGraph, change: Callable[[Any], Any]) -> OperatorGraph:
    operators = tuple(
        replace(o, attributes={name: change(value) for name, value in o.attributes.items()})
        for o in graph.operators
    )
    return replace(graph, operators=operators)


def _check_ties(graph: OperatorGraph) -> None:
    """All uses of a parameter have the same factors, so that its shards can be compared."""
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for operator in graph.operators:
        for weight in operator.weights:
            here = factor_sizes(weight.layout, operator.sizes)
            first, there = seen.setdefault(weight.parameter, (operator.name, here))
            if here != there:
                raise ValueError(
                    f"operators {first!r} and {operator.name!r} share parameter "
                    f"{weight.parameter!r} but see it as factors {there} and {here}; give both "
                    f"the same factors"
                )


def _check_operator(graph: OperatorGraph, operator: Operator) -> None:
    where = f"operator {operator.name!r} ({operator.kind})"
    for dim in operator.dims:
        if dim.size < 1:
            raise ValueError(
                f"{where}: dim {dim.name!r} has size {dim.size}; sizes are at least 1"
            )
    layouts: list[Layout] = [read.layout for read in operator.inputs]
    layouts += [weight.layout for weight in operator.weights]
    layouts += [made.layout for made in operator.outputs]
    for name in (name for layout in layouts for name in factors(layout)):
        operator.dim(name)
    for read in operator.inputs:
        _check_input(graph, operator, read)
    for weight in operator.weights:
        if weight.parameter not in graph.parameter_index:
            raise ValueError(f"{where} reads unknown parameter {weight.parameter!r}")
        shape = shape_of(weight.layout, operator.sizes)
        stored = graph.parameter_index[weight.parameter].shape
        if shape != stored:
            raise ValueError(
                f"{where} reads parameter {weight.parameter!r} as {shape}, but it is {stored}"
            )


def _check_input(graph: OperatorGraph, operator: Operator, read: Input) -> None:
    where = f"operator {operator.name!r} ({operator.kind})"
    if read.source not in graph.index or graph.index[read.source] >= graph.index[operator.name]:
        raise ValueError(f"{where} reads {read.source!r}, which is not an operator before it")
    source = graph.operators[graph.index[read.source]]
    if not 0 <= read.output < len(source.outputs):
        raise ValueError(
            f"{where} reads output {read.output} of {read.source!r}, which has "
            f"{len(source.outputs)}"
        )
    made = factor_sizes(source.outputs[read.output].layout, source.sizes)
    used = sorted([*read.order, *(position for position, _ in read.select)])
    if used != list(range(len(made))):
        raise ValueError(
            f"{where}: its view of {read.source!r} uses factors {used} of {len(made)} factors"
        )
    seen = tuple(made[position] for position in read.order)
    wanted = factor_sizes(read.layout, operator.sizes)
    if seen != wanted:
        raise ValueError(
            f"{where} reads {read.source!r} with factor sizes {wanted}, but they are {seen}"
        )
