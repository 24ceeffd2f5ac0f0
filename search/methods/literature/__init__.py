"""Strategies of the literature: each makes candidate plans for a situation.

Every name of `LITERATURE` is a system or a paper, its value makes the plans that its method finds
for a model and a cluster, none where the method does not apply. They are ordinary plans, priced by
the same simulator as any other.

In:      a situation.
Out:     candidate plans by the name of a paper or system.
Imports: space, the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from stratagem.searcher.methods.literature.annotations import (
    TRANSFORMER_RECIPES,
    gshard_annotations,
    transformer_annotations,
)
from stratagem.searcher.methods.literature.device_placement_rl import (
    Reinforced,
    operator_groups,
    reinforce,
)
from stratagem.searcher.methods.literature.gspmd_propagation import (
    Annotation,
    Completion,
    Inferred,
    complete,
)
from stratagem.searcher.methods.literature.mesh_tensorflow import (
    LayoutResult,
    best_layout,
    layout_choices,
    searched_dims,
)
from stratagem.searcher.methods.literature.one_stage_prices import (
    Price,
    StagePrices,
    fewest_microbatches,
    grid_meshes,
    one_stage_plan,
)
from stratagem.searcher.methods.literature.random_choices import random_choices
from stratagem.searcher.methods.literature.setup_families import (
    as_deepspeed_runs,
    as_megatron_runs,
    gshard_setups,
    megatron_setups,
    zero_setups,
)
from stratagem.searcher.methods.literature.setup_screening import (
    Dropped,
    Outlook,
    Rates,
    Screening,
    screen,
)
from stratagem.searcher.methods.literature.tofu import TofuResult, recursive_mesh, tofu
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.logical_dims import LogicalDim, dim_table, logical_dims
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.strategies import expert_dims, with_recompute
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.plan.plan import Plan

__all__ = [
    "LITERATURE",
    "TRANSFORMER_RECIPES",
    "Annotation",
    "Completion",
    "Dropped",
    "Inferred",
    "LayoutResult",
    "LogicalDim",
    "Outlook",
    "Price",
    "Rates",
    "Reinforced",
    "Screening",
    "StagePrices",
    "TofuResult",
    "best_layout",
    "complete",
    "dim_table",
    "fewest_microbatches",
    "grid_meshes",
    "gshard_annotations",
    "gshard_setups",
    "layout_choices",
    "logical_dims",
    "megatron_setups",
    "one_stage_plan",
    "operator_groups",
    "random_choices",
    "recursive_mesh",
    "reinforce",
    "screen",
    "searched_dims",
    "tofu",
    "transformer_annotations",
    "zero_setups",
]

IN_BUCKETS = 1
"""Setups of a family that are simulated in the buckets of its framework, too: the best ones. Two
and four gave the same plans for GPTs, Llama and ResNet-50 on 16 to 64 devices."""

SHARED_SIMULATED = 6
"""Setups of a family with experts shared out that are simulated beside those that copy them."""

NUM_RANDOM = 8
"""Random strategies that are compared with."""

MAX_PLACED = 400
"""Operators up to which device placement is learned; beyond, a sample takes too long."""

MAX_DEVICES_PLACED = 16
"""Devices up to which device placement is learned: the papers had at most 8."""

NUM_PLACEMENTS = 200
"""Placements that are drawn for the comparison."""


def _mesh_tensorflow(situation: Situation) -> Iterator[Plan]:
    """The best layout of every data × model mesh."""
    for mesh in grid_meshes(situation):

        def attempt(parts: int, mesh: DeviceMesh = mesh) -> tuple[LayoutResult, Price]:
            found = best_layout(situation, mesh, num_microbatches=parts)
            return found, found.price

        parts, found, _ = fewest_microbatches(situation, mesh, attempt)
        rules = ", ".join(f"{dim} → {axis}" for dim, axis in found.layout.items())
        name = f"Mesh-TensorFlow, {rules or 'no rules'} on {_shape(mesh)}"
        yield one_stage_plan(name, situation, mesh, found.choices, parts)


def _gspmd(situation: Situation) -> Iterator[Plan]:
    """GSPMD's three ways to annotate a transformer, on every data × model mesh."""
    for mesh in grid_meshes(situation):
        for recipe in TRANSFORMER_RECIPES:
            if mesh.shape[1] > 1 and transformer_annotations(situation.graph, mesh.axes, recipe):

                def strategy(
                    graph: OperatorGraph, mesh: DeviceMesh = mesh, recipe: str = recipe
                ) -> Choices:
                    annotations = transformer_annotations(graph, mesh.axes, recipe)
                    return complete(graph, mesh.axes, annotations).choices

                yield _fitted(f"GSPMD {recipe}", situation, mesh, strategy)


