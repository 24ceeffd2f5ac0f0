"""What a run says of plans whose pieces are streamed, as the executor's are not."""

from __future__ import annotations

import warnings

from stratagem.simulator.plan.plan import Plan


class SeparateCollectives(UserWarning):
    """A plan's streamed pieces run as products and collectives of their own."""


def warn_of_streamed_pieces(plan: Plan) -> None:
    """Warn, once a run, that streamed pieces of a plan (see `Choice`) run one by one.

    Results are the same. Times are not: each piece is a launch of its own, computes at the
    efficiency of its shape, and pays the latency of its collective.

    Warns:
        SeparateCollectives: naming the first operator, how many there are, and what to do.
    """
    streamed = plan.streamed
    if not streamed:
        return
    more = f" and {len(streamed) - 1} more" if len(streamed) > 1 else ""
    chunks = plan.choice(streamed[0]).chunks
    warnings.warn(
        f"plan {plan.name!r} streams the pieces of operator {streamed[0]!r}{more}: predicted is 1 "
        f"product and 1 collective that waits for its {chunks} parts, run are {chunks} products "
        f"and {chunks} collectives, which gives the same results and takes longer; set streamed "
        "to false to predict what runs",
        SeparateCollectives,
        stacklevel=3,
    )
