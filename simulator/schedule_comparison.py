"""One pipeline under every schedule: what each would do to a plan's step, memory and weights.

The stages of a plan are played once as blocks; every schedule then runs those blocks in its own
order. Interleaving cannot be compared like this, because its stages are others. Chimera and slices
of tokens are simulated as plans of their own, where the model can have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from stratagem.simulator.ampnet import ampnet
from stratagem.simulator.chimera import CHIMERA
from stratagem.simulator.cost_table import RowMemory
from stratagem.simulator.costs import CostModel
from stratagem.simulator.engine import simulate
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.lifetimes import Purpose
from stratagem.simulator.memory import StageTensors, device_memory
from stratagem.simulator.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_BACKWARD,
    REPLICA_UPDATE,
    SEND,
    SEND_BACK,
    TIE,
    WEIGHT_GRADIENT,
)
from stratagem.simulator.plan import Plan
from stratagem.simulator.plan_model import PlanModel, macro_durations, plan_model
from stratagem.simulator.predicted import rank_memory
from stratagem.simulator.schedule import Schedule
from stratagem.simulator.schedule_times import StageTimes, play_schedule
from stratagem.simulator.schedules import (
    gpipe,
    one_f_one_b,
    pipedream,
    zb_h1,
)
from stratagem.simulator.steady_state import SteadyState, steady_state
from stratagem.simulator.table import Table, Unit, Value

NAMES = ("gpipe", "1f1b", "zb-h1", "chimera", "pipedream", "ampnet")
"""The schedules that are compared."""

COLUMNS = {
    "schedule": Unit.TEXT,
    "step": Unit.SECONDS,
    "bubble": Unit.SHARE,
    "held": Unit.COUNT,
    "memory": Unit.BYTES,
    "versions": Unit.COUNT,
    "staleness": Unit.COUNT,
}

NOTE = (
    "Blocks are the plan's; transfers count for the slower direction, and sync and update as what "
    "they add to the last backward. Held is the most microbatches (or token slices) on a rank. An "
    "asynchronous schedule's step is its period times the microbatches; it keeps versions of the "
    "weights, and staleness is how many updates they may be behind. Parameters tied between "
    "stages travel behind the last backward, and count for synchronous schedules only."
)


def compare_schedules(
    plan: Plan,
    graph: OperatorGraph,
    costs: CostModel,
    *,
    token_slices: int = 1,
    memory: RowMemory | None = None,
) -> Table:
    """The step, bubble and memory of a pipelined plan under each schedule, the fastest first.

    Example:
        >>> print(compare_schedules(plan, graph, default_costs()))  # doctest: +SKIP

    Args:
        plan: with one stage on each set of devices; its own schedule does not count.
        graph: the model at its whole batch.
        costs: prices of operators.
        token_slices: of a microbatch under TeraPipe, which is left out for 1 slice.
            Chimera is left out where plans cannot have it (see `chimera.check_homes`).
        memory: rows priced before under the same `costs`.

    Raises:
        ValueError: when the plan has one stage only or several on the same devices, is not for
            `graph`, or the model cannot be sliced (see `token_dims`).
    """
    if len(plan.stages) < 2 or plan.num_ranks < len(plan.stages):
        raise ValueError(
            f"plan {plan.name!r} has {len(plan.stages)} stages on {plan.num_ranks} sets of "
            "devices: schedules are compared for pipelines of at least 2 stages, each on devices "
            "of its own"
        )
    graph = plan.rewrite(graph).graph
    plan.check(graph)
    split = replace(plan, schedule="zb-h1", token_slices=1, orders=())
    whole = replace(split, schedule="1f1b")
    models = {s.schedule: plan_model(s, graph, costs, memory) for s in (split, whole)}
    times = stage_times(models["zb-h1"])
    rows = [
        _row(name, plan, times, models["zb-h1" if name == "zb-h1" else "1f1b"])
        for name in NAMES
        if name != CHIMERA
    ]
    rows += _chimera(whole, graph, costs, memory)
    if token_slices > 1:
        rows.append(_terapipe(whole, graph, costs, token_slices, memory))
    table = Table(f"schedules of {plan.name}", COLUMNS, tuple(rows), NOTE)
    return table.sorted_by("step", descending=False)


def stage_times(model: PlanModel) -> StageTimes:
    """How long the stages of a plan whose schedule splits backward take, in ns."""
    durations = macro_durations(model)
    stages = range(len(model.stages))
    return replace(
        _whole_times(model),
        input_gradient=[int(durations[INPUT_GRADIENT, s]) for s in stages],
        weight_gradient=[int(durations[WEIGHT_GRADIENT, s]) for s in stages],
    )


def _whole_times(model: PlanModel) -> StageTimes:
    """Forward, whole backward, transfer and update of the stages of a plan, in ns."""
    stages = range(len(model.stages))
    durations = macro_durations(model)

    def column(kind: int) -> list[int]:
        return [int(durations[kind, s]) for s in stages]

    backward = column(BACKWARD)
    pair = {stages: item for item, stages in enumerate(model.macro.pairs)}
    transfer = [
        max(int(durations[kind, pair[a, b]]) for kind in (SEND, SEND_BACK))
        if (a, b) in pair
        else 0
        for a, b in pairwise(stages)
    ]
    update = [last - inner for last, inner in zip(column(LAST_BACKWARD), backward, strict=True)]
    return StageTimes(
        forward=column(FORWARD),
        backward=backward,
        transfer=transfer,
        update=[max(0, ns) for ns in update],
    )


def _chimera(
    plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None
) -> Iterator[tuple[Value, ...]]:
    """The row of Chimera, simulated as the plan that it is; none where it cannot be one."""
    try:
        opposite = replace(plan, schedule=CHIMERA)
        opposite.check(graph)
    except ValueError:
        return
    model = plan_model(opposite, graph, costs, memory)
    macro = model.macro
    times = simulate(macro.with_durations(macro_durations(model)))
    works = [*macro.blocks, *(macro.kind == REPLICA_UPDATE).nonzero()[0].tolist()]
    busy = int((times.end - times.start)[works].sum())
    bubble = 1 - busy / (macro.schedule.num_ranks * times.makespan)
    moments = [s for found in macro.schedule.situations for s in found]
    held = max(1 + sum(each.waiting + each.late for each in s.held) for s in moments)
    fullest = max(memory.peak for memory in rank_memory(model))
    yield CHIMERA, times.makespan * 1e-9, bubble, held, fullest, 1, 0


def _terapipe(
    plan: Plan,
    graph: OperatorGraph,
    costs: CostModel,
    num_slices: int,
    memory: RowMemory | None,
) -> tuple[Value, ...]:
    """The row of TeraPipe: the blocks of each slice are played."""
    sliced = replace(plan, schedule="terapipe", token_slices=num_slices)
    sliced.check(graph)
    model = plan_model(sliced, graph, costs, memory)
    each = [_whole_times(part) for part in model.parts]
    forward, backward, transfer = (
        [list(parts) for parts in zip(*(getattr(times, name) for times in each), strict=True)]
        for name in ("forward", "backward", "transfer")
    )
    times = StageTimes(forward, backward, transfer=transfer, update=each[0].update)
    play = play_schedule(sliced.make_schedule(), times)
    step = (play.makespan + _tied(model)) * 1e-9
    bubble, held = float(play.bubble), max(play.peak_held)
    fullest = max(rank.peak for rank in rank_memory(model))
    return f"terapipe, {num_slices} slices", step, bubble, held, fullest, 1, 0


def _tied(model: PlanModel) -> int:
    """ns that parameters tied between stages take, one after the other."""
    return int(macro_durations(model)[TIE].sum())


def _bytes_for(tensors: StageTensors, use: Purpose) -> int:
    return sum(
        int(nbytes)
        for nbytes, each, state in zip(
            tensors.nbytes, tensors.lifetimes.uses, tensors.is_state, strict=True
        )
        if state and each is use
    )


def _row(name: str, plan: Plan, times: StageTimes, model: PlanModel) -> tuple[Value, ...]:
    stages, parts = len(plan.stages), plan.num_microbatches
    made = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}
    if name in made:
        schedule = made[name](stages, parts)
        play = play_schedule(schedule, times)
        held = max(play.peak_held)
        step, bubble = (play.makespan + _tied(model)) * 1e-9, float(play.bubble)
        return name, step, bubble, held, _fullest(model, schedule, None), 1, 0
    # Enough microbatches to settle: the first and the last ones do not count.
    many = max(8 * stages, 32)
    if name == "pipedream":
        schedule = pipedream(stages, many)
    else:
        schedule = ampnet(stages, many, times, max_active=stages)
    state = steady_state(schedule, times)
    step = float(Fraction(parts) * state.period) * 1e-9
    versions, staleness = max(state.weight_versions), max(state.staleness)
    held = max(play_schedule(schedule, times).peak_held)
    fullest = _fullest(model, schedule, state)
    return name, step, float(state.bubble), held, fullest, versions, staleness


def _fullest(model: PlanModel, schedule: Schedule, state: SteadyState | None) -> int:
    """Bytes per device of the fullest rank, with the versions of the weights that it keeps."""
    peaks: list[int] = []
    for found in schedule.situations:
        tensors = {s: model.stages[s].tensors for s in {each.stage for each in found}}
        peak = device_memory(tensors, found, 0, split=schedule.splits_backward).peak
        if state is not None:
            peak += sum(
                (state.weight_versions[s] - 1) * _bytes_for(stage, Purpose.PARAMETERS)
                for s, stage in tensors.items()
            )
        peaks.append(peak)
    return max(peaks)
