"""What every graph builder needs: inputs, parameters, sources, elementwise operators, `build`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.building.drafts_to_graph import (
    finish_operators,
    live_drafts,
    live_parameters,
)
from stratagem.simulator.graph.building.elementwise_fusion import fuse_elementwise
from stratagem.simulator.graph.building.factor_unification import fresh, leaves_of
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    Loop,
    Made,
    OperatorDraft,
    Read,
    bind,
)
from stratagem.simulator.graph.building.sample_dims import settle_samples
from stratagem.simulator.graph.building.whole_batch_values import WHOLE, sums_as_sources
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.operator import OUTPUT_PREFIX, DimKind, GraphInput, GraphOutput
from stratagem.simulator.operators.step_programs import (
    SOURCE_FUNCTIONS,
    STEP_FUNCTIONS,
    Steps,
    check_steps,
    references,
    shift_steps,
)

ATTRIBUTE = DimKind.ATTRIBUTE

TARGETS = "targets"
"""Name of the input that capture adds for a loss; other inputs say what the batch is."""


def is_float(dtype: str) -> bool:
    """Whether tensors of a dtype can have a gradient."""
    return dtype.startswith(("float", "bfloat"))


class GraphBuilderBase:
    """The state of a builder: its drafts, inputs and parameters, and how an operator is added."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = ""
        self._drafts: list[OperatorDraft] = []
        self._stored: list[DraftParameter] = []
        self._inputs: list[GraphInput] = []
        self._fed: dict[str, OperatorDraft] = {}

    @contextmanager
    def scope(self, module: str) -> Iterator[None]:
        """Operators made inside belong to `module`, and their names begin with it."""
        outer, self._module = self._module, module
        try:
            yield
        finally:
            self._module = outer

    @property
    def num_drafts(self) -> int:
        """How many operators there are so far, those included that lead to nothing."""
        return len(self._drafts)

    def draft_number(self, name: str) -> int | None:
        """The number of the operator that has a name by now, in the order in which they came."""
        found = (number for number, each in enumerate(self._drafts) if each.name == name)
        return next(found, None)

    def full_name(self, name: str) -> str:
        """`name` after the scope that is open."""
        return ".".join(part for part in (self._module, name) if part)

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        sample_dim: int | None = 0,
    ) -> DraftTensor:
        """A tensor that the user feeds, such as token ids of shape (batch, sequence).

        Raises:
            ValueError: on an unknown dtype, a size below 1, or a name used twice.
        """
        _check_shape(f"input {name!r}", shape)
        self._check_new(f"input {name!r}", dtype, [given.name for given in self._inputs], name)
        self._inputs.append(GraphInput(name, tuple(shape), dtype, sample_dim))
        with self.scope(""):
            made = self.source(
                [["alias", [["input", name]]]], shape, dtype, sample_dim=sample_dim, name=name
            )
        assert isinstance(made.node, OperatorDraft)
        self._fed[name] = made.node
        return made

    def parameter(
        self, name: str, shape: Sequence[int], dtype: str = "float32", *, trainable: bool = True
    ) -> DraftTensor:
        """A tensor that outlives the step; buffers are not `trainable`.

        Raises:
            ValueError: on an unknown dtype, a size below 1, or a name used twice.
        """
        _check_shape(f"parameter {name!r}", shape)
        self._check_new(f"parameter {name!r}", dtype, [s.name for s in self._stored], name)
        stored = DraftParameter(name, tuple(fresh(size) for size in shape), dtype, trainable)
        self._stored.append(stored)
        return DraftTensor(stored, stored.dims, dtype)

    def source(
        self,
        steps: Steps,
        shape: Sequence[int],
        dtype: str,
        *,
        sample_dim: int | None = None,
        name: str = "source",
    ) -> DraftTensor:
        """A tensor computed from graph inputs by a program (`step_programs.SOURCE_FUNCTIONS`)."""
        draft = self._draft("source", name)
        check_steps(steps, known=SOURCE_FUNCTIONS, where=draft.where)
        draft.attributes["steps"] = steps
        loops = [
            self._loop(draft, "dim", ATTRIBUTE, size, whole=WHOLE, labelled=True) for size in shape
        ]
        if sample_dim is not None:
            for factor in loops[sample_dim].factors:
                factor.group.sample = True
        return self._made(draft, loops, dtype)

    def elementwise(
        self,
        inputs: Sequence[DraftTensor],
        steps: Steps,
        dtype: str = "",
        *,
        name: str | None = None,
        detached: bool = False,
    ) -> DraftTensor:
        """Pointwise `steps` over broadcast `inputs`, which ``["in", i]`` counts.

        Parameters among the inputs become weights. `dtype` defaults to that of the first input.
        """
        draft = self._draft("elementwise", steps[-1][0] if name is None else name)
        loops = self._broadcast_loops(draft, [tensor.shape for tensor in inputs])
        renamed: dict[tuple[str, Any], list[Any]] = {}
        for index, tensor in enumerate(inputs):
            own = loops[len(loops) - len(tensor.dims) :]
            read = self._bind(draft, tensor, own, broadcast=True)
            reads, kind = (
                (draft.weights, "weight")
                if isinstance(tensor.node, DraftParameter)
                else (draft.reads, "in")
            )
            renamed["in", index] = [kind, len(reads)]
            reads.append(read)
        check_steps(steps, known=STEP_FUNCTIONS, where=draft.where)
        draft.attributes["steps"] = shift_steps(steps, renamed)
        return self._made(draft, loops, dtype or inputs[0].dtype, detached=detached)

    def pointwise(self, function: str, *operands: DraftTensor | float | str | None) -> DraftTensor:
        """One elementwise function of tensors and numbers: ``pointwise("add", x, 1.0)``."""
        tensors = [each for each in operands if isinstance(each, DraftTensor)]
        positions = iter(range(len(tensors)))
        given = [["in", next(positions)] if isinstance(x, DraftTensor) else x for x in operands]
        return self.elementwise(tensors, [[function, given]])

    def build(self, loss: DraftTensor) -> OperatorGraph:
        """The graph that computes `loss`, a scalar; its sources come first.

        Raises:
            ValueError: `loss` is no scalar of this builder, or an operator cannot be finished.
        """
        made = loss.node
        if not isinstance(made, OperatorDraft) or math.prod(loss.shape) != 1:
            raise ValueError(
                f"graph {self.name!r}: the loss has shape {loss.shape}; it must be one number "
                "made by an operator, such as the result of cross_entropy or reduce"
            )
        return self._built(made)

    def build_forward(self, outputs: Mapping[str, DraftTensor]) -> OperatorGraph:
        """The graph of a forward pass that gives back `outputs`; nothing of it is trained.

        Each output is an operator of its own, which hands on what it reads as it is seen, so that
        plans place it and convert to it as to any other.

        Example:
            >>> from stratagem.simulator.graph.building.graph_builder import GraphBuilder
            >>> b = GraphBuilder("layer")
            >>> y = b.linear(b.input("x", (4, 8)), b.parameter("weight", (2, 8)), None)
            >>> b.build_forward({"y": y}).outputs
            (GraphOutput(name='y', operator='output.y'),)

        Raises:
            ValueError: there is no output, or an operator cannot be finished.
        """
        if not outputs:
            raise ValueError(f"graph {self.name!r}: a forward pass must give something back")
        ends = {name: self._end(name, tensor) for name, tensor in outputs.items()}
        for parameter in self._stored:
            parameter.trainable = False
        return self._built(None, ends)

    def _end(self, name: str, tensor: DraftTensor) -> OperatorDraft:
        handed = self.handed_on(tensor, name=f"{OUTPUT_PREFIX}{name}")
        assert isinstance(handed.node, OperatorDraft)
        return handed.node

    def handed_on(
        self, tensor: DraftTensor, *, name: str | None = None, detached: bool = False
    ) -> DraftTensor:
        """An operator that hands on what it reads, as seen; `detached` without a gradient."""
        return self.elementwise([tensor], [["alias", [["in", 0]]]], name=name, detached=detached)

    def _built(
        self, loss: OperatorDraft | None, outputs: Mapping[str, OperatorDraft] | None = None
    ) -> OperatorGraph:
        """The graph that ends in a loss, or in what a forward pass gives back, by name."""
        given_back = outputs or {}
        ends = [*given_back.values()] if loss is None else [loss]
        sums_as_sources(live_drafts(self._drafts, ends))
        drafts = fuse_elementwise(live_drafts(self._drafts, ends))
        drafts.sort(key=lambda draft: not draft.is_source)
        sampled = [given.name for given in self._inputs if given.sample_dim is not None]
        sampled.sort(key=lambda name: name == TARGETS)
        return settle_samples(
            drafts,
            [self._fed[name] for name in sampled],
            lambda: self._finish(drafts, loss, given_back),
        )

    def _finish(
        self,
        drafts: Sequence[OperatorDraft],
        loss: OperatorDraft | None,
        outputs: Mapping[str, OperatorDraft],
    ) -> OperatorGraph:
        operators = finish_operators(drafts)  # it makes names unique, those of ends too
        read = {name for draft in drafts for name in _inputs_read(draft)}
        return OperatorGraph(
            name=self.name,
            inputs=tuple(map(self._settled, (each for each in self._inputs if each.name in read))),
            parameters=live_parameters(drafts, self._stored),
            operators=operators,
            loss="" if loss is None else loss.name,
            outputs=tuple(GraphOutput(name, draft.name) for name, draft in outputs.items()),
        )

    def _settled(self, given: GraphInput) -> GraphInput:
        """An input with samples only where its factors still count some."""
        leaves = [leaf for loop in self._fed[given.name].loops for leaf in leaves_of(loop.factors)]
        counts = any(leaf.sample for leaf in leaves) or (
            given.sample_dim is not None and given.shape[given.sample_dim] == 1
        )
        return given if counts else replace(given, sample_dim=None)

    def _draft(self, kind: str, name: str) -> OperatorDraft:
        draft = OperatorDraft(self.full_name(name) or kind, kind, self._module)
        self._drafts.append(draft)
        return draft

    def _loop(
        self,
        draft: OperatorDraft,
        name: str,
        kind: DimKind,
        size: int,
        *,
        whole: str = "",
        labelled: bool = False,
    ) -> Loop:
        loop = Loop(name, kind, fresh(size), whole, labelled)
        draft.loops.append(loop)
        return loop

    def _bind(
        self,
        draft: OperatorDraft,
        tensor: DraftTensor,
        loops: Sequence[Loop],
        *,
        broadcast: bool = False,
    ) -> Read:
        """Read `tensor` with one loop per dim, its dims of size 1 repeated if `broadcast`."""
        bound = tuple(
            bind(draft, loop, group, broadcast=broadcast)
            for loop, group in zip(loops, tensor.dims, strict=True)
        )
        return Read(tensor, bound)

    def _bind_weight(
        self,
        draft: OperatorDraft,
        weight: DraftTensor,
        loops: Sequence[Loop],
        *,
        split: DraftTensor | None = None,
        turned: bool = False,
    ) -> Read:
        """Read a parameter that a kernel is given as it is stored.

        `split` is the same with a dim in parts, one loop for each; `turned` says that the kernel
        is told where the last two dims are swapped.

        Where torch is to run the call instead, say so before anything is bound: dims that were
        bound stay tied.

        Raises:
            ValueError: it is no parameter, or seen in another way.
        """
        is_parameter = isinstance(weight.node, DraftParameter)
        if not weight.is_stored and not (is_parameter and turned and weight.is_turned):
            raise ValueError(
                f"{draft.where}: what it has of shape {weight.shape} must be a parameter as it is "
                "stored, and is another view of one; compute with a copy of it"
            )
        return self._bind(draft, weight if split is None else split, loops)

    def _broadcast_loops(
        self, draft: OperatorDraft, shapes: Sequence[Sequence[int]]
    ) -> list[Loop]:
        return [
            self._loop(draft, f"dim{i}", ATTRIBUTE, size, labelled=True)
            for i, size in enumerate(_broadcast(draft.where, shapes))
        ]

    def _made(
        self,
        draft: OperatorDraft,
        loops: Sequence[Loop | None],
        dtype: str,
        *,
        detached: bool = False,
    ) -> DraftTensor:
        kept = tuple(loop if loop is not None and loop.factors else None for loop in loops)
        draft.outputs.append(Made(kept, dtype, is_float(dtype) and not detached))
        dims = tuple(() if loop is None else loop.factors for loop in kept)
        return DraftTensor(draft, dims, dtype, len(draft.outputs) - 1)

    def _computed(self, tensor: DraftTensor) -> DraftTensor:
        """`tensor`, or a copy made by an operator where it is a parameter."""
        return (
            self.pointwise("alias", tensor) if isinstance(tensor.node, DraftParameter) else tensor
        )

    def _written(self, tensor: DraftTensor) -> DraftTensor:
        """`tensor`, or a copy where it is a parameter or repeats elements by `expand`."""
        return self.pointwise("alias", tensor) if tensor.is_broadcast else self._computed(tensor)

    def _check_new(self, what: str, dtype: str, names: Sequence[str], name: str) -> None:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{what}: no dtype {dtype!r}; there are {', '.join(DTYPE_BYTES)}")
        if name in names:
            raise ValueError(f"{what} is declared twice; names must differ")


def _check_shape(what: str, shape: Sequence[int]) -> None:
    for dim, size in enumerate(shape):
        if size < 1:
            raise ValueError(f"{what}: dim {dim} has size {size}; sizes are at least 1")


def _broadcast(where: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(*(1,) * (rank - len(shape)), *shape) for shape in shapes]
    result = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    for shape in padded:
        for dim, (size, wanted) in enumerate(zip(shape, result, strict=True)):
            if size not in (1, wanted):
                raise ValueError(
                    f"{where}: dim {dim} has sizes {size} and {wanted}, which do not broadcast; "
                    "make them equal, or one of them 1"
                )
    return result


def _inputs_read(draft: OperatorDraft) -> Iterator[str]:
    if draft.is_source:
        for _, arguments in draft.attributes["steps"]:
            yield from (name for kind, name in references(arguments) if kind == "input")
