"""From an `nn.Module` to an operator graph: export it with torch, then walk the exported graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, TensorArgument

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.torch_ops.blocks.module_rules import Rules, exchanged
from stratagem.simulator.torch_ops.capture.exporting import export
from stratagem.simulator.torch_ops.capture.walk import Walker


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    targets: torch.Tensor | None = None,
    rules: Rules | None = None,
    fallback: bool = True,
    forward: bool = False,
) -> OperatorGraph:
    """The operator graph of one training step of `model` on inputs like `args` and `kwargs`.

    With `forward` that of its forward pass alone.

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = GPT2LMHeadModel(GPT2Config(use_cache=False))
        >>> ids = torch.zeros(32, 1024, dtype=torch.int64)  # doctest: +SKIP
        >>> capture(model, kwargs={"input_ids": ids, "labels": ids.clone()})  # doctest: +SKIP

    Nothing is computed and no weight is allocated or copied: of inputs and parameters only shapes
    and dtypes matter, so a model built under ``torch.device("meta")`` will do. The loss is the
    first scalar float that the model returns, or ``loss(outputs, targets)`` where it returns none;
    whatever does not lead to it is dropped. Inputs are called as in the model's `forward`, and
    `targets` is one more input; dim 0 counts samples where it is as long as dim 0 of the first
    input. Integer buffers, and float buffers that position tables are computed from, become inputs
    without samples, called as in ``named_buffers``; other float buffers become parameters that are
    not trainable.

    With `forward`, the graph is what ``model.eval()`` computes, and gives back every tensor of
    what `model` returns: dropout is off, batch norms go by their running statistics, nothing is
    trained. The tensors are called by their places in it, such as ``logits`` or ``0``; a single
    one is called ``output``. The model is left in the mode in which it was.

    `rules` name classes of modules and what capture calls in the place of their forward, with the
    module before its arguments. There are rules for the mixtures of experts of transformers
    (`limit_capacity` says how many slots their experts have).

    An operator that no kind covers becomes one of its own, which torch runs on shards: which of
    its dims may be split is tried on small tensors. Without `fallback` it is an error.

    Raises:
        ValueError: the model cannot be followed, such as where it depends on values of tensors, or
            returns no scalar (with `forward`: no tensor). Names the aten operator, the module, the
            line and the shapes.
    """
    check_arguments(
        "capture",
        model=(model, nn.Module),
        args=(args, tuple[Any, ...]),
        kwargs=(kwargs, Mapping | None),
        name=(name, str | None),
        loss=(loss, Callable | None),
        targets=(targets, torch.Tensor | None),
        rules=(rules, Mapping | None),
        fallback=(fallback, bool),
        forward=(forward, bool),
    )
    if forward and (loss is not None or targets is not None):
        raise ValueError(
            "capture: forward=True is the forward pass alone, which takes no loss= and no "
            "targets=; leave out one or the other"
        )
    given = _by_name(model, args, kwargs or {})
    root: nn.Module = model
    if loss is None and targets is not None:
        raise ValueError(
            "capture: targets are given, but no loss takes them; pass loss=, or give the targets "
            "to the model as one of its inputs"
        )
    if loss is not None:
        if targets is None:
            raise ValueError("capture: a loss needs targets; pass an example as targets=")
        root = _WithLoss(model, loss)
        given = {**given, "targets": targets}
    prefix = "" if loss is None else "model."
    called = name or type(model).__name__
    try:
        with exchanged(model, rules or {}), _evaluating(model, forward):
            exported = export(root, given, called, prefix, forward=forward)
        batch = _batch(exported)
        return Walker(
            exported, root, name=called, prefix=prefix, batch=batch, fallback=fallback
        ).graph(forward=forward)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"capture of {called!r}: it could not be looked at ({type(error).__name__}: {error}); "
            "its forward must run under torch.export"
        ) from error


@contextmanager
def _evaluating(model: nn.Module, forward: bool) -> Iterator[None]:
    """While it is open, `model` evaluates, if it is its `forward` pass that is asked for."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if forward:
            model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


class _WithLoss(nn.Module):
    """A model followed by a loss of its outputs and targets."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.training = model.training

    def forward(self, targets: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The loss."""
        return self.loss(self.model(**inputs), targets)


def _by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `forward` by name, as far as it names them."""
    signature = inspect.signature(model.forward)
    positional = [
        each.name
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(args) > len(positional):
        raise ValueError(
            f"capture: {len(args)} positional arguments for a forward with {len(positional)} "
            "named ones; give every tensor a name of its own"
        )
    twice = [name for name in positional[: len(args)] if name in kwargs]
    if twice:
        raise ValueError(
            f"capture: {twice[0]!r} is given twice, as positional argument "
            f"{positional.index(twice[0]) + 1} and by its name; give it once"
        )
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    if not any(each.kind is each.POSITIONAL_ONLY for each in signature.parameters.values()):
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"capture of {type(model).__name__!r}: {error}; forward takes "
                f"{', '.join(signature.parameters)}, and what was given is "
                f"{', '.join(given) or 'nothing'}"
            ) from error
    return given


def _batch(exported: torch.export.ExportedProgram) -> int | None:
    """Dim 0 of the first input tensor that has one (targets come last)."""
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    names = [
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    ]
    names.sort(key=lambda name: name == "targets")
    return next((int(values[name].shape[0]) for name in names if values[name].dim()), None)
