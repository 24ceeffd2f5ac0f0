"""Walking an exported graph, node by node, with a graph builder."""

from __future__ import annotations

import operator
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from stratagem.simulator.base.hostile_texts import check_texts
from stratagem.simulator.base.misspelt_names import few, nearest
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    OperatorDraft,
)
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.gradient_paths import untrained
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.torch_ops.aten.arguments import Given
from stratagem.simulator.torch_ops.aten.calls import AtenCall
from stratagem.simulator.torch_ops.aten.checks import (
    check_arguments,
    check_declared,
    check_kind,
    check_made,
    kind_of_term,
)
from stratagem.simulator.torch_ops.aten.expressions import (
    Expression,
    Sources,
    evaluate,
    mask_meaning,
)
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS
from stratagem.simulator.torch_ops.aten.patterns import RmsNorm, find_rms_norms
from stratagem.simulator.torch_ops.aten.sources import LIKE, SOURCES, expression_of
from stratagem.simulator.torch_ops.capture.attributes import names_of_tensors
from stratagem.simulator.torch_ops.capture.fallback import generic
from stratagem.simulator.torch_ops.capture.functional_form import WriteError, write_functionally
from stratagem.simulator.torch_ops.capture.in_place import (
    CHECKS,
    check_state,
    storages,
    written,
)
from stratagem.simulator.torch_ops.capture.mean_losses import divide_sums
from stratagem.simulator.torch_ops.capture.nodes import (
    aten_name,
    by_schema,
    flat,
    in_words,
    look_up,
    shape_and_dtype,
    source_line,
)
from stratagem.simulator.torch_ops.capture.real_views import store_pairs
from stratagem.simulator.torch_ops.generic.programs import CallProgram, UnspeakableError
from stratagem.simulator.torch_ops.kernels.step_programs import as_pairs

_NO_GRADIENT = "wrap_with_set_grad_enabled"
_WRAPPERS = (_NO_GRADIENT, "wrap_with_autocast")

_LARGEST_WRITTEN = 2**16
"""Elements of the largest constant that is written down as numbers."""

_LEAVE_STRICTNESS = "; fallback=True takes it as an operator of its own"


