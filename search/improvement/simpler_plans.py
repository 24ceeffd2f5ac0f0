"""Plans that treat like layers alike, of those that a prediction cannot tell from the fastest.

A search buys tenths of a percent with treatments that differ from layer to layer: 25 layers under
one ZeRO stage and 7 under another. Nobody writes such a plan by hand, few frameworks run it, and
what it gains is far inside the error of the prediction. So are ZeRO stages that differ from
operator to operator of a layer: frameworks have one for all parameters.

How simple a plan is, is a number (`variety`), of which 0 is the simplest:

    treatments of like layers beyond one of each kind  +  ZeRO stages of parameters beyond one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from stratagem.searcher.space.choices import with_choices
from stratagem.searcher.space.skeletons import ZERO_STAGES
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.graph.placement import Config
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import (
    parameter_weights,
    zero_stage,
    zero_stages_of,
)
from stratagem.simulator.simulation.simulation import TELLS_APART, Simulation

Treatment = tuple[tuple[tuple[tuple[str, int], ...], Choice], ...]
"""Of a layer, operator by operator: the axes of the mesh, and the choice."""
Layers = list[tuple[str, ...]]
"""The operators of layers that are alike, layer by layer."""


def like_layers(graph: OperatorGraph) -> list[Layers]:
    """The layers of a model that are alike: groups of layers, each with its operators in order.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=3, hidden=64, num_heads=4, vocabulary=96, sequence=8, batch=4)
        >>> [len(layers) for layers in like_layers(graph)]
        [3]
    """
    if like_layers not in graph.derived:
        names = [operator.name for operator in graph.operators]
        graph.derived[like_layers] = [
            [
                tuple(names[start : start + block.length])
                for start in range(
                    block.start, block.start + block.length * block.count, block.length
                )
            ]
            for block in repeated_blocks(graph)
        ]
    found: list[Layers] = graph.derived[like_layers]
    return found


def treatments(plan: Plan, graph: OperatorGraph) -> list[Counter[Treatment]]:
    """How often each treatment occurs among the layers of each group of like ones."""
    small = plan.rewrite(graph).graph
    return [Counter(_treatment(plan, layer) for layer in layers) for layers in like_layers(small)]


def zero_stages(plan: Plan, graph: OperatorGraph) -> Counter[int]:
    """How many operators have their parameters under each ZeRO stage, those where it matters.

    Where devices have parameters once, or keep copies that need no sum, no stage differs from 0.
    """
    small = plan.rewrite(graph).graph
    found: Counter[int] = Counter()
    for name in _sharded_by_zero(plan, small):
        found[zero_stage(small, small.operator(name), plan.choice(name).zero)] += 1
    return found


def variety(plan: Plan, graph: OperatorGraph) -> int:
    """How many treatments a plan has beyond one for each group of like layers; 0 is simple.

    Two layers are treated alike if their operators have the same choices (shards, ZeRO stage,
    recomputing, pieces, fusion) on meshes of the same axes. Beside these, ZeRO stages of
    parameters beyond one count, of any operator.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> graph = gpt(num_layers=3, hidden=64, num_heads=4, vocabulary=96, sequence=8, batch=16)
        >>> variety(TrainingSetup(zero=2).plan(graph, Cluster.preset("dgx-a100")), graph)
        0
    """
    return _ways(plan, graph) + max(0, len(zero_stages(plan, graph)) - 1)


def _ways(plan: Plan, graph: OperatorGraph) -> int:
    """Treatments beyond one for each group of like layers."""
    return sum(len(found) - 1 for found in treatments(plan, graph))


def simplest(
    fastest: Simulation,
    known: Iterable[Simulation],
    graph: OperatorGraph,
    simulate: Callable[[Plan], Simulation | None],
    admits: Callable[[Simulation], bool],
    most: int,
    limit: float | None = None,
) -> Simulation:
    """Of the plans that take at most `TELLS_APART` more than the fastest, the least varied met.

    Met are the plans known, and what comes of treating layers as others of their kind are treated
    and parameters as others are (see `_simpler`), each time by the change that costs least. Of
    equally varied plans the fastest is taken.

    Args:
        fastest: the best plan of a search.
        known: others that it simulated.
        graph: the model at its whole batch.
        simulate: what says how long a plan takes; nothing once there is no time to say it.
        admits: whether constraints allow a plan, and it fits.
        most: plans to simulate.
        limit: seconds that the plan may take; `TELLS_APART` more than the fastest if left out.
    """
    if limit is None:
        limit = fastest.step_time * (1 + TELLS_APART)
    pool = [fastest, *(each for each in known if each.step_time <= limit and admits(each))]
    best = min(pool, key=lambda each: _rank(each, graph))
    left = most

    def tried(plans: Iterable[Plan]) -> list[Simulation]:
        nonlocal left
        found = []
        for plan in plans:
            if left == 0:
                break
            left -= 1
            simulation = simulate(plan)
            if simulation is None:
                left = 0
                break
            if simulation.step_time <= limit and admits(simulation):
                found.append(simulation)
        return found

    for start in (fastest, best):
        now: Simulation | None = start
        while now is not None:
            best = min(best, now, key=lambda each: _rank(each, graph))
            groups = _simpler(now.plan, graph)
            better = next((found for group in groups if (found := tried(group))), None)
            now = min(better, key=lambda each: _rank(each, graph)) if better else None
    return best


def simplicity_in_words(
    found: Simulation,
    fastest: Simulation | None,
    graph: OperatorGraph,
    exports: Sequence[str] | None = None,
) -> str:
    """How alike a plan treats like layers, what that costs, and what programs can run it.

    Example:
        >>> simplicity_in_words(found, fastest, graph, ["megatron"])  # doctest: +SKIP
        'like layers are treated alike (variety 0): 0.4 % slower than the fastest plan (20.3 ms,
        variety 4); exports to megatron without loss'

    Args:
        found: the plan.
        fastest: another one that takes less, if there is one.
        graph: the model at its whole batch.
        exports: formats that say the plan without loss; None where nobody looked.
    """
    ways, stages = _ways(found.plan, graph), len(zero_stages(found.plan, graph))
    words = "like layers are treated alike"
    if ways:
        words = f"like layers are treated in {ways} way{'s' * (ways > 1)} more than one"
    if stages > 1:
        words += f", parameters are under {stages} ZeRO stages"
    number = variety(found.plan, graph)
    if number or fastest is not None:
        words += f" (variety {number})"
    if fastest is not None:
        slower = found.step_time / fastest.step_time - 1.0
        words += (
            f": {100 * slower:.1f} % slower than the fastest plan "
            f"({format_duration(fastest.step_time)}, variety {variety(fastest.plan, graph)})"
        )
    if exports is not None:
        *most, last = exports or ("no format",)
        words += f"; exports to {', '.join(most)}{' and ' * bool(most)}{last} without loss"
    return words


def _rank(simulation: Simulation, graph: OperatorGraph) -> tuple[int, float]:
    return variety(simulation.plan, graph), simulation.step_time


def _simpler(plan: Plan, graph: OperatorGraph) -> Iterator[list[Plan]]:
    """Groups of plans with fewer treatments, those with the fewest first.

    All parameters under one ZeRO stage of those that the plan has; all layers of a kind as one
    treatment has them; then those of one treatment, that of the fewest layers first, as another
    has them.
    """
    stages = zero_stages(plan, graph)
    if len(stages) > 1:
        small = plan.rewrite(graph).graph
        yield [_under(plan, small, zero) for zero, _ in stages.most_common()]
    kinds = [
        (layers, [treatment for treatment, _ in found.most_common()])
        for layers, found in zip(_layers(plan, graph), treatments(plan, graph), strict=True)
        if len(found) > 1
    ]
    for layers, common in kinds:
        alike = [_treated(plan, layers, dict.fromkeys(common, each)) for each in common]
        yield [each for each in alike if each is not None]
    for layers, common in kinds:
        for rare in reversed(common if len(common) > 2 else ()):
            changed = [_treated(plan, layers, {rare: each}) for each in common if each is not rare]
            yield [each for each in changed if each is not None]


def _layers(plan: Plan, graph: OperatorGraph) -> list[Layers]:
    return like_layers(plan.rewrite(graph).graph)


def _treatment(plan: Plan, layer: tuple[str, ...]) -> Treatment:
    return tuple((_axes(plan, name), plan.choice(name)) for name in layer)


def _axes(plan: Plan, name: str) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, axis.size) for axis in plan.stages[plan.stage_of[name]].mesh.axes)


def _treated(plan: Plan, layers: Layers, instead: Mapping[Treatment, Treatment]) -> Plan | None:
    """The plan with treatments replaced by others; None where their meshes have other axes."""
    choices: dict[str, Choice] = {}
    for layer in layers:
        before = _treatment(plan, layer)
        after = instead.get(before, before)
        if any(b[0] != a[0] for b, a in zip(before, after, strict=True)):
            return None
        choices.update(zip(layer, (choice for _, choice in after), strict=True))
    return replace(with_choices(plan, choices), prediction=None)


def _under(plan: Plan, graph: OperatorGraph, zero: int) -> Plan:
    """The plan with all parameters under one ZeRO stage; frozen ones know but the third."""
    choices = {}
    for name in _sharded_by_zero(plan, graph):
        stage = zero_stage(graph, graph.operator(name), zero)
        choices[name] = replace(plan.choice(name), zero=stage)
    return replace(with_choices(plan, choices), prediction=None)


def _sharded_by_zero(plan: Plan, graph: OperatorGraph) -> list[str]:
    """The operators with parameters that some ZeRO stage shards."""
    known: dict[tuple[str, Config, tuple[int, ...]], bool]
    known = graph.derived.setdefault(_sharded_by_zero, {})
    found = []
    for stage in plan.stages:
        shape = stage.mesh.shape
        for name, choice in stage.choices.items():
            key = name, choice.config, shape
            if key not in known:
                operator = graph.operator(name)
                told = zero_stages_of(graph, operator, choice.config, shape, ZERO_STAGES)
                known[key] = bool(parameter_weights(graph, operator)) and len(told) > 1
            if known[key]:
                found.append(name)
    return found
