"""Functions with a backward of their own: gradients that are reversed, or go straight through.

An exported program has what the forward of a `torch.autograd.Function` does, and autograd then
differentiates that. So while a model is exported, each call of one becomes an operator of torch
that computes the same and asks the function itself for gradients:

    Reversed.apply(x, 0.5) ─▶ stratagem_functions::Reversed_5f1c07e2([x]) ─▶ a generic operator

Numbers and words among the arguments are part of the operator. Its backward makes forward again,
as what a function keeps for it is known to the function alone.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from torch.utils._python_dispatch import TorchDispatchMode

SPACE = "stratagem_functions"
"""The namespace of operators that are made here."""

_BASE: Any = autograd_function._SingleLevelFunction
"""What `Function.apply` calls in the end, however a model got hold of it."""

_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)

_GOING = threading.local()
"""Whether this thread exports a model, and is not inside of a function already."""


class _Slot:
    """Stands for a tensor among arguments."""

    def __repr__(self) -> str:
        return "tensor"


_SLOT = _Slot()


@dataclass(eq=False)
class OwnBackward:
    """Calls of one function with the same numbers and words.

    Attributes:
        function: the class.
        arguments: of its `apply`, with slots for tensors.
        results: of each of its results whether it is a tensor; None where it is one alone.
    """

    function: Any
    arguments: tuple[Any, ...]
    results: tuple[bool, ...] | None = field(default=None, init=False)

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the function makes."""
        given = iter(tensors)
        made = _original(self.function)(
            *(next(given) if each is _SLOT else each for each in self.arguments)
        )
        if isinstance(made, Tensor):
            return [made]
        self.results = tuple(isinstance(each, Tensor) for each in made)
        return [each for each in made if isinstance(each, Tensor)]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same in memory of their own, without gradients."""
        with torch.no_grad(), _inside():
            made = self.apply(tensors)
        seen = {each.untyped_storage()._cdata for each in tensors}
        return [_apart(each, seen) for each in made]

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same for tensors without numbers, where is seen what the function does.

        Raises:
            ValueError: it draws random numbers, or changes what it is given.
        """
        before = [each._version for each in tensors]
        with _Watching(self.function.__name__):
            made = self.run(tensors)
        if before != [each._version for each in tensors]:
            raise ValueError(
                f"capture: {self.function.__name__}, a torch.autograd.Function, changes a tensor "
                "that it is given, which no plan does: write it so that it returns another one"
            )
        return made

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what backward starts from."""
        (tensors,) = inputs
        ctx.save_for_backward(*tensors)
        ctx.wanted = [each.requires_grad for each in tensors]

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients that the function itself gives."""
        leaves = [
            each.detach().requires_grad_(wanted)
            for each, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        ]
        with torch.enable_grad(), _inside():
            made = self.apply(leaves)
        ends = [
            (end, gradient)
            for end, gradient in zip(made, gradients, strict=True)
            if end.requires_grad and gradient is not None
        ]
        wanted = [each for each in leaves if each.requires_grad]
        if not ends or not wanted:
            return [None] * len(leaves)
        found = iter(
            torch.autograd.grad(
                [end for end, _ in ends],
                wanted,
                [gradient for _, gradient in ends],
                allow_unused=True,
            )
        )
        return [next(found) if each.requires_grad else None for each in leaves]

    def whole(self, made: Sequence[Tensor]) -> Any:
        """The results as the function returns them."""
        if self.results is None:
            return made[0]
        given = iter(made)
        return tuple(next(given) if is_tensor else None for is_tensor in self.results)


_KNOWN: dict[str, OwnBackward] = {}
"""What operators of the namespace stand for, by their names."""


