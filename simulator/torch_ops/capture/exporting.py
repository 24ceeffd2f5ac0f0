"""torch.export of a model: what it cannot follow is one error, at the line of the model."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stratagem.simulator.torch_ops.capture.attributes import (
    Kept,
    all_without_values,
    hooks_kept,
    kept,
    put_back,
    tensors_lost,
    words_changed,
)
from stratagem.simulator.torch_ops.capture.nodes import CHOOSERS, SAY_EXPERTS, source_line
from stratagem.simulator.torch_ops.generic.looking_losses import (
    WITHOUT_LOOKING,
    masks_not_looked_at,
)
from stratagem.simulator.torch_ops.generic.own_backwards import own_backwards_kept

_PACKAGE = Path(__file__).parents[1]
_OWN = (Path(torch.__file__).parent, _PACKAGE, Path(sysconfig.get_path("stdlib")))
"""Where frames lie that are no lines of a model."""

_FAKE_CONSTANT = "We found a fake tensor in the exported program constant's list"

Returned = Callable[[Any], Any]

_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Those that tell at length what becomes one error here."""


def export(
    model: nn.Module,
    given: Mapping[str, Any],
    name: str,
    prefix: str = "",
    *,
    forward: bool = False,
) -> ExportedProgram:
    """The exported program of a model on inputs like `given`, of which values do not matter.

    Args:
        model: what is exported.
        given: its inputs.
        name: how errors call it.
        prefix: before the names of the user's modules, which errors leave out.
        forward: whether it returns all tensors of what the model does, by name, and not its
            scalars.

    Raises:
        ValueError: torch cannot follow the model, or a module counts its calls. Names the line,
            or what is counted.
    """
    _check_norms(model, name, prefix)
    _check_hooks(model, name, prefix)
    with hooks_kept(model), all_without_values(model):
        return _exported(model, given, name, prefix, named_results if forward else _scalars)


def _exported(
    model: nn.Module, given: Mapping[str, Any], name: str, prefix: str, returned: Returned
) -> ExportedProgram:
    program, before, after = _traced(model, given, name, returned)
    _check_calls(program, name)
    for key in tensors_lost(before, after, program.constants):
        raise ValueError(
            f"capture of {name!r}: forward reads its {key.removeprefix(prefix)!r} and puts "
            "another tensor in its place, but a plan keeps nothing between steps that is no "
            "parameter or running statistic of a batch norm: give it to forward as an input"
        )
    counted = words_changed(before, after)
    if counted:
        # What is only noted is the same after a second call.
        try:
            put_back(model, after)
            _, _, second = _traced(model, given, name, returned)
        finally:
            put_back(model, before)
        counted = sorted(set(counted).intersection(words_changed(after, second)))
    for key in counted:
        raise ValueError(
            f"capture of {name!r}: forward changes its {key.removeprefix(prefix)!r} from "
            f"{before.get(key)!r} to {after[key]!r} and then to {second[key]!r}, but a plan "
            "computes the same in every step: give what depends on it to forward as an input"
        )
    return program


def _traced(
    model: nn.Module, given: Mapping[str, Any], name: str, returned: Returned
) -> tuple[ExportedProgram, Kept, Kept]:
    """The program, and what modules kept before and right behind their forward."""
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    examples = pytree.tree_map_only(
        torch.Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), dict(given)
    )
    before, after, watching = kept(model), Kept(), _Refusing()
    try:
        with (
            _watched(model, after, returned, watching),
            _in_few_words(),
            _unchecked_distributions(),
            own_backwards_kept(),
            masks_not_looked_at(),
        ):
            return torch.export.export(model, (), examples, strict=False), before, after
    except GuardOnDataDependentSymNode as error:
        raise ValueError(
            f"capture of {name!r}: what the model does depends on the values of a "
            f"tensor{_where(error)}, but a plan has the same operators in every step: write the "
            f"choice as torch.where, or decide it outside of forward{SAY_EXPERTS * watching.chose}"
        ) from error
    except Exception as error:
        if isinstance(error, ValueError) and _is_of_package(error):
            raise
        first = str(error).strip().partition("\n")[0]
        if first.startswith(_FAKE_CONSTANT):
            first = "it uses a tensor that was made in an earlier call"
        raise ValueError(
            f"capture of {name!r}: torch.export cannot follow the model{_where(error)}: "
            f"{type(error).__name__}: {first}; forward must run, and be made of torch operators "
            "on tensors of shapes that are known beforehand"
        ) from error


