"""Plans that treat like layers alike, of those that a prediction cannot tell from the fastest.

A search buys tenths of a percent with treatments that differ from layer to layer: 25 layers under
one ZeRO stage and 7 under another. Nobody writes such a plan by hand, few frameworks run it, and
what it gains is far inside the error of the prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from stratagem.searcher.space.choices import with_choices
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation

TELLS_APART = 0.05
"""Predictions that differ by less do not say which plan is faster. Of pairs among 311 runs
measured with nanotron on H100s, of one model on as many devices, those predicted less than 5 %
apart were in the predicted order in 62 % of cases (a coin is in 50), those 5 to 10 % apart in 80,
those further apart in 95."""

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


def variety(plan: Plan, graph: OperatorGraph) -> int:
    """How many treatments a plan has beyond one for each group of like layers; 0 is simple.

    Two layers are treated alike if their operators have the same choices (shards, ZeRO stage,
    recomputing, pieces, fusion) on meshes of the same axes.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> graph = gpt(num_layers=3, hidden=64, num_heads=4, vocabulary=96, sequence=8, batch=16)
        >>> variety(TrainingSetup(zero=2).plan(graph, Cluster.preset("dgx-a100")), graph)
        0
    """
    return sum(len(found) - 1 for found in treatments(plan, graph))


def simplest(
    fastest: Simulation,
    known: Iterable[Simulation],
    graph: OperatorGraph,
    simulate: Callable[[Plan], Simulation | None],
    admits: Callable[[Simulation], bool],
    most: int,
) -> Simulation:
    """Of the plans that take at most `TELLS_APART` more than the fastest, the least varied met.

    Met are the plans known, and what comes of treating layers as others of their kind are treated
    (see `_simpler`), each time by the change that costs least. Of equally varied plans the fastest
    is taken.

    Args:
        fastest: the best plan of a search.
        known: others that it simulated.
        graph: the model at its whole batch.
        simulate: what says how long a plan takes; nothing once there is no time to say it.
        admits: whether constraints allow a plan, and it fits.
        most: plans to simulate.
    """
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


def _rank(simulation: Simulation, graph: OperatorGraph) -> tuple[int, float]:
    return variety(simulation.plan, graph), simulation.step_time


def _simpler(plan: Plan, graph: OperatorGraph) -> Iterator[list[Plan]]:
    """Groups of plans with fewer treatments, those with the fewest first.

    All layers of a kind as one treatment has them; then those of one treatment, that of the fewest
    layers first, as another has them.
    """
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