@contextmanager
def own_backwards_kept() -> Iterator[None]:
    """While it is open, this thread's calls of functions with a backward are operators.

    Those of torch itself are not: what they do is known by other ways.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not getattr(_GOING, "exports", False) or cls.__module__.startswith("torch."):
            return _original(cls)(*args, **kwargs)
        return _called(cls, args)

    _BASE.apply = classmethod(apply)
    _GOING.exports = True
    try:
        yield
    finally:
        _GOING.exports = False
        del _BASE.apply


Import = tuple[str, str, tuple[Any, ...]]
"""Where a function is found: its module, its name there, and the arguments of its calls."""


def imports_of(calls: Iterable[str]) -> list[Import]:
    """Where another process finds the functions among what operators call.

    Raises:
        ValueError: it finds one nowhere: that is of the main program, or made within another one.
    """
    found = []
    for name in dict.fromkeys(calls):
        own = _KNOWN.get(name.removeprefix(f"{SPACE}::").removesuffix(".default"))
        if own is None or not name.startswith(SPACE):
            continue
        function = own.function
        if function.__module__ == "__main__" or "<locals>" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__}, a torch.autograd.Function of {function.__module__}, is "
                "found by no other process: put it into a module, outside of other functions, or "
                "take the backend local"
            )
        arguments = tuple(None if each is _SLOT else each for each in own.arguments)
        slots = tuple(at for at, each in enumerate(own.arguments) if each is _SLOT)
        found.append((function.__module__, function.__qualname__, (arguments, slots)))
    return found


def import_again(found: Iterable[Import]) -> None:
    """Make the operators of functions that another process found (`imports_of`)."""
    for module, path, (given, slots) in found:
        function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
        arguments = tuple(_SLOT if at in slots else each for at, each in enumerate(given))
        _name(function, arguments)


def behind(operator: Any) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
    """What an operator of the namespace runs; None for any other."""
    space, _, name = str(operator._schema.name).partition("::")
    return _KNOWN[name].run if space == SPACE and name in _KNOWN else None


@contextmanager
def _inside() -> Iterator[None]:
    """Functions that a function calls are its own business."""
    before = getattr(_GOING, "exports", False)
    _GOING.exports = False
    try:
        yield
    finally:
        _GOING.exports = before


def _original(function: Any) -> Any:
    """What calls a function as torch does."""
    return super(_BASE, function).apply


def _called(function: Any, args: Sequence[Any]) -> Any:
    tensors = [each for each in args if isinstance(each, Tensor)]
    arguments = tuple(_SLOT if isinstance(each, Tensor) else each for each in args)
    odd = next((each for each in arguments if each is not _SLOT and not _is_simple(each)), None)
    if odd is not None:
        raise ValueError(
            f"capture: {function.__name__}, a torch.autograd.Function, is given "
            f"a {type(odd).__name__}, which no plan can hold: give it tensors, numbers and words"
        )
    if not tensors:
        raise ValueError(
            f"capture: {function.__name__}, a torch.autograd.Function, is given no tensor; what "
            "it makes is of no use to a gradient: call its forward"
        )
    name = _name(function, arguments)
    known = _KNOWN.setdefault(name, OwnBackward(function, arguments))
    made = getattr(getattr(torch.ops, SPACE), name).default(tensors)
    return known.whole(made)


def _name(function: Any, arguments: tuple[Any, ...]) -> str:
    """The operator of a function and its arguments, made when it is called the first time.

    It is called the same in every process, so that a plan is for the graph of each: by what the
    code of the function is, not by where it lies.
    """
    seen = [function.__qualname__.rpartition("<locals>.")[2], arguments]
    for part in (function.forward, function.setup_context, function.backward):
        code = getattr(part, "__code__", None)
        if code is not None:
            seen += [code.co_code.hex(), code.co_names, _simple(code.co_consts)]
        cells = getattr(part, "__closure__", None) or ()
        seen.append(_simple([each.cell_contents for each in cells]))
    digest = hashlib.sha256(repr(seen).encode()).hexdigest()[:8]
    stem = f"{function.__name__}_{digest}"
    name, number = stem, 1
    while name in _KNOWN and _KNOWN[name].function is not function and _has_cells(function):
        number += 1
        name = f"{stem}_{number}"
    if name not in _KNOWN:
        _register(name, OwnBackward(function, arguments))
    return name


def _register(name: str, own: OwnBackward) -> None:
    _KNOWN[name] = own
    made = torch.library.custom_op(
        f"{SPACE}::{name}", own.run, mutates_args=(), schema="(Tensor[] tensors) -> Tensor[]"
    )
    made.register_fake(own.fake)
    made.register_autograd(own.backward, setup_context=own.keep)


def _has_cells(function: Any) -> bool:
    """Whether it sees variables that are no numbers or words, of which no name can tell."""
    parts = (function.forward, function.setup_context, function.backward)
    cells = [cell for part in parts for cell in getattr(part, "__closure__", None) or ()]
    return not all(_is_simple(each.cell_contents) for each in cells)


def _simple(values: Sequence[Any]) -> list[Any]:
    return [each for each in values if _is_simple(each)]


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _apart(tensor: Tensor, seen: set[int]) -> Tensor:
    """A tensor whose memory is not among what is seen, to which it is added."""
    if tensor.untyped_storage()._cdata in seen:
        tensor = tensor.clone()
    seen.add(tensor.untyped_storage()._cdata)
    return tensor


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers, of which every rank would draw its own."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"capture: {self._name}, a torch.autograd.Function, draws random numbers, which "
                "must be those of a place in the whole batch: draw them before, and hand them in"
            )
        return func(*args, **(kwargs or {}))
