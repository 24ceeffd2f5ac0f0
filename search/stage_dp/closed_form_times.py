"""Step times of pipelines in closed form, and how many microbatches their stages hold.

f, b and w are a stage's forward, backward (where every microbatch sums gradients, no less than its
links are busy) and the part of backward for weights, e what the last microbatch adds to it
(gradient sync, update), s what is sent on and back; t = f + b.

====================  ===========================================  ==========================
schedule              step time                                    held by stage i of S
====================  ===========================================  ==========================
1F1B                  Σ (t + s) + E + (M − 1) · P                  min(M, S − i)
GPipe                 Σ (t + s) + E + (M − 1) · (max f + max b)    M
zero bubble (H1)      Σ (t + s − 2w) + 2w + E + (M − 1) · P        min(M, S)
interleaved, v each   Σ (t + s + e) / v + (v·M − 1) · max (t + s)  2(R − r − 1) + (v − 1)R + 1
====================  ===========================================  ==========================

What a last backward sends does not wait for e, so stages reduce their gradients while those before
them run their last backward, or their last gradients of weights under zero bubble:

    E = max over stages of (e − Σ (b + s back) of the stages before),   max e under zero bubble.

1F1B alternates passes, so a microbatch waits for its neighbours' transfers: every window of
neighbouring stages repeats itself no faster than its stages and the transfers inside, there and
back, for as many microbatches as it has stages, hence

    P = max over windows of (Σ t + Σ s inside) / number of stages.

Which of them holds for a schedule is read from its actions (see `schedule_traits`): whether it
splits backward, gives a rank several stages, or runs all forwards first; and so is what stages
hold, for which the formulas say what the named ones do.

The formulas are exact for stages of equal times and bounds from below where transfers wait for
links; the program minimises them with P ≤ max (t + s) and the e of the first stage for E, which
is linear in its labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stratagem.searcher.space.schedule_traits import Run, rounds_of, run_of, traits_of
from stratagem.searcher.stage_dp.pipeline_dp import Objective
from stratagem.searcher.stage_dp.tables.stage_tables import StageCounting


class ClosedFormTimes(NamedTuple):
    """Of one stage, in ns: passes, the part of backward for weights, what the last microbatch

    adds, and transfers to the next stage and back.
    """

    forward: float
    backward: float
    weight: float
    last: float
    ahead: float
    back: float

    @property
    def passes(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def sent(self) -> float:
        """Transfers both ways."""
        return self.ahead + self.back


def mode_of(schedule: str, num_stages: int) -> StageCounting:
    """How stages count under a schedule."""
    return StageCounting(rounds_of(schedule, num_stages), traits_of(schedule).splits_backward)


def objective_of(schedule: str, num_microbatches: int, num_stages: int) -> Objective:
    """The weights of the sum and of the slowest stage."""
    copies = mode_of(schedule, num_stages).copies
    return Objective(1.0 / copies, float(copies * num_microbatches - 1))


def microbatches_held(schedule: str, num_stages: int, num_microbatches: int) -> list[int]:
    """Microbatches in flight at most, the running one included, from the last stage to the first.

    Where a rank has several stages, they are those of all its stages together.

    Example:
        >>> microbatches_held("1f1b", 3, 8)
        [1, 2, 3]
    """
    return list(_run(schedule, num_stages, num_microbatches).held[::-1])


def placed_stages(schedule: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """By stage, the rank that has it.

    Example:
        >>> placed_stages("interleaved", 4, 8)
        (0, 1, 0, 1)
    """
    return _run(schedule, num_stages, num_microbatches).ranks


def _run(schedule: str, num_stages: int, num_microbatches: int) -> Run:
    ranks = num_stages // mode_of(schedule, num_stages).copies
    run = run_of(schedule, num_stages, num_microbatches, ranks)
    assert run is not None, (schedule, num_stages, num_microbatches)
    return run


def step_ns(schedule: str, stages: Sequence[ClosedFormTimes], num_microbatches: int) -> float:
    """The step time of a pipeline in ns.

    Example:
        >>> stage = ClosedFormTimes(1.0, 2.0, 1.0, 0.0, 0.0, 0.0)
        >>> step_ns("1f1b", [stage] * 4, 8), step_ns("gpipe", [stage] * 4, 8)
        (33.0, 33.0)
    """
    copies = mode_of(schedule, len(stages)).copies
    total = sum(s.passes + s.sent for s in stages)
    rest = num_microbatches - 1
    if copies > 1:
        slowest = max(s.passes + s.sent for s in stages)
        total += sum(s.last for s in stages)
        return total / copies + (copies * num_microbatches - 1) * slowest
    if traits_of(schedule).splits_backward:
        total -= 2 * sum(s.weight for s in stages) - 2 * max(s.weight for s in stages)
        return total + max(s.last for s in stages) + rest * _period(stages)
    total += _latest(stages)
    if traits_of(schedule).runs_ahead:
        ahead = max(max(s.forward, s.ahead) for s in stages)
        back = max(max(s.backward, s.back) for s in stages)
        return total + rest * (ahead + back)
    return total + rest * _period(stages)


def _latest(stages: Sequence[ClosedFormTimes]) -> float:
    """How long after the last backward of the first stage the last stage has ended (E above)."""
    latest = before = 0.0
    for stage in stages:
        latest = max(latest, stage.last - before)
        before += stage.backward + stage.back
    return latest


def _period(stages: Sequence[ClosedFormTimes]) -> float:
    """Time from microbatch to microbatch, once the pipeline is full (see above)."""
    longest = 0.0
    for first in range(len(stages)):
        inside = 0.0
        for count, stage in enumerate(stages[first:], start=1):
            inside += stage.passes
            longest = max(longest, inside / count)
            inside += stage.sent
    return longest
