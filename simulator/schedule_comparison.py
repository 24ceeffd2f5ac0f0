"""One pipeline under every schedule: what each would do to a plan's step, memory and weights.

The stages of a plan are played once as blocks; every schedule then runs those blocks in its own
order. Schedules that plans do not have (a copy of each stage, asynchronous updates) can be
compared like this too, without TeraPipe, whose blocks are others, and without interleaving, whose
stages are.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from stratagem.simulator.ampnet import ampnet
from stratagem.simulator.boundary import transfer_seconds
from stratagem.simulator.cost_table import RowMemory
from stratagem.simulator.costs import CostModel
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.lifetimes import Use
from stratagem.simulator.memory import StageTensors, device_memory
from stratagem.simulator.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    LAST_BACKWARD,
    SEND,
    SEND_BACK,
    WEIGHT_GRADIENT,
)
from stratagem.simulator.plan import Plan
from stratagem.simulator.plan_model import PlanModel, macro_durations, plan_model
from stratagem.simulator.schedule import Schedule
from stratagem.simulator.schedule_times import StageTimes, play_schedule
from stratagem.simulator.schedules import chimera, gpipe, one_f_one_b, pipedream, zb_h1
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
    "they add to the last backward. Held is the most microbatches on a rank. An asynchronous "
    "schedule's step is its period times the microbatches; it keeps versions of the weights, and "
    "staleness is how many updates they may be behind."
)


def compare_schedules(
    plan: Plan, graph: OperatorGraph, costs: CostModel, *, memory: RowMemory | None = None
) -> Table:
    """The step, bubble and memory of a pipelined plan under each schedule, the fastest first.

    Example:
        >>> print(compare_schedules(plan, graph, RooflineCosts()))  # doctest: +SKIP

    Args:
        plan: with one stage on each set of devices; its own schedule does not count.
        graph: the model at its whole batch.
        costs: prices of operators.
        memory: rows priced before under the same `costs`.

    Raises:
        ValueError: when the plan has one stage only or several on the same devices, or is not for
            `graph`.
    """
    if len(plan.stages) < 2 or plan.num_ranks < len(plan.stages):
        raise ValueError(
            f"plan {plan.name!r} has {len(plan.stages)} stages on {plan.num_ranks} sets of "
            "devices: schedules are compared for pipelines of at least 2 stages, each on devices "
            "of its own"
        )
    plan.check(graph)
    split = replace(plan, schedule="zb-h1", token_slices=1, orders=())
    whole = replace(split, schedule="1f1b")
    models = {s.schedule: plan_model(s, graph, costs, memory) for s in (split, whole)}
    times = stage_times(models["zb-h1"])
    rows = [
        _row(name, plan, times, models["zb-h1" if name == "zb-h1" else "1f1b"])
        for name in NAMES
        if name != "chimera" or len(plan.stages) % 2 == 0
    ]
    table = Table(f"schedules of {plan.name}", COLUMNS, tuple(rows), NOTE)
    return table.sorted_by("step", descending=False)


def stage_times(model: PlanModel) -> StageTimes:
    """How long the stages of a plan whose schedule splits backward take, in ns."""
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
        input_gradient=column(INPUT_GRADIENT),
        weight_gradient=column(WEIGHT_GRADIENT),
        transfer=transfer,
        update=[max(0, ns) for ns in update],
        replica_sync=[_copy_sync(model, s) for s in stages],
    )


def _copy_sync(model: PlanModel, s: int) -> int:
    """ns to sum the gradients of two copies of a stage: each sends and receives all of them once.

    A copy of stage s of S is where stage S − 1 − s is.
    """
    tensors = model.stages[s].tensors
    gradients = _bytes_for(tensors, Use.GRADIENTS)
    meshes = [stage.mesh for stage in model.plan.stages]
    seconds = transfer_seconds(gradients, meshes[s], meshes[-1 - s], model.plan.cluster)
    return round(seconds * 1e9)


def _bytes_for(tensors: StageTensors, use: Use) -> int:
    return sum(
        int(nbytes)
        for nbytes, each, state in zip(
            tensors.nbytes, tensors.lifetimes.uses, tensors.is_state, strict=True
        )
        if state and each is use
    )


def _row(name: str, plan: Plan, times: StageTimes, model: PlanModel) -> tuple[Value, ...]:
    stages, parts = len(plan.stages), plan.num_microbatches
    made = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "chimera": chimera}
    if name in made:
        schedule = made[name](stages, parts)
        play = play_schedule(schedule, times)
        held = max(play.peak_held)
        step, bubble = play.makespan * 1e-9, float(play.bubble)
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
                (state.weight_versions[s] - 1) * _bytes_for(stage, Use.PARAMETERS)
                for s, stage in tensors.items()
            )
        peaks.append(peak)
    return max(peaks)
