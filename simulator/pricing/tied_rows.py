"""What a parameter costs that two operators of one stage share, by the choices of both.

The value that the user reads is one of three:

    the owner's     lies as the owner reads it, and is kept whole: published to both at once
    gathered        the owner has ZeRO-3 and the user's gradient joins the owner's: for every pass
    a copy          lies in another way, and is brought up to date once a step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.graph.placement import (
    Placements,
    local_elements,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Weight
from stratagem.simulator.pricing.cost_rows import PricedTime, TieRow, numbered
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import home_placements

Convert = Callable[[int, Sequence[Placements], Sequence[Placements]], PricedTime]
"""Times of moving the parameter at so many bytes an element, sources × targets."""


@dataclass(frozen=True)
class _Lies:
    """Where the parameter lies under each choice of an operator that reads it."""

    choices: Sequence[Choice]
    uses: list[Placements]
    gradients: list[Placements]
    homes: list[Placements]


def tie_row(
    ends: tuple[tuple[Weight, Sequence[Choice]], tuple[Weight, Sequence[Choice]]],
    sizes: tuple[int, ...],
    shape: Sequence[int],
    training: Training,
    convert: Convert,
) -> TieRow:
    """The row of a tied parameter.

    Args:
        ends: of the owner and of the user their weight, and their choices.
        sizes: of the parameter's factors.
        shape: of the mesh.
        training: says how wide parameters and gradients are.
        convert: prices what moves.
    """
    ours, theirs = (_lies(*end, shape) for end in ends)
    joins = _alike(ours.gradients, theirs.gradients)
    away = _alike(ours.homes, theirs.uses, negated=True)
    full = np.array([choice.zero == 3 for choice in ours.choices])
    apart = np.array([a != b for a, b in zip(ours.homes, ours.uses, strict=True)])
    gathers = joins & away & full[:, None]
    is_owners = _alike(ours.uses, theirs.uses) & ~(full & apart)[:, None] & ~gathers
    copied = ~gathers & ~is_owners & away
    used, read, home = (_elements(x, sizes, shape) for x in (theirs.uses, ours.uses, ours.homes))
    scattered = np.array([choice.zero >= 2 for choice in ours.choices]) & (read > home)
    each, grad = training.parameter_bytes, training.gradient_bytes
    own_gradient = grad + (each if training.holds_buckets else 0)
    to_home = convert(grad, theirs.gradients, ours.homes)
    to_user = convert(each, ours.homes, theirs.uses)
    return TieRow(
        gradient=PricedTime(to_home.ns.T, to_home.mask.T).where(~joins),
        publish=to_user.where(copied),
        gather=to_user.where(gathers),
        parameter_bytes=np.where(copied, used * each, 0),
        gradient_bytes=np.where(joins, 0, used * own_gradient),
        gathered_bytes=np.where(gathers, (used[None, :] - home[:, None]) * each, 0),
        whole_gradient_bytes=np.where(joins & scattered[:, None], (read * grad)[:, None], 0),
    )


def _lies(weight: Weight, choices: Sequence[Choice], shape: Sequence[int]) -> _Lies:
    return _Lies(
        choices,
        [weight_placements(weight, choice.config) for choice in choices],
        [weight_gradient_placements(weight, choice.config) for choice in choices],
        [home_placements(weight, choice, shape) for choice in choices],
    )


def _alike(
    ours: Sequence[Placements], theirs: Sequence[Placements], *, negated: bool = False
) -> Flags:
    _, numbers = numbered([*ours, *theirs])
    first, second = numbers[: len(ours)], numbers[len(ours) :]
    equal: Flags = first[:, None] == second[None, :]
    return ~equal if negated else equal


def _elements(
    placements: Sequence[Placements], sizes: tuple[int, ...], shape: Sequence[int]
) -> Ints:
    return np.array([local_elements(sizes, each, shape) for each in placements], dtype=np.int64)