class Walker:
    """Turns an exported program into an operator graph."""

    def __init__(
        self,
        exported: ExportedProgram,
        model: nn.Module,
        *,
        name: str,
        prefix: str,
        batch: int | None,
        fallback: bool,
    ) -> None:
        self._exported = exported
        self._model = model
        # A model that hands calls on may name modules from where it hands them to.
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._prefix = prefix
        self._batch = batch
        self._fallback = fallback
        self._builder = GraphBuilder(name)
        self._sources = Sources(self._builder)
        self._parameters: dict[str, DraftTensor] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._evaluated: dict[Node, torch.Tensor | None] = {}
        self._masks: dict[tuple[Node | None, tuple[int, int]], str] = {}
        self._counters: frozenset[int] = frozenset()
        self._nodes: list[tuple[int, Node]] = []

    def graph(self, *, forward: bool = False) -> OperatorGraph:
        """The operator graph, of a training step or of a forward pass.

        Raises:
            ValueError: see `capture`.
        """
        self._counters = check_state(self._exported, self._model, self._prefix)
        try:
            store_pairs(self._exported)
            write_functionally(self._exported.graph_module, self._counters)
            divide_sums(self._exported.graph_module)
        except WriteError as error:
            raise ValueError(f"{self._describe(error.node)}: {error}") from error
        nodes = {node.name: node for node in self._exported.graph.nodes}
        values: dict[Node, Any] = {}
        named = dict(self._model.named_parameters(remove_duplicate=False))
        shared = names_of_tensors(self._model)
        first = {name: own for own, names in shared.items() for name in names}
        for spec in self._exported.graph_signature.input_specs:
            if isinstance(spec.arg, TensorArgument):
                node = nodes[spec.arg.name]
                if spec.kind is InputKind.PARAMETER:
                    target = str(spec.target)
                    values[node] = self._parameter(
                        first[target], node, named[target].requires_grad
                    )
                elif node.users:
                    values[node] = self._given(spec, node, first)
        output = self._walk(self._exported.graph_module, values)
        if not forward:
            loss = self._loss(output)
            return self._built(lambda: _frozen(self._builder.build(loss)))
        results = self._results(output)
        return self._built(lambda: self._builder.build_forward(results))

    def _parameter(self, name: str, node: Node, trainable: bool) -> DraftTensor:
        name = name.removeprefix(self._prefix)
        if name not in self._parameters:
            shape, dtype = shape_and_dtype(node)
            _check_real(f"parameter {name!r}", dtype)
            made = self._builder.parameter(name, shape, dtype, trainable=trainable)
            self._parameters[name] = made
        return self._parameters[name]

    def _given(self, spec: InputSpec, node: Node, first: Mapping[str, str]) -> Expression:
        """An input, a buffer by the first of its names, or a constant that the model holds."""
        shape, dtype = shape_and_dtype(node)
        if spec.kind is InputKind.USER_INPUT:
            _check_real(f"input {node.name!r}", dtype)
            sample_dim = 0 if shape and shape[0] == self._batch else None
            made = self._builder.input(node.name, shape, dtype, sample_dim=sample_dim)
            self._sources.declare(node.name, made)
            return Expression("input", (node.name,), shape, dtype, node)
        target = str(spec.target)
        name = first.get(target, target).removeprefix(self._prefix)
        constant = self._exported.constants.get(target)
        if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(constant, torch.Tensor):
            constant = as_pairs(constant)
            if constant.is_meta:
                constant = self._without_numbers(constant, node)
            self._constants[node.name] = constant
            return Expression("tensor", (constant.tolist(), dtype), shape, dtype, node)
        return Expression("buffer", (name,), shape, dtype, node)

    def _without_numbers(self, constant: torch.Tensor, node: Node) -> torch.Tensor:
        """What stands for a tensor that the model made where nothing has numbers."""
        if not constant.numel():
            return torch.empty(constant.shape, dtype=constant.dtype)
        line = next(filter(None, map(source_line, node.users)), "an unknown line")
        raise ValueError(
            f"capture of {self._builder.name!r}: what is read at {line} is a tensor of shape "
            f"{tuple(constant.shape)} that was made on the meta device, where it has no numbers: "
            "make it on the CPU, or keep it as a buffer"
        )

    def _loss(self, output: Sequence[Any]) -> DraftTensor:
        for value in output:
            if isinstance(value, DraftTensor) and value.shape == () and "float" in value.dtype:
                return value
        raise ValueError(
            f"capture of {self._builder.name!r}: the model returns no scalar float to minimise; "
            "return the loss from forward, or pass loss= and targets="
        )

    def _results(self, output: Sequence[Any]) -> dict[str, DraftTensor]:
        """What a forward pass gives back, by name, as `named_results` called it."""
        kinds = [spec.kind for spec in self._exported.graph_signature.output_specs]
        given = [
            v for v, kind in zip(output, kinds, strict=True) if kind is OutputKind.USER_OUTPUT
        ]
        tree = self._exported.call_spec.out_spec
        named = {} if tree is None else pytree.tree_unflatten(given, tree)
        if not named:
            raise ValueError(
                f"capture of {self._builder.name!r}: the model returns no tensor; return what is "
                "to be computed from forward"
            )
        check_texts(list(named), f"capture of {self._builder.name!r}: what the model returns")
        return {name: self._handle(value) for name, value in named.items()}

    def _walk(self, module: GraphModule, values: dict[Node, Any]) -> Sequence[Any]:
        norms = find_rms_norms(module.graph)
        for node in module.graph.nodes:
            if node.op == "output":
                return [look_up(each, values) for each in node.args[0]]
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                self._nodes.append((self._builder.num_drafts, node))
                try:
                    values[node] = self._value(node, norms.get(node), values)
                except Exception as error:
                    self._say_where(node, error)
        raise AssertionError("an exported graph ends in its output")

    def _value(self, node: Node, norm: RmsNorm | None, values: dict[Node, Any]) -> Any:
        if norm is not None and _are_tensors(norm, values):
            return self._rms_norm(node, norm, values)
        return self._call(node, values)

    def _say_where(self, node: Node, error: Exception) -> NoReturn:
        """Raise an error with the line that it is about, once."""
        if isinstance(error, ValueError) and str(error).startswith("capture"):
            raise error
        raise ValueError(f"{self._describe(node)}: {in_words(error, node)}") from error

    def _built(self, build: Callable[[], OperatorGraph]) -> OperatorGraph:
        """The graph; what is wrong with one of its operators is said with the operator's line."""
        try:
            return build()
        except Exception as error:
            numbers = map(self._builder.draft_number, _names_in(error))
            number = next((each for each in numbers if each is not None), None)
            if number is not None and self._nodes:
                node = [each for begun, each in self._nodes if begun <= number][-1]
                self._say_where(node, error)
            if isinstance(error, ValueError):
                raise
            raise ValueError(
                f"capture of {self._builder.name!r}: no graph could be made of its operators "
                f"({type(error).__name__}: {error}); leave parts of the model out to find which "
                "of them it is, and write that with other operators"
            ) from error

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        args = [look_up(each, values) for each in node.args]
        if node.target is operator.getitem:
            return args[0][args[1]]
        name = aten_name(node)
        if name == "cat":
            args[0] = _with_elements(node, args[0])
        if name in CHECKS:
            return None
        if name in _WRAPPERS:
            return self._wrapped(name, args)
        targets = written(node)
        if any(storages(each) & self._counters for each in targets):
            return None
        named = {key: look_up(each, values) for key, each in node.kwargs.items()}
        with self._builder.scope(self._path(node)):
            once = self._read_once()
            given = by_schema(node, once(args), {key: once(each) for key, each in named.items()})
            return self._convert(
                node, name.removesuffix("_") if targets else name, given, values, targets
            )

    def _read_once(self) -> Callable[[Any], Any]:
        """What hands a trained parameter on where the same operator has read it already.

        The gradient of a parameter is that of one use of it for each operator.
        """
        seen: set[int] = set()

        def once(value: Any) -> Any:
            if isinstance(value, list):
                return [once(each) for each in value]
            if not isinstance(value, DraftTensor) or not value.is_trained_parameter:
                return value
            if id(value.node) in seen:
                return self._builder.handed_on(value)
            seen.add(id(value.node))
            return value

        return once

    def _rms_norm(self, node: Node, norm: RmsNorm, values: dict[Node, Any]) -> DraftTensor:
        x, weight = values[norm.x], values[norm.weight]
        name = "" if self._is_leaf(node) else "rms_norm"
        with self._builder.scope(self._path(node)):
            return self._builder.rms_norm(x, weight, eps=norm.eps, name=name)

    def _wrapped(self, name: str, args: list[Any]) -> Sequence[Any]:
        """A block under `torch.no_grad` or `torch.autocast`: its nodes, in line."""
        module = next(each for each in args if isinstance(each, GraphModule))
        given = args[args.index(module) + 1 :]
        if name != _NO_GRADIENT and _enabled(args):
            raise ValueError(
                "capture: torch.autocast inside the model is not supported; the precision is a "
                "matter of `Training`"
            )
        inner = [node for node in module.graph.nodes if node.op == "placeholder"]
        results = self._walk(module, dict(zip(inner, given, strict=True)))
        if name == _NO_GRADIENT and args[0] is False:
            return [self._without_gradient(each) for each in results]
        return results

    def _without_gradient(self, value: Any) -> Any:
        if not isinstance(value, DraftTensor):
            return value
        return self._builder.handed_on(value, detached=True)

    def _convert(
        self,
        node: Node,
        name: str,
        given: Given,
        values: dict[Node, Any],
        targets: Sequence[Node],
    ) -> Any:
        """What stands for a node: by its handler, or as an operator that holds the node itself.

        Whatever goes wrong is said with the node's line.
        """
        try:
            made = self._made(node, name, given)
            check_arguments(name, given)
            check_made(node, made)
            return made
        except Exception as error:
            problem = error
        if self._fallback:
            try:
                return self._generic(node, name, values, targets)
            except UnspeakableError as error:
                why = f"; nor can it be an operator of its own: {error}"
            except Exception as error:
                problem, why = error, ""
        else:
            why = _LEAVE_STRICTNESS
        raise ValueError(f"{self._describe(node)}: {in_words(problem, node)}{why}") from problem

    def _generic(
        self, node: Node, name: str, values: dict[Node, Any], targets: Sequence[Node]
    ) -> Any:
        return generic(
            self._builder,
            node,
            values,
            self._handle,
            written=targets,
            what=name,
            name="" if self._is_leaf(node) else name.rpartition("::")[2],
        )

    def _handle(self, value: Any) -> DraftTensor:
        """A value as a tensor that an operator reads."""
        if isinstance(value, DraftTensor):
            return value
        if isinstance(value, Expression):
            return (
                self._buffer(value)
                if value.is_float_buffer
                else self._sources.read(value, broadcast=False)
            )
        raise ValueError(f"it reads {value!r}, which is no tensor")

    def _made(self, node: Node, name: str, given: Given) -> Any:
        """A source where an operator reads sources only, else what its handler makes."""
        if any(isinstance(each, CallProgram) for each in flat(given.everything())):
            raise ValueError(f"aten.{name} of what no operator can hand on is not supported")
        tensors = [x for x in flat(given.everything()) if isinstance(x, (DraftTensor, Expression))]
        is_source = name in LIKE or all(map(_is_source, tensors))
        shape, dtype = shape_and_dtype(node)
        if name in SOURCES and is_source and not _is_random(name, given):
            source = SOURCES[name]
            given.declare(source.names)
            check_declared(name, given)
            term = source.make(given, shape, dtype)
            check_kind(kind_of_term(term), (shape, dtype))
            return expression_of(term, shape, dtype, node)
        if name in ("split", "unbind", "chunk") and is_source:
            return self._parts(node, name, given)
        if name not in HANDLERS:
            if not tensors and (known := evaluate(node, {}, most=_LARGEST_WRITTEN)) is not None:
                dict(given)  # all of its arguments are in its value
                return Expression("tensor", (known.tolist(), dtype), shape, dtype, node)
            raise ValueError(_unsupported(name))
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"aten.{name} makes {dtype}, which no operator can hand on")
        handler = HANDLERS[name]
        given.declare(handler.names)
        check_declared(name, given)
        return handler.make(self._make_call(node, name, given, shape, dtype))

    def _parts(self, node: Node, name: str, given: Given) -> list[Expression]:
        """Parts of an expression, as slices or selections of it."""
        whole: Expression = given["self"]
        dim, start = given["dim"] % len(whole.shape), 0
        parts: list[Expression] = []
        arguments: tuple[Any, ...]
        for value in node.meta["val"]:
            shape = tuple(value.shape)
            if name == "unbind":
                arguments = (whole, dim, start)
                start += 1
            else:
                arguments = (whole, dim, start, start + shape[dim], 1)
                start += shape[dim]
            function = "select" if name == "unbind" else "slice"
            parts.append(Expression(function, arguments, shape, whole.dtype))
        return parts

    def _make_call(
        self, node: Node, name: str, given: Given, shape: tuple[int, ...], dtype: str
    ) -> AtenCall:
        return AtenCall(
            builder=self._builder,
            sources=self._sources,
            operator=name,
            arguments=given,
            shape=shape,
            dtype=dtype,
            leaf=self._is_leaf(node),
            constant=self._constant,
            mask=self._mask,
            parameter=self._buffer,
        )

    def _constant(self, expression: Expression) -> torch.Tensor | None:
        node = expression.node
        if node is None:
            return None
        if node not in self._evaluated:
            self._evaluated[node] = evaluate(node, self._constants)
        return self._evaluated[node]

    def _mask(self, expression: Expression, shape: tuple[int, int]) -> str:
        """What a mask says; layers have one and the same, of millions of elements."""
        key = expression.node, shape
        if key not in self._masks:
            self._masks[key] = mask_meaning(self._constant(expression), shape)
        return self._masks[key]

    def _buffer(self, expression: Expression) -> DraftTensor:
        assert expression.node is not None
        return self._parameter(expression.arguments[0], expression.node, trainable=False)

    def _path(self, node: Node) -> str:
        """The module that a node is of, from the user's model on, which is empty itself."""
        return f"{_full_path(node)}.".removeprefix(self._prefix).removesuffix(".")

    def _is_leaf(self, node: Node) -> bool:
        module = self._modules.get(_full_path(node)) if self._path(node) else None
        return module is not None and next(module.children(), None) is None

    def _describe(self, node: Node) -> str:
        shapes = [tuple(x.meta["val"].shape) for x in node.all_input_nodes if _has_shape(x)]
        path = self._path(node) or "the model itself"
        line = source_line(node)
        at = f" at {line}" if line else ""
        return f"capture: {node.target} in {path}{at} on tensors of shapes {shapes}"


