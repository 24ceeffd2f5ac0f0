"""One pipeline under every schedule: what each would do to a plan's step, memory and weights.

Schedules that flush are simulated, each as a plan of its own: all that have a name and can run its
stages, slices of tokens where the model can have them. Those that never do run the blocks of the
plan until their pace settles. What gives a rank several stages, such as interleaving, cannot be
compared like this, because its stages are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from stratagem.simulator.base.tables import Table, Unit, Value
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.weight_stashing import check_stashing
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.pricing.stage_boundaries import crossing_ties
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.ampnet import ampnet
from stratagem.simulator.schedules.named_schedules import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    plain_schedules,
    slices_tokens,
)
from stratagem.simulator.schedules.schedule_player import StageTimes, play_schedule
from stratagem.simulator.schedules.schedule_record import Sizes
from stratagem.simulator.schedules.steady_state import SteadyState, steady_state
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    FORWARD,
    LAST_BACKWARD,
    REDUCED_BACKWARD,
    REPLICA_UPDATE,
)
from stratagem.simulator.simulation.device_memory import StageTensors, device_memory
from stratagem.simulator.simulation.priced_plan import (
    PlanModel,
    macro_durations,
    periods_in_words,
    plan_model,
    settled_microbatches,
    streamed_times,
    transfers_ns,
)
from stratagem.simulator.simulation.rank_memory import rank_memory
from stratagem.simulator.stage.tensor_lifetimes import Purpose

COLUMNS = {
    "schedule": Unit.TEXT,
    "step": Unit.SECONDS,
    "bubble": Unit.SHARE,
    "held": Unit.COUNT,
    "memory": Unit.BYTES,
    "versions": Unit.COUNT,
    "staleness": Unit.COUNT,
    "timed as": Unit.TEXT,
}

NOTE = (
    "Synchronous schedules are simulated as plans, timed as a step. Held is the most microbatches "
    "(or slices) on a rank. An asynchronous schedule is timed as the periods of a step's "
    "microbatches, once it is full, where transfers count for the slower direction and parameters "
    "tied between stages not at all; where no plan has it, sync and update count as what they add "
    "to the last backward. It trains in another way: it keeps versions of the weights, and "
    "staleness is how many updates they may be behind."
)
A_STEP = "a step"


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
        token_slices: of a microbatch under TeraPipe, which is left out for 1 slice. So is what
            plans of these stages cannot have, such as Chimera (see `mirrored_stages.check_homes`).
        memory: rows priced before under the same `costs`.

    Raises:
        ValueError: when the plan has one stage only or several on the same devices, is not for
            `graph`, or is of a forward pass, or the model cannot be sliced (see `token_dims`).
    """
    if len(plan.stages) < 2 or plan.num_ranks < len(plan.stages):
        raise ValueError(
            f"plan {plan.name!r} has {len(plan.stages)} stages on {plan.num_ranks} sets of "
            "devices: schedules are compared for pipelines of at least 2 stages, each on devices "
            "of its own"
        )
    graph = plan.on(graph)
    if graph.is_forward:
        raise ValueError(
            f"plan {plan.name!r} is of the forward pass {graph.name!r}, which has one schedule: "
            "there is nothing to compare; schedules differ in when they go back"
        )
    memory = memory or RowMemory()
    plain = replace(plan, schedule=DEFAULT_SCHEDULE, token_slices=1, orders=())
    model = plan_model(plain, graph, costs, memory)
    times = _whole_times(model)
    rows, left_out = [], ""
    for schedule in _streams(plain, times):
        own = _own_times(plain, schedule, graph, costs, memory) or times
        try:
            rows.append(_stream(schedule, plan, own, model))
        except ValueError as error:
            left_out += f" Left out: {error}."
    plans = _flushing(plain, graph)
    for name, record in SCHEDULES.items() if token_slices > 1 else ():
        if slices_tokens(record):
            sliced = replace(plain, schedule=name, token_slices=token_slices)
            sliced.check(graph)
            plans[f"{name}, {token_slices} slices"] = sliced
    rows += [_simulated(name, one, graph, costs, memory) for name, one in plans.items()]
    table = Table(f"schedules of {plan.name}", COLUMNS, tuple(rows), NOTE + left_out)
    return table.sorted_by("step", descending=False)


