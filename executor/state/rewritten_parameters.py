"""Parameters of a model as those of its rewritten graph, and back (`graph.substitutions`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce

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
    made: dict[str, Callable[[], Tensor]] = {
        name: partial(tensors.__getitem__, name) for name in tensors
    }
    for each in maps:
        found = {
            new.name: partial(_joined, parts, {name: made[name] for name in names}, new.shape)
            for new in each.added
            for parts in [each.made_of[new.name]]
            for names in [[part.old.parameter for part in parts]]
            if made.keys() >= set(names)
        }
        gone = {old.name for old in each.removed}
        made = {name: make for name, make in made.items() if name not in gone} | found
    return _MadeWhenAsked(made)


def to_model(maps: Sequence[ParameterMap], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a rewritten graph's parameters (or gradients) as those of the model."""
    return to_rewritten([each.back for each in reversed(maps)], tensors)


class _MadeWhenAsked(Mapping[str, Tensor]):
    """Tensors by name, of which each is made anew whenever it is asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _joined(
    parts: Sequence[ParameterPart], old: Mapping[str, Callable[[], Tensor]], shape: tuple[int, ...]
) -> Tensor:
    """A parameter of some shape, of parts of others."""
    given = {name: make() for name, make in old.items()}
    dtype = reduce(torch.promote_types, (each.dtype for each in given.values()))
    made = next(iter(given.values())).new_empty(parts[0].new.sizes, dtype=dtype)
    for part in parts:
        taken = _cut(given[part.old.parameter], part.old)
        _cut(made, part.new).copy_(taken.reshape(part.new.shape))
    return made.reshape(shape)


def _cut(tensor: Tensor, side: Side) -> Tensor:
    return tensor.reshape(side.sizes)[tuple(slice(start, stop) for start, stop in side.box)]
