"""Why a row is far off: what is known to be missing from the model, most likely first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.fidelity.predict import Outcome
from benchmarks.fidelity.score import HEADROOM

FAR = 0.2
"""Relative error from which a row is listed."""
ALIKE = 0.25


def far_off(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, str]]:
    """The rows that the model misses, the worst first, each with the most likely reason."""
    timed = [outcome for outcome in outcomes if outcome.run.seconds is not None]
    far = sorted((o for o in timed if abs(o.error) > FAR), key=lambda o: -abs(o.error))
    return [(outcome, likely_reason(outcome, timed)) for outcome in far]


def likely_reason(outcome: Outcome, others: Sequence[Outcome]) -> str:
    """What tells this row from those that are predicted well."""
    setup, cluster = outcome.setup, outcome.run.cluster
    if outcome.error < 0:
        if outcome.free < HEADROOM:
            return "memory nearly full: the allocator frees and retries, which is not modelled"
        near = _neighbours(outcome, others)
        if near and statistics.median(o.error for o in near) > outcome.error + ALIKE:
            return (
                f"measured far slower than {len(near)} runs of the same model with almost the "
                "same plan: an outlier of the measurement"
            )
        if setup.tensor > cluster.devices_per_node:
            return "tensor parallelism crosses nodes: contention beyond shared cards"
        if setup.tensor > 1 and setup.pipeline > 1 and setup.microbatch <= 2:
            return "small kernels in a pipeline: the host that launches them is the limit"
        if setup.microbatch == 1 or setup.tensor >= 4:
            return "small kernels: the host that launches them is the limit"
    elif len(outcome.run.setups) > 1:
        return "the plan is not told: the authors' best may be another than ours"
    return "not explained"


def _neighbours(outcome: Outcome, others: Sequence[Outcome]) -> list[Outcome]:
    """Runs of the same model whose plan differs in one degree by at most a factor of two."""
    mine = _degrees(outcome)
    found = []
    for other in others:
        if other is outcome or other.run.group[0] != outcome.run.group[0]:
            continue
        ratios = [a / b for a, b in zip(mine, _degrees(other), strict=True)]
        moved = [r for r in ratios if r != 1]
        if len(moved) <= 1 and all(0.5 <= r <= 2 for r in moved):
            found.append(other)
    return found


def _degrees(outcome: Outcome) -> tuple[int, ...]:
    setup = outcome.setup
    return setup.microbatch, setup.tensor, setup.pipeline, outcome.run.cluster.num_devices
