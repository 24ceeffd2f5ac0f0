"""Small plans drawn at random: every schedule that has a name, on shapes that it accepts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from stratagem.searcher.space.stage_cuts import by_stage
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.mirrored_stages import sends_both_ways
from stratagem.simulator.plan.plan import CUSTOM, Plan, Stage
from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule
from stratagem.simulator.schedules.named_schedules import SCHEDULES, record_of
from stratagem.simulator.schedules.schedule_record import Sizes

BATCH = 48
MOST_STAGES = 9
V_SHAPED = "v-shaped"
"""Orders of one's own in which rank r has stages r and 2p − 1 − r."""


@dataclass(frozen=True)
class Shape:
    """A schedule on a small cluster.

    Attributes:
        schedule: one of `kinds`.
        ranks: of the pipeline.
        per_rank: stages of each.
        parts: microbatches.
        ways: data-parallel devices of a stage.
        slices: of the tokens.
    """

    schedule: str
    ranks: int
    per_rank: int
    parts: int
    ways: int
    slices: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.ranks * self.per_rank

    def made(self) -> Schedule | None:
        """The schedule of these sizes; None where it has none."""
        if self.schedule == V_SHAPED:
            return _v_shaped(self) if (self.per_rank, self.slices) == (2, 1) else None
        sizes = Sizes(self.num_stages, self.parts, self.ranks, self.slices)
        made = record_of(self.schedule).made(sizes)
        if made is None or made.num_slices != self.slices:
            return None
        return None if made.is_mirrored and not sends_both_ways(made) else made


def kinds() -> tuple[str, ...]:
    """The schedules by name, those that were registered among them, and one without a name."""
    return (*SCHEDULES, V_SHAPED)


def draw_shape(rng: random.Random, kind: str) -> Shape:
    """Sizes with which there is such a schedule, one of several stages a rank where that can be.

    Raises:
        ValueError: the schedule has none of the sizes that are tried.
    """
    ways = rng.choice([1, 2])
    sizes = product([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 6, 8, 12], [1, 2])
    shapes = [
        Shape(kind, ranks, per_rank, parts, ways, slices)
        for ranks, per_rank, parts, slices in sizes
        if ranks * per_rank <= MOST_STAGES
    ]
    found = [shape for shape in shapes if shape.made()]
    if not found:
        raise ValueError(
            f"schedule {kind!r} has none of the {len(shapes)} sizes that are drawn, of up to 4 "
            f"ranks, {MOST_STAGES} stages and 12 microbatches: let it accept some"
        )
    per_rank = rng.choice(sorted({shape.per_rank for shape in found}))
    slices = max(shape.slices for shape in found)
    return rng.choice([s for s in found if (s.per_rank, s.slices) == (per_rank, slices)])


def draw_plan(rng: random.Random, shape: Shape) -> tuple[Plan, OperatorGraph]:
    """A plan of a shape for a perceptron or a GPT, and the graph.

    Nothing computes slower beside a collective and no pass waits for one, so that a pass takes as
    long with a sync as without.
    """
    schedule = shape.made()
    if schedule is None:
        raise ValueError(f"there is no schedule of {shape}: draw its sizes by draw_shape")
    causal = shape.slices > 1 or rng.random() < 0.3
    graph = _gpt() if causal else mlp([64, 256, *[192] * 12, 32], batch=BATCH)
    layers = [i for i, each in enumerate(graph.operators) if not each.is_source]
    cuts = sorted(rng.sample(range(1, len(layers)), shape.num_stages - 1))
    stage_of = {i: sum(place >= cut for cut in cuts) for place, i in enumerate(layers)}
    zero = 0 if schedule.stashes_weights else rng.choice([0, 1, 2, 3])
    choices = data_parallel(graph, (shape.ways,), zero=zero)
    stages = [
        Stage(
            part,
            DeviceMesh(
                (MeshAxis("data", shape.ways),),
                tuple(range(rank * shape.ways, (rank + 1) * shape.ways)),
            ),
            {name: choices[name] for name in part},
        )
        for part, rank in zip(
            by_stage(graph, stage_of, shape.num_stages), schedule.homes, strict=True
        )
    ]
    plan = Plan(
        name=f"{shape}, ZeRO {zero}",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=replace(Cluster.preset("dgx-a100", num_nodes=2), compute_slowdown=0.0),
        training=Training(),
        stages=tuple(stages),
        num_microbatches=shape.parts,
        schedule=CUSTOM if shape.schedule == V_SHAPED else shape.schedule,
        bucket_bytes=rng.choice([0, 2**16]),
        token_slices=shape.slices,
        orders=tuple(schedule.to_text().splitlines()) if shape.schedule == V_SHAPED else (),
    )
    return plan, graph


def _gpt() -> OperatorGraph:
    return gpt(
        num_layers=3,
        hidden=64,
        num_heads=4,
        vocabulary=96,
        sequence=32,
        batch=BATCH,
        tied=False,
        positions="alibi",
    )


def _v_shaped(shape: Shape) -> Schedule:
    """Forward down and up again, and back: the later stage's backward whole, the other's split."""
    orders = tuple(tuple(_v_order(shape, rank)) for rank in range(shape.ranks))
    return Schedule(CUSTOM, shape.num_stages, shape.parts, orders)


def _v_order(shape: Shape, rank: int) -> Iterator[Action]:
    stages, parts = (rank, shape.num_stages - 1 - rank), range(shape.parts)
    for stage in stages:
        yield from (Action(stage, ActionKind.FORWARD, part) for part in parts)
    yield from (Action(stages[1], ActionKind.BACKWARD, part) for part in parts)
    yield from (Action(stages[0], ActionKind.INPUT_GRADIENT, part) for part in parts)
    yield from (Action(stages[0], ActionKind.WEIGHT_GRADIENT, part) for part in parts)