_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)

_OF_GRADIENTS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)

_AT_PLACES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)

_LARGEST_WRITTEN = 2**12
"""Elements of the largest tensor of numbers that is written out where nothing is computed."""


def _numbers_again(made: torch.Tensor, numbers: Any) -> torch.Tensor:
    """A tensor of numbers on the meta device, which lost them, made of calls that have them."""
    if isinstance(numbers, torch.Tensor) or not 0 < made.numel() <= _LARGEST_WRITTEN:
        return made
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        flat = torch.tensor(numbers, dtype=made.dtype, device="cpu").flatten().tolist()
    dtype, device = made.dtype, made.device
    if len(set(flat)) == 1:
        return torch.full(made.shape, flat[0], dtype=dtype, device=device)
    each = [torch.full((1,), number, dtype=dtype, device=device) for number in flat]
    return torch.cat(each).reshape(made.shape)


def _places_again(index: Any, device: torch.device) -> Any:
    """An index whose lists of numbers are tensors that have not lost them."""
    if isinstance(index, tuple):
        return tuple(_places_again(each, device) for each in index)
    if isinstance(index, list) and index and all(type(each) is int for each in index):
        return _numbers_again(torch.tensor(index, device=device), index)
    return index


class _Refusing(TorchFunctionMode):
    """Refuses what an exported program would leave out, where the model does it.

    Attributes:
        chose: whether it was seen to choose, as a mixture chooses experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chose = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _DATA:
            raise ValueError(
                f"capture: .data is read{_line()}, which takes a tensor out of what is captured: "
                "use .detach()"
            )
        if func is torch.autograd.grad:
            raise ValueError(
                f"capture: torch.autograd.grad is called{_line()}, but a plan differentiates the "
                "loss once: write the gradient out, or leave the term that needs it out"
            )
        if func in _OF_GRADIENTS:
            raise ValueError(
                f"capture: {func.__name__} is called{_line()}, but a plan has the gradients that "
                "torch makes of forward, and calls nothing behind them: leave the hook out, or "
                "write what it changes as a torch.autograd.Function"
            )
        if getattr(func, "__name__", "") in CHOOSERS:
            self.chose = True  # And nothing where it is so: torch.cond refuses modes that change.
        if func in _AT_PLACES and args[0].device.type == "meta":
            args = (args[0], _places_again(args[1], args[0].device), *args[2:])
        if func in WITHOUT_LOOKING:
            with self:
                return WITHOUT_LOOKING[func](*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if func in _OF_NUMBERS and made.device.type == "meta":
            return _numbers_again(made, args[0])
        return made


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Let distributions of torch take their arguments as they are: checks read values.

    A check changes nothing but whether there is an error, and runs still make it in the model.
    """
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def _scalars(made: Any) -> Any:
    """The numbers that a model returns, of which one is its loss: export knows not all else."""
    leaves = (each for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor))
    found = tuple(each for each in leaves if each.dim() == 0 and each.is_floating_point())
    return found or made


def named_results(made: Any) -> dict[str, torch.Tensor]:
    """The tensors of what a model returns, by where they are in it.

    Example:
        >>> x = torch.zeros(2)
        >>> list(named_results(x)), list(named_results({"logits": x, "states": (x, x)}))
        (['output'], ['logits', 'states.0', 'states.1'])

    Raises:
        ValueError: two of them are called alike.
    """
    if isinstance(made, torch.Tensor):
        return {"output": made}
    found: dict[str, torch.Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(made)[0]:
        if isinstance(leaf, torch.Tensor):
            name = ".".join(map(_step_to, path))
            if name in found:
                raise ValueError(
                    f"two tensors of what the model returns are called {name!r}, by where they "
                    "are in it: give its mappings other keys"
                )
            found[name] = leaf
    return found


def _step_to(key: Any) -> str:
    """A key of a mapping, the number of an item, or the name of a field of a named tuple."""
    found = (getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind))
    return str(next(found, key))


