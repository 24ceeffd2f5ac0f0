"""What the steps of an elementwise chain make of sums over samples (see `sums_over_samples`)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.simulator.operators.step_programs import Steps, is_reference

Place = tuple[int, int]
"""An argument of a step: the number of the step, and its own."""


class Share(enum.Enum):
    """What a part of the batch has of a value."""

    EACH = "one for every sample"
    SUM = "a sum over samples"
    SAME = "the same for every microbatch"


SUM, SAME = Share.SUM, Share.SAME

SUMMANDS: dict[str, tuple[int, ...]] = {
    "alias": (0,),
    "neg": (0,),
    "cast": (0,),
    "add": (0, 1),
    "sub": (0, 1),
    "where": (1, 2),
    "masked_fill": (0, 2),
}
"""Functions that are sums of some of their arguments; the others must be the same for all."""


@dataclass(frozen=True)
class StepShares:
    """What a chain makes of sums.

    Attributes:
        share: of its result.
        added: the arguments that are the same for all and are added to a sum.
        problem: what it does to a sum that the sums of parts do not give; empty if nothing.
    """

    share: Share
    added: tuple[Place, ...] = ()
    problem: str = ""


def step_shares(steps: Steps, given: Sequence[Share]) -> StepShares:
    """The share of a chain's result, and what each part must add a share of only.

    Example:
        >>> step_shares([["mul", [["in", 0], 2.0]], ["add", [["step", 0], 1.0]]], [Share.SUM])
        StepShares(share=<Share.SUM: 'a sum over samples'>, added=((1, 1),), problem='')
        >>> step_shares([["sqrt", [["in", 0]]]], [Share.SUM]).problem
        'takes the sqrt of'

    Args:
        steps: of an operator none of whose dims is cut.
        given: what its inputs are; weights are the same for every part.
    """
    known: list[Share] = []
    added: list[Place] = []
    for number, (function, arguments) in enumerate(steps):
        shares = [_share(each, known, given) for each in arguments]
        if SUM not in shares:
            known.append(SAME)
            continue
        problem = _problem(function, arguments, shares)
        if problem:
            return StepShares(SUM, problem=problem)
        summands = [(at, shares[at]) for at in SUMMANDS.get(function, ()) if at < len(shares)]
        added += [(number, at) for at, share in summands if share is SAME and arguments[at] != 0]
        known.append(SUM)
    return StepShares(known[-1], tuple(added))


def _share(argument: Any, known: Sequence[Share], given: Sequence[Share]) -> Share:
    if not is_reference(argument):
        return SAME
    kind, number = argument
    return {"in": given, "step": known}[kind][number] if kind != "weight" else SAME


def _problem(function: str, arguments: Sequence[Any], shares: Sequence[Share]) -> str:
    """What a function does to a sum that has no parts; empty if nothing."""
    sums = [at for at, share in enumerate(shares) if share is SUM]
    if function == "mul":
        return "multiplies a sum by" if len(sums) > 1 else ""
    if function == "div":
        return "divides by" if 1 in sums else ""
    if function == "cast" and "float" not in arguments[1]:
        return f"casts to {arguments[1]}"
    if function == "where" and 0 in sums:
        return "chooses by"
    if function in SUMMANDS and set(sums) <= set(SUMMANDS[function]):
        return ""
    return f"takes the {function} of"
