"""What a plan does, in words: stage by stage, what is split, what is copied, what is sent."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import few
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_bytes, format_duration, format_numbers
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin, Shard
from stratagem.simulator.graph.token_slices import num_slices
from stratagem.simulator.operators.kinds.norms import LOCAL
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.named_schedules import record_of
from stratagem.simulator.sharding.choice import OPTIONS, Choice
from stratagem.simulator.simulation.device_memory import DeviceMemory
from stratagem.simulator.simulation.idle_devices import vain_devices
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.timeline.timeline import Timeline, lane_group, lane_name, statistics

WIDTH = 76
"""Letters in a line."""
MAX_GROUPS = 12
"""How many groups of equally treated operators are listed for a stage."""
MAX_NAMES = 6
"""Names of operators that a line lists; it counts the others."""


@dataclass(frozen=True)
class StageWords:
    """What a stage does: its devices, its operators, how they are split, its memory."""

    devices: str
    operators: str
    splits: tuple[str, ...]
    memory: str


@dataclass(frozen=True)
class PlanWords:
    """What a plan does in sentences: the whole step, each stage, where the time goes."""

    headline: str
    stages: tuple[StageWords, ...]
    time: str


def plan_words(simulation: Simulation, graph: OperatorGraph) -> PlanWords:
    """The sentences of `describe`, for a page that breaks lines by itself."""
    plan = simulation.plan
    graph = plan.rewrite(graph).graph
    return PlanWords(
        _headline(simulation, graph),
        tuple(
            _stage_words(simulation, number, stage, graph)
            for number, stage in enumerate(plan.stages)
        ),
        _time_sentence(simulation),
    )


def describe(simulation: Simulation, graph: OperatorGraph) -> str:
    """Say what a simulated plan does, for a person who has not seen the code.

    Example:
        >>> print(describe(result.simulation, graph))  # doctest: +SKIP
        gpt trains on all 16 devices of dgx-a100, without a pipeline; …

    Returns:
        Several lines: the whole step, then each stage with its devices, splits and memory.

    Raises:
        ValueError: an argument of another type.
    """
    check_arguments("describe", simulation=(simulation, Simulation), graph=(graph, OperatorGraph))
    words = plan_words(simulation, graph)
    paragraphs = [_wrapped(words.headline)]
    for stage in words.stages:
        lines = [_wrapped(stage.devices, hanging="  "), f"  {stage.operators}"]
        lines += [_wrapped(f"• {each}", indent="  ", hanging="    ") for each in stage.splits]
        lines.append(_wrapped(stage.memory, indent="  ", hanging="  "))
        paragraphs.append("\n".join(lines))
    return "\n\n".join([*paragraphs, _wrapped(words.time)])


def _wrapped(text: str, indent: str = "", hanging: str = "") -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _headline(simulation: Simulation, graph: OperatorGraph) -> str:
    plan = simulation.plan
    parts, total = plan.num_microbatches, plan.cluster.num_devices
    devices = f"all {total}" if plan.num_devices == total else f"{plan.num_devices} of {total}"
    if len(plan.stages) > 1:
        kind = "a custom" if plan.has_own_orders else record_of(plan.schedule).words
        kind = "a" if graph.is_forward else kind
        how = f"in {kind or 'a'} pipeline of {len(plan.stages)} stages"
        how += "" if kind else f" under {plan.schedule!r}"
        if plan.num_ranks < len(plan.stages):
            how += f" that take turns on {plan.num_ranks} sets of devices"
        if plan.is_mirrored:
            how += ", each on its own devices and on those of its mirror image"
    else:
        how = "without a pipeline"
    cut = f"as {parts} microbatches of {graph.batch // parts}" if parts > 1 else "in one piece"
    slices = num_slices(plan.token_slices)
    cut += f", the tokens of each in {slices} slices" if slices > 1 else ""
    does = "runs forward" if graph.is_forward else "trains"
    return (
        f"{plan.model} {does} on {devices} devices of {plan.cluster.name}, {how}; a step runs the "
        f"batch of {graph.batch} {cut}.{_uncut(graph)}{_by_microbatch(plan, graph)}"
        f"{_substituted(plan)}{_in_vain(plan, graph)}"
    )


def _in_vain(plan: Plan, graph: OperatorGraph) -> str:
    """Which devices the step does not need."""
    told = vain_devices(plan, graph)
    return f" {told}." if told else ""


def _uncut(graph: OperatorGraph) -> str:
    """Why the batch of a model is never cut."""
    if not graph.whole_batch:
        return ""
    return (
        f" It cannot be cut into microbatches: {graph.whole_batch}, and theirs would not add up "
        "to it."
    )


def _by_microbatch(plan: Plan, graph: OperatorGraph) -> str:
    """What a microbatch has of its own that one device with the whole batch has not."""
    norms, parts = graph.batch_norms, plan.num_microbatches
    if not norms:
        return ""
    if any(graph.operator(name).attributes.get(LOCAL) for name in norms):
        return (
            f" {len(norms)} batch norms (such as {norms[0]}) take the mean and variance of each "
            "device's own samples of a microbatch, as DistributedDataParallel does."
        )
    if parts == 1:
        return ""
    return (
        f" {len(norms)} batch norms (such as {norms[0]}) take the mean and variance of each "
        f"microbatch of {graph.batch // parts} samples by itself, as one device does that adds up "
        "gradients; one that runs the whole batch at once takes those of all."
    )


def _substituted(plan: Plan) -> str:
    places: Counter[str] = Counter()
    for step in plan.substitutions:
        places[step.rule] += len(step.matches)
    if not places:
        return ""
    listed = ", ".join(f"{rule} ({count}×)" for rule, count in places.items())
    return f" Its graph was rewritten first: {listed}."


def _stage_words(
    simulation: Simulation, number: int, stage: Stage, graph: OperatorGraph
) -> StageWords:
    operators = [op for op in map(graph.operator, stage.operators) if not op.is_source]
    seconds = operator_seconds(simulation.timeline, simulation.plan.group(number))
    groups: dict[str, list[str]] = {}
    for operator in operators:
        phrase = choice_phrase(operator, stage.choices[operator.name], stage.mesh.shape)
        groups.setdefault(phrase, []).append(operator.name)
    spent = {
        phrase: sum(seconds.get(name, 0.0) for name in names) for phrase, names in groups.items()
    }
    whole = sum(spent.values()) or 1.0
    ordered = sorted(groups.items(), key=lambda pair: -spent[pair[0]])
    splits = [
        f"{_share(spent[phrase] / whole)} {phrase}: {collapse(names)}"
        for phrase, names in ordered[:MAX_GROUPS]
    ]
    if len(ordered) > MAX_GROUPS:
        rest = sum(len(names) for _, names in ordered[MAX_GROUPS:])
        splits.append(f"{rest} more operators in {len(ordered) - MAX_GROUPS} other ways")
    return StageWords(
        f"Stage {number}: {_devices_phrase(simulation.plan, stage)}",
        f"{len(operators)} operators, from {operators[0].name} to {operators[-1].name}:",
        tuple(splits),
        _memory_phrase(simulation.memory[simulation.plan.rank_of[number]], graph),
    )


def _devices_phrase(plan: Plan, stage: Stage) -> str:
    devices = stage.mesh.devices
    kinds = ", ".join(sorted({plan.cluster.device_type(d).name for d in devices}))
    if len(devices) == 1:
        return f"one {kinds} (device {devices[0]})"
    axes = [axis for axis in stage.mesh.axes if axis.size > 1]
    arranged = ""
    if len(axes) > 1:
        sizes = " × ".join(str(axis.size) for axis in axes)
        arranged = f", arranged as {sizes} ({' × '.join(axis.name for axis in axes)})"
    return f"{len(devices)} × {kinds} (devices {format_numbers(devices)}){arranged}"


def operator_seconds(timeline: Timeline, group: str) -> dict[str, float]:
    """Time of each operator on a stage's compute lane, both passes of all microbatches."""
    wanted = lane_name(group, "compute")
    suffixes = {
        TaskKind.FORWARD: " forward",
        TaskKind.BACKWARD: " backward",
        TaskKind.RECOMPUTE: " recompute",
    }
    seconds: defaultdict[str, float] = defaultdict(float)
    rows = zip(timeline.names, timeline.kinds, timeline.lane, strict=True)
    lengths = (timeline.end - timeline.start) * 1e-9
    for (name, kind, lane), length in zip(rows, lengths.tolist(), strict=True):
        if kind in suffixes and timeline.lanes[lane] == wanted:
            seconds[name.removesuffix(suffixes[kind])] += length
    return seconds


