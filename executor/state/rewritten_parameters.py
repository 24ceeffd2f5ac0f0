"""Parameters of a model as those of its rewritten graph, and back (`graph.substitutions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    found = dict(tensors)
    for each in maps:
        found = _moved(each, found)
    return found


def to_model(maps: Sequence[ParameterMap], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a rewritten graph's parameters (or gradients) as those of the model."""
    return to_rewritten([each.back for each in reversed(maps)], tensors)


def _moved(change: ParameterMap, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gone = {each.name for each in change.removed}
    found = {name: tensor for name, tensor in tensors.items() if name not in gone}
    for new in change.added:
        parts = change.made_of[new.name]
        if all(part.old.parameter in tensors for part in parts):
            found[new.name] = _joined(parts, tensors).reshape(new.shape)
    return found


def _joined(parts: Sequence[ParameterPart], tensors: Mapping[str, Tensor]) -> Tensor:
    made = tensors[parts[0].old.parameter].new_empty(parts[0].new.sizes)
    for part in parts:
        given = _cut(tensors[part.old.parameter], part.old)
        _cut(made, part.new).copy_(given.reshape(part.new.shape))
    return made


def _cut(tensor: Tensor, side: Side) -> Tensor:
    return tensor.reshape(side.sizes)[tuple(slice(start, stop) for start, stop in side.box)]
