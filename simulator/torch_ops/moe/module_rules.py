"""Forward passes that capture puts in the place of a module's own.

Mixtures of experts choose at run time which rows go where (``topk``, sorting, loops over experts
that were hit), and an exported graph does not say what that means. For these modules a rule says
the same in terms that capture reads (`experts`):

    MixtralSparseMoeBlock    gate ─ softmax ─ dispatch ─ gate_up ─ act · up ─ down ─ combine

The module itself stays as it is; its `forward` is exchanged while it is exported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from stratagem.simulator.torch_ops.moe import experts

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
    sample, and computes on all of them. With a factor of 1 experts have the slots that are needed
    where all are chosen equally often, and what finds none is dropped, as by GShard (Lepikhin et
    al. 2020, arXiv 2006.16668).

    Raises:
        ValueError: the factor is not above 0, or the model has no such block.
    """
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
    costly: list[tuple[str, float]] = []
    try:
        for path, module in model.named_modules():
            owner = _owner(module)
            rule = rules.get(owner) or KNOWN.get(_full_name(owner))
            if rule is None:
                continue
            if owner not in rules and rule is _sparse_block:
                costly.append((path, _surplus(module)))
            vars(module)["forward"] = functools.partial(rule, module)
            changed.append(module)
        _warn(costly)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _owner(module: nn.Module) -> type[nn.Module]:
    """The class that a module has its forward from."""
    return next(each for each in type(module).__mro__ if "forward" in vars(each))


def _full_name(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def _is_known(module: nn.Module) -> bool:
    return KNOWN.get(_full_name(_owner(module))) is _sparse_block


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
    gate, up = experts.linear(x, sizes.gate_up_proj.mT).chunk(2, dim=-1)
    y = experts.linear(sizes.act_fn(gate) * up, sizes.down_proj.mT)
    made = experts.combine(y, gates, top_k=router.top_k)
    if getattr(router, "norm_topk_prob", True):
        return made
    # `combine` divides gates by the sum of those chosen.
    return made * gates.topk(router.top_k, -1).values.sum(-1, keepdim=True)


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
            f"{path!r}) have {most:g} times the slots that tokens take, and are priced so; "
            "stratagem.limit_capacity(model, 1.25) gives them 1.25 times as many",
            stacklevel=5,
        )