def _check_real(what: str, dtype: str) -> None:
    if dtype.startswith("complex"):
        raise ValueError(
            f"capture: {what} is {dtype}, but plans store real numbers: hold pairs of them, as "
            "torch.view_as_real shows them, and let forward begin with torch.view_as_complex"
        )


def _frozen(graph: OperatorGraph) -> OperatorGraph:
    """The graph with the parameters that get no gradient not trained, as torch leaves them."""
    names = untrained(graph)
    if not names:
        return graph
    warnings.warn(
        f"capture of {graph.name!r}: no gradient of the loss reaches parameter {few(names, 1)}, "
        "as what is made of it is detached or under torch.no_grad; a plan leaves it as it is, as "
        "torch does; requires_grad_(False) says so in the model",
        stacklevel=6,
    )
    kept = (replace(p, trainable=p.trainable and p.name not in names) for p in graph.parameters)
    return replace(graph, parameters=tuple(kept))


def _names_in(error: Exception) -> list[str]:
    """The operators that an error is about: those that it names, or was raised at work on."""
    quoted = re.findall(r"operator '([^']+)'", str(error))
    frames = traceback.walk_tb(error.__traceback__)
    worked = [frame.f_locals.get(each) for frame, _ in frames for each in ("draft", "operator")]
    named = [each.name for each in worked[::-1] if isinstance(each, (OperatorDraft, Operator))]
    return [*quoted, *named]


