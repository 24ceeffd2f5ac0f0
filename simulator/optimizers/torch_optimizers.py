"""Reading optimizers of torch, by their names and the settings of their groups.

torch itself is not imported: an optimizer is what it says of itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.optimizers.factored_squares import FactoredSquares
from stratagem.simulator.optimizers.newton_schulz import NewtonSchulz
from stratagem.simulator.optimizers.parameter_groups import ParameterGroup, literally
from stratagem.simulator.optimizers.quantised_states import AS_TORCHAO, Blocks

_SGD = {
    "momentum": "momentum",
    "dampening": "dampening",
    "nesterov": "nesterov",
    "maximize": "maximize",
}
_ADAM = {"betas": "betas", "eps": "epsilon", "amsgrad": "amsgrad", "maximize": "maximize"}
_READ: dict[str, dict[str, str]] = {
    "SGD": _SGD,
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Muon": {"momentum": "momentum", "nesterov": "nesterov"},
    "Adafactor": {"maximize": "maximize"},
    "AdamW8bit": {"betas": "betas", "eps": "epsilon"},
}
"""Per class of `torch.optim`, or of torchao and bitsandbytes, the settings that plans have, and
what they call them."""

_CALLED = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adam",
    "Muon": "muon",
    "Adafactor": "adafactor",
    "AdamW8bit": "adam8bit",
}
"""What plans call them."""

_MISSING = {"Adam8bit": "it adds its decay to gradients, as torch.optim.Adam does"}
"""Optimizers that plans do not have, and why."""


def fields_of(optimizer: Any, model: Any) -> dict[str, Any]:
    """The fields of a `Training` that does what optimizers do, see `Training.of`."""
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    fields: dict[str, Any] = {}
    groups: list[_Group] = []
    for each in given:
        kind = type(each).__name__
        if kind in _MISSING:
            raise ValueError(
                f"plans do not have {kind}: {_MISSING[kind]}; take AdamW8bit, which takes it off "
                "parameters"
            )
        if kind not in _READ:
            raise unknown("optimizer of torch", kind, tuple(_READ))
        if kind == "AdamW8bit":
            _put(fields, "blocks", _blocks(each), kind)
        _warn_moved(kind, each.param_groups)
        for group in each.param_groups:
            own = _options(kind, group)
            for name, value in own.items():
                fields.setdefault(name, value)
            groups.append(
                _Group(_CALLED[kind], float(group["lr"]), float(group["weight_decay"]), own, group)
            )
    first = groups[0]
    if any(group.optimizer == "muon" for group in groups):  # It minimizes, whatever others do.
        fields["maximize"] = first.options.get("maximize", False)
    return {
        "optimizer": first.optimizer,
        "learning_rate": first.rate,
        "weight_decay": first.decay,
        **fields,
        "groups": _groups(groups, model, fields),
    }


def _warn_moved(kind: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Say that rates are no longer what an optimizer was made with."""
    for group in groups:
        first, now = group.get("initial_lr", group["lr"]), group["lr"]
        if first != now:
            warnings.warn(
                f"a scheduler has moved the learning rate of {kind} from {float(first):g} to "
                f"{float(now):g}, which is what the plan has: read the optimizer before a "
                "scheduler is made of it, and give that as sg.optimizers.TorchRate",
                stacklevel=4,
            )
            return


class _Group(NamedTuple):
    """A group of an optimizer of torch, in the words of plans, and as it is."""

    optimizer: str
    rate: float
    decay: float
    options: dict[str, Any]
    given: Mapping[str, Any]