_DATA = inspect.getattr_static(torch.Tensor, "data").__get__


@contextmanager
def _watched(
    model: nn.Module, after: Kept, returned: Returned, watching: _Refusing
) -> Iterator[None]:
    """While it is open, `model` refuses and notes in `after` what it keeps behind its forward.

    It returns what `returned` makes of what it did, which `watching` has seen.
    """
    own = vars(model).get("forward")
    forward = model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with watching:
            made = forward(*args, **kwargs)
        after.update(kept(model))
        return returned(made)

    vars(model)["forward"] = watched
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


@contextmanager
def _in_few_words() -> Iterator[None]:
    """Without the graphs and traces that torch shows beside its errors."""
    loggers = [logging.getLogger(each) for each in _LOGGERS]
    disabled = [each.disabled for each in loggers]
    shown, dump = io.StringIO(), ""
    for each in loggers:
        each.disabled = True
    try:
        with redirect_stderr(shown), warnings.catch_warnings():
            # Capture looks at what is assigned itself.
            warnings.filterwarnings("ignore", "The tensor attributes? self")
            yield
    except Exception as error:
        dump = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        for each, was in zip(loggers, disabled, strict=True):
            each.disabled = was
        said = shown.getvalue()
        sys.stderr.write(said.replace(f"{dump}\n", "") if dump else said)


def _check_norms(model: nn.Module, name: str, prefix: str) -> None:
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.momentum is None and module.training:
            raise ValueError(
                f"capture of {name!r}: {path.removeprefix(prefix)!r} ({type(module).__name__}) "
                "has momentum=None, a mean over all steps so far, in which every step has another "
                "weight; give it a number, such as momentum=0.1"
            )


_NO_OPERATORS = {
    "cond": "what the model does depends on the values of a tensor (torch.cond), but a plan has "
    "the same operators in every step: write the choice as torch.where",
    "while_loop": "how often the model does something depends on the values of a tensor "
    "(while_loop), but a plan has the same operators in every step: loop a number of times that "
    "is known",
    "_vmap_increment_nesting": "torch.vmap runs operators on tensors of which a dim is hidden, so "
    "that nobody could split it: write them for all of it, as einsum does, or loop",
}
"""What an exported program may call that is no operator of tensors, and what is to be done."""


def _check_calls(program: ExportedProgram, name: str) -> None:
    """Refuse what is no operator where the model calls it."""
    for node in program.graph.nodes:
        called = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function" and called in _NO_OPERATORS:
            line = source_line(node)
            raise ValueError(
                f"capture of {name!r}: {_NO_OPERATORS[called]}{line and f' (at {line})'}"
            )


def _check_hooks(model: nn.Module, name: str, prefix: str) -> None:
    """Refuse what is called with gradients: it may change them, and torch.export leaves it out."""
    of_modules = (
        (path, each, hooks)
        for path, module in model.named_modules()
        for each in ("_backward_hooks", "_backward_pre_hooks")
        if (hooks := getattr(module, each))
    )
    of_tensors = (
        (path, each, hooks)
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
        for each in ("_backward_hooks", "_post_accumulate_grad_hooks")
        if (hooks := getattr(tensor, each))
    )
    for path, kind, hooks in (*of_modules, *of_tensors):
        hook = next(iter(hooks.values()))
        called = getattr(hook, "__qualname__", type(hook).__name__)
        raise ValueError(
            f"capture of {name!r}: {path.removeprefix(prefix) or 'the model'!r} has "
            f"{kind.removeprefix('_').replace('_', ' ')} ({called}), but a plan has the gradients "
            "that torch makes of forward, and calls nothing behind them: remove the hook, or "
            "write what it changes as a torch.autograd.Function"
        )


def _where(error: BaseException) -> str:
    """The line of the model that an error comes from."""
    return _last(traceback.extract_tb(error.__traceback__))


def _line() -> str:
    """The line of the model that is running."""
    return _last(traceback.extract_stack())


def _last(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        path = Path(frame.filename)
        if not any(path.is_relative_to(each) for each in _OWN):
            return f" at {path}:{frame.lineno} ({frame.line})"
    return ""


def _is_of_package(error: ValueError) -> bool:
    """Whether it was raised here, in words of its own."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).is_relative_to(_PACKAGE)