def _full_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values())), "")
    return re.sub(r"@\d+", "", path)


def _unsupported(name: str) -> str:
    near = nearest(name, HANDLERS)
    like = f" (near are {', '.join(near)})" if near else ""
    return (
        f"aten.{name} is not supported. Write it with operators that are{like}, or add it: "
        f"HANDLERS[{name!r}] of stratagem.simulator.torch_ops.aten.handlers takes what "
        "`reads` makes of a function of the call, like those in operators.py beside it; a kind of "
        "its own is one call of "
        "register_operator in new_operators.py there, as docs/extending/operator.md shows"
    )


def _are_tensors(norm: RmsNorm, values: dict[Node, Any]) -> bool:
    return isinstance(values[norm.x], DraftTensor) and isinstance(values[norm.weight], DraftTensor)


def _with_elements(node: Node, tensors: list[Any]) -> list[Any]:
    """What `cat` puts together, without parts of nothing."""
    listed: Any = node.args[0]
    shown = [each.meta["val"].numel() for each in listed]
    return [tensor for tensor, elements in zip(tensors, shown, strict=True) if elements]


def _has_shape(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_source(value: DraftTensor | Expression) -> bool:
    """Whether it comes from inputs and constants, and no gradient will ever be asked for it.

    Float inputs are tensors of operators: images are normalised as activations are.
    """
    if isinstance(value, DraftTensor):
        return False
    return value.function != "input" or "float" not in value.dtype


def _is_random(name: str, given: Given) -> bool:
    """Whether an operator draws random numbers, as a source cannot: it has no shards."""
    return name == "dropout" and min(given["train"], given["p"]) > 0


def _enabled(args: Sequence[Any]) -> bool:
    """Whether a `wrap_with_autocast` (device, dtype, enabled, …) turns autocast on."""
    return bool(args[2])
