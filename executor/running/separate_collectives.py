"""What a run says of plans whose collectives are not those of the executor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from stratagem.simulator.base.misspelt_names import few
from stratagem.simulator.plan.plan import Plan


class SeparateCollectives(UserWarning):
    """A plan's streamed pieces, or work inside sums, run as operators and collectives apart."""


def warn_of_separate_collectives(plan: Plan) -> None:
    """Warn, once a run, of what a plan has inside collectives (see `Choice`) and runs apart.

    Results are the same. Times are not: each streamed piece is a launch of its own, computes at
    the efficiency of its shape, and pays the latency of its collective; what is inside a sum waits
    for it, computes whatever of it the device needs, and the sum takes memory.

    Warns:
        SeparateCollectives: naming the first operator, how many there are, and what to do.
    """
    for told in _told(plan):
        warnings.warn(
            f"plan {plan.name!r} {told}, which gives the same results and takes longer; set "
            "these options to false to predict what runs",
            SeparateCollectives,
            stacklevel=3,
        )


def _told(plan: Plan) -> Iterator[str]:
    if plan.streamed:
        chunks = plan.choice(plan.streamed[0]).chunks
        yield (
            f"streams the pieces of operator {few(plan.streamed, 1)} (streamed): predicted is 1 "
            f"product and 1 collective that waits for its {chunks} parts, run are {chunks} "
            f"products and {chunks} collectives"
        )
    if plan.in_sums:
        yield (
            f"has the work of operator {few(plan.in_sums, 1)} inside the sum that it reads "
            "(in_sum): predicted is 1 collective that computes, run are a sum and the operator "
            "behind it"
        )
