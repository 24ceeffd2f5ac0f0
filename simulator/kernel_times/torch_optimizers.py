"""Reading optimizers of torch, by their names and the settings of their groups.

torch itself is not imported: an optimizer is what it says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.kernel_times.factored_squares import FactoredSquares
from stratagem.simulator.kernel_times.newton_schulz import NewtonSchulz
from stratagem.simulator.kernel_times.parameter_groups import ParameterGroup, literally
from stratagem.simulator.kernel_times.quantised_states import AS_TORCHAO, Blocks

_READ: dict[str, dict[str, str]] = {
    "SGD": {"momentum": "momentum", "nesterov": "nesterov"},
    "Adam": {"betas": "betas", "eps": "epsilon", "amsgrad": "amsgrad"},
    "AdamW": {"betas": "betas", "eps": "epsilon", "amsgrad": "amsgrad"},
    "Muon": {"momentum": "momentum", "nesterov": "nesterov"},
    "Adafactor": {},
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

_OTHERS = {"dampening": 0, "maximize": False}
"""Settings that plans do not have, and what they must be."""

_IN_GROUPS = ("lr", "weight_decay")
"""Settings that may differ between groups."""


def fields_of(optimizer: Any, model: Any) -> dict[str, Any]:
    """The fields of a `Training` that does what optimizers do, see `Training.of`."""
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    fields: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for each in given:
        kind = type(each).__name__
        if kind in _MISSING:
            raise ValueError(
                f"plans do not have {kind}: {_MISSING[kind]}; take AdamW8bit, which takes it off "
                "parameters"
            )
        if kind not in _READ:
            raise unknown("optimizer of torch", kind, tuple(_READ))
        first = each.param_groups[0]
        for group in each.param_groups:
            _check(kind, group, first)
            settings = {"optimizer": _CALLED[kind], "lr": float(group["lr"])}
            groups.append({**group, **settings})
        own = {mine: first[theirs] for theirs, mine in _READ[kind].items()}
        if kind in ("Adam", "AdamW") and any(group["weight_decay"] for group in each.param_groups):
            own["coupled_decay"] = not (kind == "AdamW" or first.get("decoupled_weight_decay"))
        if kind == "Muon":
            own["newton_schulz"] = _newton_schulz(first)
        if kind == "Adafactor":
            own["adafactor"] = _factored_squares(first)
        if kind == "AdamW8bit":
            own["blocks"] = _blocks(each)
        _join(fields, own, kind)
    rate = float(max(group["lr"] for group in groups))
    decay = float(groups[0]["weight_decay"])
    return {
        "optimizer": groups[0]["optimizer"],
        "learning_rate": rate,
        "weight_decay": decay,
        **fields,
        "groups": _groups(groups, model, rate, decay),
    }


def _join(fields: dict[str, Any], own: Mapping[str, Any], kind: str) -> None:
    """Put the settings of one optimizer beside those of others, which may share names."""
    for name, value in own.items():
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


def _check(kind: str, group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    for name, needed in _OTHERS.items():
        if group.get(name, needed) != needed:
            raise ValueError(
                f"{kind} has {name}={group[name]!r}, which no plan has; make it {needed!r}"
            )
    if kind == "AdamW8bit" and group.get("amsgrad"):
        raise ValueError("AdamW8bit has amsgrad=True, which no plan has in 8 bits; make it False")
    alike = ("beta2_decay", "eps", "d") if kind == "Adafactor" else tuple(_READ[kind])
    for name in alike:
        if group[name] != first[name]:
            raise ValueError(
                f"groups of {kind} have {name}={first[name]!r} and {group[name]!r}; in a plan "
                f"groups differ in {' and '.join(_IN_GROUPS)} alone: give all of them one"
            )


def _groups(
    groups: list[dict[str, Any]], model: Any, rate: float, decay: float
) -> tuple[ParameterGroup, ...]:
    """Groups that are unlike the whole, and one of what the optimizer does not have."""
    made: list[ParameterGroup] = []
    usual = groups[0]["optimizer"]
    apart = len({(g["lr"], g["weight_decay"], g["optimizer"]) for g in groups}) > 1
    for group in groups:
        own = (
            group["lr"] / rate if rate else 1.0,
            float(group["weight_decay"]),
            "" if group["optimizer"] == usual else group["optimizer"],
        )
        names = _names(group, model) if apart or model is not None else []
        if apart and own != (1.0, decay, ""):
            made.append(ParameterGroup(tuple(map(literally, names)), *own))
    if model is not None:
        held = {id(each) for group in groups for each in group["params"]}
        left = [
            name
            for name, each in model.named_parameters()
            if each.requires_grad and id(each) not in held
        ]
        if left:
            made.append(ParameterGroup(tuple(map(literally, left)), 0.0, 0.0))
    return tuple(made)


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
