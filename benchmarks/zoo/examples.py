"""Files of models: functions that make a model, an example batch, and perhaps a loss of it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OWN = sorted(
    path for path in (Path(__file__).parent / "models").glob("*.py") if path.stem != "__init__"
)
"""The project's own files."""

Made = tuple[
    nn.Module,
    tuple[Any, ...],
    Mapping[str, Any],
    Callable[[Any, Any], Tensor] | None,
    Tensor | None,
]


@dataclass(frozen=True, eq=False)
class Example:
    """What is to be trained.

    Attributes:
        model: with the parameters that it begins with.
        batch: the arguments of its `forward` by name.
        loss: of its outputs and of the targets; None where the model returns its loss.
        targets: None where there is no loss.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    loss: Callable[[Any, Any], Tensor] | None
    targets: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a plan is fed with."""
        fed = {name: x for name, x in self.batch.items() if isinstance(x, Tensor)}
        return fed if self.targets is None else {**fed, "targets": self.targets}

    def outcome(self, model: nn.Module, batch: Mapping[str, Any], targets: Tensor | None) -> Any:
        """What a copy of the model makes of a copy of the batch: the loss, or what has it."""
        made = model(**batch)
        return made if self.loss is None else self.loss(made, targets)


def names_in(path: Path) -> list[str]:
    """The functions of a file that make models, in the order in which they are written.

    They are those that it defines itself, take nothing, and have no underscore before their names.

    Raises:
        OSError: there is no such file.
        SyntaxError: it is no Python.
    """
    return [
        node.name
        for node in ast.parse(path.read_text(), str(path)).body
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and not _takes(node.args)
    ]


def example_of(path: Path, name: str) -> Example:
    """The model of one function, its numbers drawn from the same seed every time.

    Raises:
        ValueError: the function returns something else than a zoo asks for.
    """
    torch.manual_seed(0)
    made = getattr(_module(path), name)()
    if not isinstance(made, tuple) or len(made) != len(_PARTS):
        raise ValueError(
            f"{path.name}: {name} returns {type(made).__name__}; it must return a tuple of "
            f"{len(_PARTS)}: {', '.join(_PARTS)}"
        )
    model, args, kwargs, loss, targets = made
    positional = list(inspect.signature(model.forward).parameters)[: len(args)]
    return Example(model, {**dict(zip(positional, args, strict=True)), **kwargs}, loss, targets)


_PARTS = ("model", "args", "kwargs", "loss", "targets")


def _takes(arguments: ast.arguments) -> bool:
    return bool(arguments.args or arguments.posonlyargs or arguments.kwonlyargs)


def _module(path: Path) -> Any:
    name = f"zoo_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
