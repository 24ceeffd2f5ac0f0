"""The lengths of token slices that make a pipelined step shortest (Li et al. 2021, TeraPipe).

Later slices look at more keys, so equal lengths leave later slices slower, and a pipeline waits
for its slowest slice. With S stages, M microbatches and slices that take t₁, t₂, … on the slowest
stage, forward and backward, a step takes about

    M · Σ tᵢ + (S − 1) · max tᵢ                                                  (equation 5 there)

For each bound on the largest tᵢ a dynamic program over the positions finds the least sum; the
best over all bounds is the optimum. As there, t of a slice of l positions behind c others is taken
to be linear in c, and prices of two cuts give its line for every l.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stratagem.searcher.space.schedule_traits import Form, schedules_in
from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.token_slices import num_positions, token_dims
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.schedules.work_kinds import BACKWARD, FORWARD, SEND, SEND_BACK
from stratagem.simulator.simulation.priced_plan import PlanModel, macro_durations, plan_model
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

MOST_UNITS = 32
"""Into how many units positions are cut at most; slices are whole numbers of units."""


def slice_tokens(
    plan: Plan, graph: OperatorGraph, costs: CostModel | None = None, *, unit: int | None = None
) -> Plan:
    """The plan with the tokens of its microbatches sliced so that its step is shortest.

    The best lengths by the estimate are simulated beside equal ones; what is fastest of those
    that fit is returned, and the fastest of all where none fits.

    Example:
        >>> sliced = slice_tokens(plan, graph)  # doctest: +SKIP
        >>> sliced.token_slices  # doctest: +SKIP
        (768, 640, 640)

    Args:
        plan: with one stage on each set of devices; its own schedule and slices do not count.
        graph: the model at its whole batch.
        costs: prices of operators; the device model of the plan's cluster when left out.
        unit: lengths are multiples of it; a divisor of the positions. A 32nd of them where that
            divides them, else the next divisor, if left out.

    Raises:
        ValueError: the model cannot be sliced (see `token_slices`), `unit` does not divide its
            positions, or stages share devices.
    """
    check_arguments(
        "slice_tokens", plan=(plan, Plan), graph=(graph, OperatorGraph), unit=(unit, int | None)
    )
    costs = costs_or_default(costs)
    graph = plan.rewrite(graph).graph
    total = num_positions(graph, token_dims(graph))
    unit = default_unit(total) if unit is None else unit
    if unit < 1 or total % unit:
        raise ValueError(
            f"graph {graph.name!r} has {total} positions, which are no multiple of unit {unit}: "
            f"choose a divisor of {total}"
        )
    schedule, *_ = schedules_in(Form.SLICED)
    whole = replace(plan, schedule=schedule, token_slices=1, orders=(), prediction=None)
    memory = RowMemory()
    equal = [size for size in range(unit, total + 1, unit) if total % size == 0]
    tried = [estimated_lengths(whole, graph, costs, total, unit, memory)]
    tried += [(size,) * (total // size) for size in equal]
    found = [
        simulate_plan(replace(whole, token_slices=lengths), graph, costs, memory=memory)
        for lengths in dict.fromkeys(tried)
    ]
    return min(found, key=_rank).plan


def estimated_lengths(
    plan: Plan,
    graph: OperatorGraph,
    costs: CostModel,
    total: int,
    unit: int,
    memory: RowMemory | None = None,
) -> tuple[int, ...]:
    """The lengths, multiples of a unit, with which a plan is fastest by the estimate above.

    Args:
        plan: under a schedule of `Form.SLICED`, its tokens whole.
        graph: the model at its whole batch.
        costs: prices of operators.
        total: positions of the model.
        unit: a divisor of these.
        memory: what was priced before, with the same costs.
    """
    times = slice_times(plan, graph, costs, total, unit, memory)
    best = best_lengths(times, len(plan.stages), plan.num_microbatches)
    return tuple(unit * length for length in best)


def slice_times(
    plan: Plan,
    graph: OperatorGraph,
    costs: CostModel,
    total: int,
    unit: int,
    memory: RowMemory | None = None,
) -> Floats:
    """What slices take on the slowest stage: [l, c] in ns, of l + 1 units behind c others.

    Cutting the positions in two gives the first slice of every length without others before it,
    and the last with all others. Entries of slices that would not fit are infinite.
    """
    num = total // unit
    first, last = np.zeros(num), np.zeros(num)
    for length in range(1, num):
        cut = replace(plan, token_slices=(unit * length, total - unit * length))
        model = plan_model(cut, graph, costs, memory)
        first[length - 1], last[num - length - 1] = (_slowest(model, k) for k in range(2))
    first[-1] = last[-1] = _slowest(plan_model(plan, graph, costs, memory), 0)
    times = np.full((num, num), np.inf)
    for at in range(num):
        behind = num - at
        times[at, :behind] = np.linspace(first[at], last[at], behind) if behind > 1 else first[at]
    return times


def best_lengths(times: Floats, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The lengths in units that make M · Σ t + (S − 1) · max t least; the first among equals.

    Example:
        >>> alone = np.array([[1.0, 3.0], [5.0, np.inf]])
        >>> best_lengths(alone, num_stages=4, num_microbatches=1)
        (1, 1)

    Args:
        times: of `slice_times`.
        num_stages: S.
        num_microbatches: M.
    """
    best = np.inf
    found: tuple[int, ...] = (len(times),)
    for bound in np.unique(times[np.isfinite(times)]):
        if (num_stages - 1) * bound >= best:
            break
        total, lengths = _least_sum(np.where(times <= bound, times, np.inf))
        if not lengths:
            continue
        slowest = max(times[n - 1, sum(lengths[:k])] for k, n in enumerate(lengths))
        value = num_microbatches * total + (num_stages - 1) * slowest
        if value < best:
            best, found = value, lengths
    return found


def _least_sum(times: Floats) -> tuple[float, tuple[int, ...]]:
    """The least sum over all positions, and its lengths; none where there is no way."""
    num = len(times)
    least, taken = np.full(num + 1, np.inf), np.zeros(num + 1, dtype=np.int64)
    least[0] = 0.0
    for end in range(1, num + 1):
        lengths = np.arange(1, end + 1)
        sums = least[end - lengths] + times[lengths - 1, end - lengths]
        taken[end] = lengths[int(sums.argmin())]
        least[end] = sums.min()
    if not np.isfinite(least[num]):
        return np.inf, ()
    found: list[int] = []
    while num:
        found.append(int(taken[num]))
        num -= found[-1]
    return float(least[-1]), tuple(reversed(found))


def _slowest(model: PlanModel, number: int) -> float:
    """ns of a slice, forward and backward, where it takes longest: on a stage or between two."""
    durations, parts = macro_durations(model), len(model.parts)
    both = durations[FORWARD] + durations[BACKWARD]
    between = durations[SEND] + durations[SEND_BACK]
    stages = both[number : len(model.stages) : parts]
    pairs = between[number : len(model.macro.pairs) * parts : parts]
    return float(max(stages.max(), pairs.max(initial=0)))


def default_unit(total: int) -> int:
    """The least divisor of `total` that gives at most `MOST_UNITS` units."""
    return next(n for n in range(1, total + 1) if total % n == 0 and total // n <= MOST_UNITS)


def _rank(simulation: Simulation) -> tuple[bool, float]:
    return not simulation.fits, simulation.step_time