def _gshard_annotated(situation: Situation) -> Iterator[Plan]:
    """GShard's annotations of experts, on every data × model mesh."""
    if not expert_dims(situation.graph):
        return
    for mesh in grid_meshes(situation):

        def strategy(graph: OperatorGraph, mesh: DeviceMesh = mesh) -> Choices:
            return complete(graph, mesh.axes, gshard_annotations(graph, mesh.axes)).choices

        yield _fitted("GShard annotations", situation, mesh, strategy)


def _tofu(situation: Situation) -> Iterator[Plan]:
    """Tofu on a mesh of prime factors."""
    mesh = recursive_mesh(situation.cluster)
    yield _fitted(
        "Tofu",
        situation,
        mesh,
        lambda graph: tofu(graph, mesh.shape, situation.training).choices,
    )


def _reinforce(situation: Situation) -> Iterator[Plan]:
    """Device placement, where the model and the cluster are of the size that the papers had."""
    devices, operators = situation.cluster.num_devices, len(situation.graph.operators)
    if 1 < devices <= MAX_DEVICES_PLACED and operators <= MAX_PLACED:
        yield reinforce(situation, num_samples=NUM_PLACEMENTS).plan


def _random(situation: Situation) -> Iterator[Plan]:
    """Random strategies on data × model meshes in turn."""
    meshes = grid_meshes(situation)
    for seed in range(NUM_RANDOM):
        mesh = meshes[seed % len(meshes)]
        choices = random_choices(situation.graph, mesh.shape, seed=seed)
        yield one_stage_plan(f"random {seed}", situation, mesh, choices)


def _fitted(
    name: str,
    situation: Situation,
    mesh: DeviceMesh,
    strategy: Callable[[OperatorGraph], Choices],
) -> Plan:
    """A strategy with as few microbatches as it fits with; with full recompute if it must."""

    def attempt(parts: int, policy: str = "none") -> tuple[Choices, Price]:
        graph = situation.graph.microbatch(parts)
        choices = with_recompute(graph, strategy(graph), policy)
        prices = StagePrices(situation, mesh, {n: (c,) for n, c in choices.items()}, parts)
        price = prices.of(choices)
        if price.fits:  # Gradients that wait for links are in simulations alone.
            plan = one_stage_plan(name, situation, mesh, choices, parts)
            price = replace(price, peak=situation.simulate(plan).peak_memory)
        return choices, price

    name = f"{name} on {_shape(mesh)}"
    parts, choices, price = fewest_microbatches(situation, mesh, attempt)
    if not price.fits:
        name += ", full recompute"
        parts, choices, _ = fewest_microbatches(situation, mesh, partial(attempt, policy="full"))
    return one_stage_plan(name, situation, mesh, choices, parts)


def _screened(
    situation: Situation,
    setups: Iterable[TrainingSetup],
    as_run: Callable[[Situation, TrainingSetup], Iterable[TrainingSetup]],
) -> Iterator[Plan]:
    """The best setups with experts copied, and fewer of those that share experts out.

    Each kind by itself: estimates of one are not as near as those of the other. They reduce and
    gather operator by operator; the very best one comes once more in the buckets of its framework.
    """
    listed = list(setups)
    copied = [setup for setup in listed if setup.expert == 1]
    shared = [setup for setup in listed if setup.expert > 1]
    found = list(screen(situation, copied).simulated)
    if shared:
        found += screen(situation, shared, max_simulated=SHARED_SIMULATED).simulated
    for simulation in found:
        yield simulation.plan
    named = {setup.describe(): setup for setup in listed}
    for simulation in sorted(found, key=rank)[: 0 if situation.graph.is_forward else IN_BUCKETS]:
        for setup in as_run(situation, named[simulation.plan.name]):
            yield setup.plan(situation.graph, situation.cluster)


def _shape(mesh: DeviceMesh) -> str:
    return "×".join(str(size) for size in mesh.shape)


LITERATURE: dict[str, Callable[[Situation], Iterable[Plan]]] = {
    "Mesh-TensorFlow": _mesh_tensorflow,
    "GSPMD": _gspmd,
    "GShard annotations": _gshard_annotated,
    "GShard expert parallel": lambda s: screen(s, gshard_setups(s)).plans,
    "Tofu": _tofu,
    "REINFORCE": _reinforce,
    "Megatron-LM 3D": lambda s: _screened(s, megatron_setups(s), as_megatron_runs),
    "DeepSpeed ZeRO-1": lambda s: _screened(s, zero_setups(s, 1), as_deepspeed_runs),
    "DeepSpeed ZeRO-2": lambda s: _screened(s, zero_setups(s, 2), as_deepspeed_runs),
    "DeepSpeed ZeRO-3": lambda s: _screened(s, zero_setups(s, 3), as_deepspeed_runs),
    "random": _random,
}
"""What makes candidate plans, by the name of the method; none where it does not apply."""
