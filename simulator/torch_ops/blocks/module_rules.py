"""Forward passes that capture puts in the place of a module's own.

Mixtures of experts choose at run time which rows go where (``topk``, sorting, loops over experts
that were hit), and an exported graph does not say what that means. For these modules a rule says
the same in terms that capture reads (`experts`):

    MixtralSparseMoeBlock    gate ─ softmax ─ dispatch ─ gate_up ─ act · up ─ down ─ combine
    other blocks             choices of their own ─── dispatch ─ gate_up ─ gate ─ down ─ combine

The second is for all experts that transformers can run in several ways, which its classes say of
themselves: their block routes as it does, and only the experts are exchanged.

Mambas loop over their sequence: thousands of operators. Their mixers run as they are, but for the
function that loops, in whose place is one call (`scans`).

A module stays as it is; its `forward` is exchanged while it is exported.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.torch_ops.blocks import experts, scans

Forward = Callable[..., Any]
Rules = Mapping[type[nn.Module], Forward]
"""Per class of modules the function that is called with the module and its arguments."""

_FACTOR = "expert_capacity_factor"
_COSTLY = 2.0


def limit_capacity(model: nn.Module, factor: float) -> None:
    """Give the experts of known blocks of `model` fewer slots than could be needed.

    Example:
        >>> limit_capacity(MixtralForCausalLM(config), 1.25)  # doctest: +SKIP

    Without it no token is dropped, as in the original: every expert has a slot for each token of a
    sample, and computes on those up to the last one that is taken, of any expert. With a factor
    of 1 experts have the slots that are needed where all are chosen equally often, and what finds
    none is dropped, as by GShard (Lepikhin et al. 2020, arXiv 2006.16668).

    Raises:
        ValueError: the factor is not above 0, or the model has no such block.
    """
    check_arguments("limit_capacity", model=(model, nn.Module), factor=(factor, float))
    if not factor > 0:
        raise ValueError(f"limit_capacity: the factor is {factor}; it must be above 0")
    found = [each for each in model.modules() if _is_known(each)]
    if not found:
        raise ValueError(
            f"limit_capacity: {type(model).__name__} has no block of experts that capture knows; "
            f"it knows {', '.join(name.rpartition('.')[2] for name in KNOWN)}. Give the capacity "
            "to experts.dispatch in blocks of your own"
        )
    for module in found:
        setattr(module, _FACTOR, float(factor))


@contextmanager
def exchanged(model: nn.Module, rules: Rules) -> Iterator[None]:
    """While it is open, the modules of `model` that a rule covers have its forward.

    Rules given here go before those that are known. A rule covers what has the `forward` of its
    class, which subclasses may have replaced.
    """
    changed: list[nn.Module] = []
    costly: dict[str, float] = {}
    try:
        for path, module in model.named_modules():
            owner = _owner(module)
            rule = rules.get(owner) or KNOWN.get(_full_name(owner))
            if rule is None and _routes(module):
                rule = functools.partial(
                    _through, note=functools.partial(costly.__setitem__, path)
                )
            if rule is None:
                continue
            if owner not in rules and rule is _sparse_block:
                costly[path] = _surplus(module)
            vars(module)["forward"] = functools.partial(rule, module)
            changed.append(module)
        yield
        _warn(list(costly.items()))
    finally:
        for module in changed:
            del vars(module)["forward"]


def _owner(module: nn.Module) -> type[nn.Module]:
    """The class that a module has its forward from."""
    return next(each for each in type(module).__mro__ if "forward" in vars(each))


def _full_name(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def _is_known(module: nn.Module) -> bool:
    return KNOWN.get(_full_name(_owner(module))) is _sparse_block or _routes(module)


# -- Hugging Face transformers ------------------------------------------------------------------


def _sparse_block(block: Any, hidden_states: Tensor) -> Tensor:
    """Tokens (sample, sequence, hidden) through the experts that they choose.

    Raises:
        ValueError: the block does something else besides.
    """
    router, sizes = block.gate, block.experts
    _check(block)
    logits = router(hidden_states)[0].unflatten(0, hidden_states.shape[:-1])
    gates = functional.softmax(logits, -1)
    slots = experts.capacity(
        hidden_states.shape[1], gates.shape[-1], router.top_k, getattr(block, _FACTOR, None)
    )
    x = experts.dispatch(hidden_states, gates, top_k=router.top_k, capacity=slots)
    taken = _taken(slots, gates, router.top_k)
    gate, up = experts.linear(x, sizes.gate_up_proj.mT, **taken).chunk(2, dim=-1)
    y = experts.linear(sizes.act_fn(gate) * up, sizes.down_proj.mT, **taken)
    made = experts.combine(y, gates, top_k=router.top_k)
    if getattr(router, "norm_topk_prob", True):
        return made
    # `combine` divides gates by the sum of those chosen.
    return made * gates.topk(router.top_k, -1).values.sum(-1, keepdim=True)


def _mixer(block: Any, *args: Any, **kwargs: Any) -> Any:
    """A mixer of a Mamba as it is, but for its scan."""
    home = sys.modules[_owner(block).__module__]
    original = home.mamba_selective_scan
    vars(home)["mamba_selective_scan"] = _scan
    try:
        return _owner(block).forward(block, *args, **kwargs)
    finally:
        vars(home)["mamba_selective_scan"] = original


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (transformers calls them so)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **others: Any,
) -> Any:
    """Like transformers' function of that name; how it computes (`others`) is all one."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = functional.softplus(dt)
    made = scans.selective_scan(hidden_states, dt, A, B, C)
    if D is not None:
        made = made + hidden_states * D[None, :, None]
    if z is not None:
        made = made * functional.silu(z)
    return (made, _last_state(hidden_states, dt, A, B)) if return_last_state else made


