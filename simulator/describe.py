"""What a plan does, in words: stage by stage, what is split, what is copied, what is sent."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from stratagem.simulator.graph import DimKind, Operator, OperatorGraph
from stratagem.simulator.placement import Pin, Replicate, Shard
from stratagem.simulator.plan import Choice, Plan, Stage
from stratagem.simulator.simulation import Simulation, StageMemory
from stratagem.simulator.timeline import TaskKind, format_duration, statistics

GIB = 2**30
MAX_GROUPS = 12
"""How many groups of equally treated operators are listed for a stage."""
_ZERO = {
    0: "",
    1: "optimizer state sharded (ZeRO-1)",
    2: "gradients and optimizer state sharded (ZeRO-2)",
    3: "parameters, gradients and optimizer state sharded (ZeRO-3)",
}


def describe(simulation: Simulation, graph: OperatorGraph) -> str:
    """Say what a simulated plan does, for a person who has not seen the code.

    Example:
        >>> from stratagem.simulator.cluster import Cluster
        >>> from stratagem.simulator.models import mlp
        >>> graph = mlp([64, 64], batch=32)
        >>> # print(describe(simulate_plan(plan, graph, costs), graph))

    Returns:
        Several lines: the whole step, then each stage with its devices, splits and memory.
    """
    plan = simulation.plan
    lines = [_headline(simulation, graph)]
    for number, stage in enumerate(plan.stages):
        lines += ["", *_stage_lines(plan, number, stage, simulation.memory[number], graph)]
    return "\n".join([*lines, "", _time_line(simulation)])


def _headline(simulation: Simulation, graph: OperatorGraph) -> str:
    plan = simulation.plan
    parts = plan.num_microbatches
    if len(plan.stages) > 1:
        how = f"in a {plan.schedule.upper()} pipeline of {len(plan.stages)} stages"
    else:
        how = "without a pipeline"
    each = graph.batch // parts
    cut = f"cut into {parts} microbatches of {each}" if parts > 1 else "in one piece"
    return (
        f"{plan.model} trains on {plan.num_devices} of {plan.cluster.num_devices} devices of "
        f"{plan.cluster.name}, {how}; the batch of {graph.batch} is run {cut}."
    )


def _stage_lines(
    plan: Plan, number: int, stage: Stage, memory: StageMemory, graph: OperatorGraph
) -> list[str]:
    kinds = sorted({plan.cluster.device_type(d).name for d in stage.mesh.devices})
    axes = " × ".join(f"{axis.size} ({axis.name})" for axis in stage.mesh.axes)
    first, last = min(stage.mesh.devices), max(stage.mesh.devices)
    operators = [graph.operator(name) for name in stage.operators]
    computing = [op for op in operators if op.kind != "source"]
    lines = [
        f"Stage {number}: {stage.mesh.num_devices} × {', '.join(kinds)} (devices {first}–{last}), "
        f"arranged as {axes}",
        f"  runs {len(computing)} operators, {computing[0].name} … {computing[-1].name}",
    ]
    groups: dict[str, list[str]] = {}
    for operator in computing:
        phrase = _choice_phrase(operator, stage.choices[operator.name], stage.mesh.shape)
        groups.setdefault(phrase, []).append(operator.name)
    ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    lines += [f"  • {phrase}: {_collapse(names)}" for phrase, names in ordered[:MAX_GROUPS]]
    if len(ordered) > MAX_GROUPS:
        rest = sum(len(names) for _, names in ordered[MAX_GROUPS:])
        lines.append(f"  • {rest} more operators in {len(ordered) - MAX_GROUPS} other ways")
    lines.append(f"  {_memory_phrase(memory)}")
    return lines


def _choice_phrase(operator: Operator, choice: Choice, shape: tuple[int, ...]) -> str:
    ways: Counter[str] = Counter()
    copies = 1
    words: list[str] = []
    for placement, size in zip(choice.config, shape, strict=True):
        if size == 1:
            continue
        if isinstance(placement, Shard):
            name = str(placement.dim)
            ways[name] = max(ways[name], 1) * size
        elif isinstance(placement, Replicate):
            copies *= size
        elif isinstance(placement, Pin):
            words.append(f"on index {placement.index} of an axis of {size} only")
    for name, count in ways.items():
        sample = operator.dim(name).kind is DimKind.SAMPLE
        words.append(f"{'samples' if sample else name} ÷ {count}")
    if copies > 1:
        words.append(f"computed {copies} times" if not ways else f"each part {copies} times")
    if operator.weights and choice.zero:
        words.append(_ZERO[choice.zero])
    return ", ".join(words) or "on one device"


def _collapse(names: Iterable[str]) -> str:
    """Layer numbers to stars: ``h.*.mlp.c_fc (12×)``; long lists end in a count."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    shown = [f"{name} ({n}×)" if n > 1 or "*" in name else name for name, n in counts.items()]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def _memory_phrase(memory: StageMemory) -> str:
    verdict = "fits" if memory.fits else f"over by {(memory.peak - memory.capacity) / GIB:.2f} GiB"
    phrase = (
        f"memory {memory.peak / GIB:.2f} of {memory.capacity / GIB:.0f} GiB per device "
        f"({verdict}): {memory.state / GIB:.2f} parameters, gradients and optimizer, "
        f"{memory.activations / GIB:.2f} activations of {memory.in_flight} "
        f"microbatch{'es' if memory.in_flight > 1 else ''}, {memory.working / GIB:.2f} working"
    )
    if not memory.fits:
        largest = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.largest[:3])
        phrase += f"; most is held by {largest} GiB"
    return phrase


def _time_line(simulation: Simulation) -> str:
    shares = statistics(simulation.timeline)
    compute = max(
        (busy for lane, busy in shares.busy.items() if lane.endswith("compute")), default=0.0
    )
    sync = shares.by_kind[TaskKind.GRADIENT_SYNC]
    exposed = max(shares.exposed_communication.values(), default=0.0)
    return (
        f"A step takes {format_duration(simulation.step_time)} ± "
        f"{100 * simulation.relative_error:.0f} %: the busiest stage computes for "
        f"{format_duration(compute)}, communication that nothing hides takes "
        f"{format_duration(exposed)}"
        + (f" (gradient synchronisation in all {format_duration(sync)})." if sync else ".")
    )
