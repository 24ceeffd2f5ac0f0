"""What modules keep in attributes that are neither parameters nor buffers, and forward changes.

A plan computes the same operators in every step, so a count of calls would stand still in it, and
a tensor of the step before would be that of the example. A value that is only noted, such as the
size of the last batch, or a tensor that is read behind where it was put, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Kept = dict[str, Any]
"""Numbers, words and tensors by path and name."""


def kept(model: nn.Module) -> Kept:
    """What the modules of a model keep.

    Example:
        >>> kept(nn.Dropout(0.5))
        {'p': 0.5, 'inplace': False}
    """
    return {
        f"{path}.{key}".removeprefix("."): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, torch.Tensor)) and key != "training"
    }


def put_back(model: nn.Module, before: Kept) -> None:
    """Give modules the numbers and words of `before`, and no others."""
    for key, value in {**kept(model), **before}.items():
        path, _, name = key.rpartition(".")
        own = vars(model.get_submodule(path))
        if key not in before:
            del own[name]
        elif not isinstance(value, torch.Tensor):
            own[name] = value


@contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """Behind it, modules have the hooks again that they had before.

    A model that hooks itself at its first call would do so twice: it is made to forget that call.
    """
    before = [
        (hooks, dict(hooks))
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.startswith("_") and "_hooks" in name and isinstance(hooks, dict)
    ]
    try:
        yield
    finally:
        for hooks, had in before:
            hooks.clear()
            hooks.update(had)


@contextmanager
def all_without_values(model: nn.Module) -> Iterator[None]:
    """Until its end, a model of which some tensors are on the meta device has all of them there.

    Its buffers may be kept apart, as files of weights lack those that are computed.
    """
    held = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    if not any(each.is_meta for each in held.values()):
        yield
        return
    empty = {
        key: each if each.is_meta else like(each, each.detach().to("meta"))
        for key, each in held.items()
    }
    put_tensors(model, empty)
    try:
        yield
    finally:
        put_tensors(model, {id(empty[key]): each for key, each in held.items()})


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values in another place, as the parameter or buffer that a tensor is.

    Example:
        >>> like(nn.Parameter(torch.zeros(2), requires_grad=False), torch.ones(2))
        Parameter containing:
        tensor([1., 1.])
    """
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def names_of_tensors(model: nn.Module) -> dict[str, list[str]]:
    """By the first name of each parameter and buffer of a model, all names that it has.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> names_of_tensors(nn.Sequential(layer, nn.ReLU(), layer))
        {'0.weight': ['0.weight', '2.weight']}
    """
    named = [
        *model.named_buffers(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in named:
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def put_tensors(model: nn.Module, others: Mapping[int, torch.Tensor]) -> None:
    """Give a model other tensors, by the `id` of each that it has; what is shared stays so."""
    for module in model.modules():
        kinds: list[dict[str, Any]] = [module._parameters, module._buffers]
        for kind in kinds:
            kind.update({name: others.get(id(each), each) for name, each in kind.items()})


def words_changed(before: Kept, after: Kept) -> list[str]:
    """Which numbers and words are others, or new."""
    return [
        key
        for key, value in after.items()
        if not isinstance(value, torch.Tensor)
        and (isinstance(before.get(key), torch.Tensor) or value != before.get(key))
    ]


def tensors_lost(before: Kept, after: Kept, constants: Mapping[str, Any]) -> list[str]:
    """Which tensors were read as `constants`, and are others afterwards."""
    return [
        key
        for key, value in before.items()
        if isinstance(value, torch.Tensor)
        and after.get(key) is not value
        and any(value is each for each in constants.values())
    ]