def _flushing(plan: Plan, graph: OperatorGraph) -> dict[str, Plan]:
    """The plan under each schedule that can run it, and updates once a step, by its name."""
    found: dict[str, Plan] = {}
    for name in plain_schedules():
        try:
            under = replace(plan, schedule=name)
            under.check(graph)
        except ValueError:
            continue
        if under.make_schedule().update_every is None and not slices_tokens(SCHEDULES[name]):
            found[name] = under
    return found


def _streams(plan: Plan, times: StageTimes) -> Iterator[Schedule]:
    """Those that never flush, with enough microbatches for their pace to settle."""
    stages = len(plan.stages)
    many = settled_microbatches(stages)
    for record in SCHEDULES.values():
        made = record.made(Sizes(stages, many, stages))
        if made is not None and made.update_every is not None:
            yield made
    yield ampnet(stages, many, times, max_active=stages)


def _own_times(
    plan: Plan, schedule: Schedule, graph: OperatorGraph, costs: CostModel, memory: RowMemory
) -> StageTimes | None:
    """What a microbatch takes under a schedule as plans have it; None where none can have it."""
    if schedule.name not in SCHEDULES:
        return None
    own = replace(plan, schedule=schedule.name)
    try:
        check_stashing(own, graph, crossing_ties(own.stage_of, graph))
    except ValueError:
        return None
    return streamed_times(plan_model(own, graph, costs, memory), schedule)


def _whole_times(model: PlanModel) -> StageTimes:
    """Forward, whole backward, transfer and update of the stages of a plan, in ns."""
    stages = range(len(model.stages))
    durations = macro_durations(model)

    def column(kind: int) -> list[int]:
        return [int(durations[kind, s]) for s in stages]

    backward = list(map(max, column(BACKWARD), column(REDUCED_BACKWARD)))
    update = [last - inner for last, inner in zip(column(LAST_BACKWARD), backward, strict=True)]
    return StageTimes(
        forward=column(FORWARD),
        backward=backward,
        transfer=transfers_ns(model, durations),
        update=[max(0, ns) for ns in update],
    )


def _simulated(
    name: str, plan: Plan, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None
) -> tuple[Value, ...]:
    """The row of a plan as it is simulated."""
    model = plan_model(plan, graph, costs, memory)
    macro = model.macro
    times = simulate(macro.with_durations(macro_durations(model)))
    works = [*macro.blocks, *(macro.kind == REPLICA_UPDATE).nonzero()[0].tolist()]
    busy = int((times.end - times.start)[works].sum())
    bubble = 1 - busy / (macro.schedule.num_ranks * times.makespan)
    moments = [s for found in macro.schedule.situations for s in found]
    held = max(1 + sum(each.waiting + each.late for each in s.held) for s in moments)
    fullest = max(memory.peak for memory in rank_memory(model, times))
    return name, times.makespan * 1e-9, bubble, held, fullest, 1, 0, A_STEP


def _bytes_for(tensors: StageTensors, use: Purpose) -> int:
    return sum(
        int(nbytes)
        for nbytes, each, state in zip(
            tensors.nbytes, tensors.lifetimes.uses, tensors.is_state, strict=True
        )
        if state and each is use
    )


def _stream(
    schedule: Schedule, plan: Plan, times: StageTimes, model: PlanModel
) -> tuple[Value, ...]:
    """The row of a schedule without flushes, at its pace once it has settled."""
    state = steady_state(schedule, times)
    step = float(Fraction(plan.num_microbatches) * state.period) * 1e-9
    versions, staleness = max(state.weight_versions), max(state.staleness)
    held = max(play_schedule(schedule, times).peak_held)
    fullest = _fullest(model, schedule, state)
    timed = periods_in_words(plan.num_microbatches)
    return schedule.name, step, float(state.bubble), held, fullest, versions, staleness, timed


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