def _share(share: float) -> str:
    return f"{share:.0%} of the computing," if share >= 0.005 else "next to nothing,"


def choice_phrase(operator: Operator, choice: Choice, shape: tuple[int, ...]) -> str:
    """What a choice does to an operator on a mesh of `shape`, in words.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.graph.placement import Shard
        >>> operator = mlp([8, 4], batch=2).operator("layers.0")
        >>> choice_phrase(operator, Choice((Shard("sample"),)), (2,))
        'samples split 2 ways'
    """
    ways: Counter[str] = Counter()
    copies = 1
    words: list[str] = []
    for placement, size in zip(choice.config, shape, strict=True):
        if isinstance(placement, Shard):
            name = str(placement.dim)
            ways[name] = max(ways[name], 1) * size
        elif isinstance(placement, Pin):
            words.append(f"on index {placement.index} of an axis of {size} only")
        else:
            copies *= size
    split = [(name, count) for name, count in ways.items() if count > 1]
    for name, count in split:
        sample = operator.dim(name).kind is DimKind.SAMPLE
        words.append(f"{'samples' if sample else name} split {count} ways")
    if copies > 1:
        words.append(f"each part on {copies} devices" if split else f"whole on {copies} devices")
    words += filter(None, (option.phrase(operator, choice) for option in OPTIONS))
    return ", ".join(words) or "whole"