def _last_state(x: Tensor, dt: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What a scan ends with: what each step took up, after the decay of all that follow."""
    after = (dt.sum(-1, keepdim=True) - dt.cumsum(-1))[..., None]
    taken = (dt * x)[..., None] * b.transpose(1, 2)[:, None]
    return (torch.exp(after * a[:, None]) * taken).sum(2)


_LAYOUT = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""What transformers says of every class of experts that one of its implementations may run."""


def _routes(block: nn.Module) -> bool:
    """Whether a block sends tokens to experts of transformers by gates that are not below 0.

    Those are softmaxes and sigmoids; a router with more parameters than a linear layer, or a block
    with some of its own, may scale them to be anything.
    """
    found = dict(block.named_children())
    if not all(hasattr(found.get("experts"), name) for name in (*_LAYOUT, "_apply_gate")):
        return False
    router = found.get("gate", found.get("router"))
    own = [name for name, _ in block.named_parameters(recurse=False)]
    return (
        router is not None
        and not own
        and {n for n, _ in router.named_parameters()}
        <= {
            "weight",
            "bias",
        }
    )


def _through(
    block: Any, hidden_states: Tensor, *args: Any, note: Callable[[float], None], **kwargs: Any
) -> Any:
    """A block as it is, but for its experts, which are told how tokens lie in samples."""
    routed = functools.partial(_routed, block, tuple(hidden_states.shape[:-1]), note)
    vars(block.experts)["forward"] = routed
    try:
        return _owner(block).forward(block, hidden_states, *args, **kwargs)
    finally:
        del vars(block.experts)["forward"]


def _routed(
    block: Any,
    leading: tuple[int, ...],
    note: Callable[[float], None],
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """Tokens (token, hidden) through the experts that `index` (token, choice) says."""
    sizes, top_k = block.experts, index.shape[-1]
    if len(leading) != 2 or math.prod(leading) != len(hidden_states):
        original: Tensor = _owner(sizes).forward(sizes, hidden_states, index, weights)
        return original
    every = torch.arange(sizes.num_experts, device=index.device)
    held = (index[..., None] == every) * weights[..., None].to(hidden_states.dtype)
    gates = held.sum(-2).reshape(*leading, -1)
    factor = getattr(block, _FACTOR, None)
    slots = experts.capacity(leading[1], sizes.num_experts, top_k, factor)
    note(factor or sizes.num_experts / top_k)
    x = experts.dispatch(hidden_states.reshape(*leading, -1), gates, top_k=top_k, capacity=slots)
    taken = _taken(slots, gates, top_k)
    up = "gate_up_proj" if sizes.has_gate else "up_proj"
    y = _layer(sizes, up, x, taken)
    y = sizes._apply_gate(y) if sizes.has_gate else sizes.act_fn(y)
    y = _layer(sizes, "down_proj", y, taken)
    if sizes.has_post_expert_norm:
        y = sizes.post_expert_norm(y)
    # `combine` divides gates by the sum of those chosen.
    made: Tensor = experts.combine(y, gates, top_k=top_k) * gates.sum(-1, keepdim=True)
    return made.flatten(0, 1)


def _layer(sizes: Any, name: str, x: Tensor, taken: dict[str, Any]) -> Tensor:
    """A linear layer of experts as transformers stores it."""
    weight = getattr(sizes, name)
    bias = getattr(sizes, f"{name}_bias") if sizes.has_bias else None
    return experts.linear(x, weight if sizes.is_transposed else weight.mT, bias, **taken)


def _taken(slots: int, gates: Tensor, top_k: int) -> dict[str, Any]:
    """What says which slots are taken, where there is one for each token."""
    return {"gates": gates, "top_k": top_k} if slots == gates.shape[1] else {}


def _router(router: Any, hidden_states: Tensor) -> tuple[Tensor, None, None]:
    """The logits, as the first of what the router returns; choices are made from them later.

    They are a row a token, as in the original: its auxiliary loss counts rows.
    """
    return functional.linear(hidden_states.flatten(0, -2), router.weight), None, None


def _check(block: Any) -> None:
    name = type(block).__name__
    if getattr(block, "jitter_noise", 0) and block.training:
        raise ValueError(
            f"capture: {name} multiplies its input by noise (router_jitter_noise is "
            f"{block.jitter_noise}), which no plan can draw; set it to 0"
        )


KNOWN: dict[str, Forward] = {
    f"transformers.models.{family}.modeling_{family}.{prefix}{part}": forward
    for family, prefix in (("mixtral", "Mixtral"), ("qwen3_moe", "Qwen3Moe"), ("olmoe", "Olmoe"))
    for part, forward in (("SparseMoeBlock", _sparse_block), ("TopKRouter", _router))
} | {
    f"transformers.models.{family}.modeling_{family}.{name}Mixer": _mixer
    for family, name in (
        ("mamba", "Mamba"),
        ("falcon_mamba", "FalconMamba"),
        ("jamba", "JambaMamba"),
    )
}
"""Per full name of a class the forward that capture takes for it."""


def _surplus(block: Any) -> float:
    """How many times as many slots as choices a block has."""
    factor: float | None = getattr(block, _FACTOR, None)
    return factor or float(block.experts.num_experts / block.gate.top_k)


def _warn(blocks: list[tuple[str, float]]) -> None:
    path, most = max(blocks, key=lambda each: each[1], default=("", 0.0))
    if most > _COSTLY:
        warnings.warn(
            f"capture: so that no token is dropped, the experts of {len(blocks)} blocks (such as "
            f"{path!r}) have {most:g} times the slots that tokens take, and memory for all; "
            "stratagem.experts.limit_capacity(model, 1.25) gives them 1.25 times as many",
            stacklevel=5,
        )
