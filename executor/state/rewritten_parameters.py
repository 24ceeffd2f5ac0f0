"""Parameters of a model as those of its rewritten graph, and back (`graph.substitutions`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from stratagem.simulator.graph.substitutions.parameter_map import ParameterMap, ParameterPart, Side


def to_rewritten(maps: Sequence[ParameterMap], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model's parameters, by name, as those of the rewritten graph.

    Example:
        >>> import torch
        >>> from stratagem.simulator.operators.operator import Parameter
        >>> from stratagem.simulator.graph.substitutions.parameter_map import at, whole
        >>> old, new = Parameter("b", (2, 2)), Parameter("b[1]", (2,))
        >>> part = ParameterPart(at(whole(old), 0, 1, 2), whole(new))
        >>> one = ParameterMap((old,), (new,), (part,))
        >>> to_rewritten([one], {"b": torch.eye(2)})
        {'b[1]': tensor([0., 1.])}

    A parameter that consists of tensors which are not given is left out.
    """
    return dict(as_rewritten(maps, tensors))


def as_rewritten(
    maps: Sequence[ParameterMap], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Like `to_rewritten`, each made when it is asked for: all of a large model fit nowhere.

    Example:
        >>> as_rewritten([], {"b": torch.eye(2)})["b"].shape
        torch.Size([2, 2])
    """
    for each in maps:
        tensors = _ChangedParameters(each, tensors)
    return tensors


def to_model(maps: Sequence[ParameterMap], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a rewritten graph's parameters (or gradients) as those of the model."""
    return to_rewritten([each.back for each in reversed(maps)], tensors)


class _ChangedParameters(Mapping[str, Tensor]):
    """Tensors before a change by name as those behind it."""

    def __init__(self, change: ParameterMap, tensors: Mapping[str, Tensor]) -> None:
        gone = {each.name for each in change.removed}
        self._tensors, self._parts = tensors, change.made_of
        self._made = {
            new.name: new.shape
            for new in change.added
            if all(part.old.parameter in tensors for part in change.made_of[new.name])
        }
        left = (name for name in tensors if name not in gone)
        self._names = dict.fromkeys([*left, *self._made])

    def __getitem__(self, name: str) -> Tensor:
        if name in self._made:
            return _joined(self._parts[name], self._tensors).reshape(self._made[name])
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _joined(parts: Sequence[ParameterPart], tensors: Mapping[str, Tensor]) -> Tensor:
    old = {part.old.parameter: tensors[part.old.parameter] for part in parts}
    dtype = reduce(torch.promote_types, (each.dtype for each in old.values()))
    made = next(iter(old.values())).new_empty(parts[0].new.sizes, dtype=dtype)
    for part in parts:
        given = _cut(old[part.old.parameter], part.old)
        _cut(made, part.new).copy_(given.reshape(part.new.shape))
    return made


def _cut(tensor: Tensor, side: Side) -> Tensor:
    return tensor.reshape(side.sizes)[tuple(slice(start, stop) for start, stop in side.box)]