def collapse(names: Iterable[str]) -> str:
    """Layer numbers to stars, long lists to a count.

    Example:
        >>> collapse(["h.0.mlp.up", "h.1.mlp.up", "wte"])
        'h.*.mlp.up (2×), wte'
    """
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    shown = [
        name if n == 1 and "*" not in name else f"{name} ({n}×)" for name, n in counts.items()
    ]
    return few(shown, MAX_NAMES, quoted=False)


def _memory_phrase(memory: DeviceMemory, graph: OperatorGraph) -> str:
    over = memory.peak - memory.capacity
    verdict = "it fits" if memory.fits else f"too much by {format_bytes(over)}"
    state = "parameters, gradients and optimizer state"
    held = f"activations (microbatches in flight: {memory.in_flight})"
    if graph.is_forward:
        state, held = "parameters", "results of other microbatches"
    phrase = (
        f"Memory: {format_bytes(memory.peak)} of {format_bytes(memory.capacity)} per device, "
        f"{verdict}: {format_bytes(memory.state)} of {state}, "
        f"{format_bytes(memory.activations)} of {held}, {format_bytes(memory.working)} to work in"
    )
    if memory.waiting:
        phrase += f", {format_bytes(memory.waiting)} of gradients that wait for links"
    phrase += "."
    if not memory.fits:
        largest = ", ".join(
            f"{each.operator} ({each.use.value}) {format_bytes(each.total)}"
            for each in memory.alive[:3]
        )
        phrase += f" Most is held by {largest}."
    return phrase


def _time_sentence(simulation: Simulation) -> str:
    timeline = simulation.timeline
    computing = _computing_seconds(timeline)
    busiest = max(computing, key=lambda group: computing[group], default="")
    exposed = statistics(timeline).exposed_communication.get(busiest, 0.0)
    computes = computing.get(busiest, 0.0)
    sentence = (
        f"A step takes {format_duration(simulation.step_time)} ({simulation.error_in_words}): "
    )
    if len(simulation.plan.stages) == 1:
        return sentence + (
            f"devices compute for {format_duration(computes)}, and for "
            f"{format_duration(exposed)} they communicate with no computing to hide it."
        )
    waiting = max(simulation.step_time - computes - exposed, 0.0)
    return sentence + (
        f"{busiest}, the busiest, computes for {format_duration(computes)}, communicates with no "
        f"computing to hide it for {format_duration(exposed)}, and waits for other stages for "
        f"{format_duration(waiting)}."
    )


def _computing_seconds(timeline: Timeline) -> dict[str, float]:
    """Per group the time on its compute lane, without transfers that keep its cores busy."""
    seconds: defaultdict[str, float] = defaultdict(float)
    lengths = (timeline.end - timeline.start) * 1e-9
    for kind, lane, length in zip(timeline.kinds, timeline.lane, lengths.tolist(), strict=True):
        group = lane_group(timeline.lanes[lane])
        if not kind.is_communication and timeline.lanes[lane] == lane_name(group, "compute"):
            seconds[group] += length
    return seconds
