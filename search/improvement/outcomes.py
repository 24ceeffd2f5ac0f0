"""What work on a skeleton came to: its plan, and what no plan of it is under."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stratagem.searcher.bounds.cutting_planes import Bound
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Known:
    """What a search knows of a skeleton before it sharpens its bound.

    Attributes:
        skeleton: under one policy.
        bound: seconds that no plan of it is under.
        start: the best strategy known on it, which is among its choices; empty for none.
    """

    skeleton: Skeleton
    bound: float
    start: Choices


@dataclass(frozen=True, eq=False)
class Sharpened:
    """A skeleton after its bound was sharpened.

    Attributes:
        fate: bounded, enumerated or forbidden.
        bound: seconds that no plan of it is under that fits; infinite where none fits.
        shared: the same of policies that recompute more, whatever their memory; 0 says nothing.
        met: its last bound with the best choices met; None where it was excluded before that.
        plan: the best plan met, where it may be better than the best that was known.
        work: what it took: operators times pairs of choices, and more (see `WORK_OF_CHOICES`).
        why: why none of its plans is allowed, or fits.
        left_out: choices that were left out, and why.
    """

    fate: Fate
    bound: float
    shared: float = 0.0
    met: Bound | None = None
    plan: Plan | None = None
    work: float = 0.0
    why: str = ""
    left_out: str = ""


@dataclass(frozen=True, eq=False)
class Settled:
    """What a chain made of a plan on a skeleton.

    Attributes:
        skeleton: under the policies that it took to fit.
        plan: the best met.
        fits: whether it does.
        score: seconds of its step, more where it does not fit.
        evaluations: of the chain.
    """

    skeleton: Skeleton
    plan: Plan
    fits: bool
    score: float
    evaluations: int

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts as `Chain.rank` does: those that fit come before the others."""
        return not self.fits, self.score


@dataclass(frozen=True, eq=False)
class Refined:
    """What single changes made of a plan.

    Attributes:
        skeleton: with the policy of each stage.
        plan: on it.
        changes: that were made, in words; none where no neighbour is better.
    """

    skeleton: Skeleton
    plan: Plan
    changes: tuple[str, ...]


class Fate(enum.Enum):
    """What became of a skeleton."""

    PRUNED = "pruned: its bound is above the best plan"
    FORBIDDEN = "left out: the constraints do not allow it"
    FULL = "left out: no plan of it fits"
    RANKED = "ranked: known strategies were simulated on it"
    BOUNDED = "bounded: its lower bound was sharpened, no plan searched"
    ANNEALED = "searched"
    ENUMERATED = "enumerated: every plan of it was scored, or passed over as worse"
    OPEN = "open: only its computing was bounded"


@dataclass(frozen=True)
class SkeletonRecord:
    """A skeleton of the space, what became of it, and what is known of its plans.

    `bound` is what none of its plans is under (s), `best` the best simulated plan that fits.
    """

    skeleton: Skeleton
    fate: Fate
    bound: float
    best: float | None
    why: str = ""