def _options(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, by the names that plans give them."""
    if kind == "AdamW8bit" and group.get("amsgrad"):
        raise ValueError("AdamW8bit has amsgrad=True, which no plan has in 8 bits; make it False")
    own = {mine: group[theirs] for theirs, mine in _READ[kind].items()}
    if not own.get("momentum", 1.0):
        own |= {"dampening": 0.0, "nesterov": False}  # They have no effect, in torch either.
    if "betas" in own:
        own["betas"] = tuple(map(float, own["betas"]))
    if kind in ("Adam", "AdamW") and group["weight_decay"]:
        own["coupled_decay"] = not group.get("decoupled_weight_decay", kind == "AdamW")
    if kind == "Muon":
        own["newton_schulz"] = _newton_schulz(group)
    if kind == "Adafactor":
        own["adafactor"] = _factored_squares(group)
    return own


def _put(fields: dict[str, Any], name: str, value: Any, kind: str) -> None:
    """Set what all optimizers have together."""
    if fields.setdefault(name, value) != value:
        raise ValueError(
            f"{kind} has {name}={value!r}, and another optimizer {fields[name]!r}; in a plan "
            "they have one: give both the same"
        )


def _newton_schulz(group: Mapping[str, Any]) -> NewtonSchulz:
    return NewtonSchulz(
        coefficients=tuple(group["ns_coefficients"]),
        steps=group["ns_steps"],
        epsilon=group["eps"],
        adjustment=group["adjust_lr_fn"] or "original",
    )


def _factored_squares(group: Mapping[str, Any]) -> FactoredSquares:
    least, scale = group["eps"]
    return FactoredSquares(group["beta2_decay"], least, scale, group["d"])


def _blocks(optimizer: Any) -> Blocks:
    """The blocks of torchao's optimizers, which say their size, or of bitsandbytes', of 256."""
    if getattr(optimizer, "bf16_stochastic_round", False):
        raise ValueError(
            "AdamW8bit rounds bfloat16 parameters at random, which no plan does; make "
            "bf16_stochastic_round False: a plan in bfloat16 keeps float32 copies"
        )
    return Blocks(size=getattr(optimizer, "block_size", AS_TORCHAO.size))


def _groups(
    groups: list[_Group], model: Any, fields: Mapping[str, Any]
) -> tuple[ParameterGroup, ...]:
    """All groups but the first, and one of what no optimizer has.

    Groups that are like the first one stay apart where their parameters have names: a scheduler
    may tell them from it.
    """
    made: list[ParameterGroup] = []
    first = groups[0]
    own = [_own(group, first, fields) for group in groups]
    if any(own) or model is not None or all("param_names" in each.given for each in groups):
        for group, options in zip(groups, own, strict=True):
            names = _names(group.given, model)
            if group is not first and names:
                made.append(ParameterGroup(tuple(map(literally, names)), **options))
    if model is not None:
        held = {id(each) for group in groups for each in group.given["params"]}
        left = [
            name
            for name, each in model.named_parameters()
            if each.requires_grad and id(each) not in held
        ]
        if left:
            patterns = tuple(map(literally, left))
            made.append(ParameterGroup(patterns, 0.0, 0.0, scheduled=False))
    return tuple(made)


def _own(group: _Group, first: _Group, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has unlike the whole, which has what the first group has."""
    own = {name: value for name, value in group.options.items() if fields[name] != value}
    if not group.options.get("momentum", 1.0):
        own = {name: own[name] for name in own if name not in ("dampening", "nesterov")}
    if group.optimizer != first.optimizer:
        own["optimizer"] = group.optimizer
    if group.decay != first.decay:
        own["weight_decay"] = group.decay
    if group.rate != first.rate:
        named = {"rate": group.rate / first.rate} if first.rate else {"learning_rate": group.rate}
        own |= named
    return own


def _names(group: Mapping[str, Any], model: Any) -> list[str]:
    if model is None:
        if "param_names" not in group:
            raise ValueError(
                "the optimizer has groups, and its parameters have no names: give the model, or "
                "make the optimizer of model.named_parameters()"
            )
        return list(group["param_names"])
    known = {id(each): name for name, each in model.named_parameters()}
    unnamed = [tuple(each.shape) for each in group["params"] if id(each) not in known]
    if unnamed:
        raise ValueError(
            f"the optimizer has a parameter of shape {unnamed[0]} that the model has not; give "
            "the model that it was made for"
        )
    return [known[id(each)] for each in group["params"]]
