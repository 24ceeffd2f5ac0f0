"""Mixtures of experts: what sends tokens to them, and brings them back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from stratagem.simulator.operators.kinds.kind_record import (
    OperatorKind,
    OperatorRole,
    Sizes,
    no_operations,
    per_input,
)
from stratagem.simulator.operators.kinds.traffic import EachTensorOnce, output_size
from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.operators.saved_tensors import SavedTensors

LOADS = "loads"
"""The attribute that has the share of choices that each expert gets; without it all are alike."""

_STEPS = 2048
"""In which a distribution is summed up."""


def with_loads(operator: Operator, loads: Sequence[float]) -> Operator:
    """An operator as it is priced where experts get shares of choices; others as they are.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> layer = mlp([8, 8], batch=4).operator("layers.0")
        >>> with_loads(layer, (0.7, 0.3)) is layer
        True

    Raises:
        ValueError: there is not one share for each of its experts.
    """
    if not loads or not _is_routed(operator):
        return operator
    experts = shape_of(operator.inputs[1].layout[-1:], operator.sizes)[0]
    top_k = int(operator.attributes["top_k"])
    if len(loads) != experts:
        raise ValueError(
            f"operator {operator.name!r} has {experts} experts, but there are {len(loads)} "
            "expert_loads; give one share for each expert, or none"
        )
    if max(loads) / sum(loads) * top_k > 1 + 1e-9:
        raise ValueError(
            f"operator {operator.name!r}: one expert gets {max(loads) / sum(loads):.3g} of all "
            f"choices, but a token that makes {top_k} chooses it once; no share may be above "
            f"{1 / top_k:.3g}"
        )
    return replace(operator, attributes={**operator.attributes, LOADS: list(loads)})


def _is_routed(operator: Operator) -> bool:
    return operator.kind == "expert_linear" and len(operator.inputs) > 1


def filled_share(operator: Operator, sizes: Sizes) -> float:
    """The share of slots that are computed: up to the last one that a token is in, of any expert.

    Where it reads gates, a token takes a slot of an expert with a probability, of all top_k /
    experts unless loads say otherwise, so that the slots of one that a group fills are binomial.
    Of experts on several devices those are priced that are expected to fill most.
    """
    if not _is_routed(operator):
        return 1.0
    tokens, experts = shape_of(operator.inputs[1].layout[-2:], sizes)
    slots, columns = shape_of(operator.outputs[0].layout[-2:], sizes)
    top_k = int(operator.attributes["top_k"])
    count = max(1, output_size(operator, sizes) // max(1, slots * columns))
    loads = operator.attributes.get(LOADS)
    if loads is None:
        busiest = busiest_of_alike(tokens, top_k / experts, count)
    else:
        here = sizes[operator.weights[0].layout[0][0]]
        chances = [top_k * load / sum(loads) for load in loads]
        parts = (tuple(chances[i : i + here]) for i in range(0, len(chances), here))
        busiest = max(busiest_of_unlike(tokens, part, max(1, count // here)) for part in parts)
    return min(1.0, busiest / max(1, slots))


def busiest_of_alike(tokens: int, chance: float, count: int) -> float:
    """The largest of so many binomial numbers that is expected.

    The largest of n is expected to be that of n normal ones, Φ⁻¹((n − ⅜) / (n + ¼)) deviations
    above the mean (Blom 1958, Statistical Estimates and Transformed Beta-Variables).

    Example:
        >>> busiest_of_alike(100, 0.25, 1)
        25.0
    """
    above = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    return chance * tokens + above * math.sqrt(chance * (1 - chance) * tokens)


@lru_cache(4096)
def busiest_of_unlike(tokens: int, chances: tuple[float, ...], groups: int) -> float:
    """The largest number of tokens of a group that is expected to choose one of several experts.

    E max = ∫ 1 − Π F(x) dx over experts and groups, with normal distributions for binomial ones.

    Example:
        >>> round(busiest_of_unlike(1000, (0.5, 0.1), 1))
        500

    Args:
        tokens: of a group.
        chances: of each expert, that a token chooses it.
        groups: of tokens, whose experts are counted apart.
    """
    import scipy  # Machines that only run or time operators need not have it.

    means = tokens * np.asarray(chances)
    deviations = np.sqrt(np.maximum(means * (1 - np.asarray(chances)), 1e-12))
    least = max(0.0, float((means - 8 * deviations).max()))
    most = min(float(tokens), float((means + 8 * deviations).max()))
    if most <= least:
        return least
    places = np.linspace(least, most, _STEPS)
    below = scipy.special.ndtr((places[:, None] - means) / deviations).prod(axis=1) ** groups
    return least + float(np.trapezoid(1 - below, places))


def _combine_flops(operator: Operator, sizes: Sizes) -> float:
    """A product and a sum for each expert that a token has chosen."""
    return 2.0 * int(operator.attributes["top_k"]) * output_size(operator, sizes)


MOE_WEIGHTS = OperatorKind(
    name="moe_weights",
    role=OperatorRole.OTHER,
    flops=per_input(10.0),
    backward_flops=1.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0,)),
    weight_share=0.0,
)

MOE_DISPATCH = OperatorKind(
    name="moe_dispatch",
    role=OperatorRole.OTHER,
    flops=no_operations,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(1,)),
    weight_share=0.0,
)

MOE_COMBINE = OperatorKind(
    name="moe_combine",
    role=OperatorRole.OTHER,
    flops=_combine_flops,
    backward_flops=2.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=(0, 1)),
    weight_share=0.0,
)
