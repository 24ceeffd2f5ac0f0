"""Small plans drawn at random: every schedule that is executed, on a few shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stratagem.searcher.space.stage_cuts import by_stage
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import CUSTOM, Plan, Stage
from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule
from stratagem.simulator.schedules.named_schedules import SCHEDULES

BATCH = 48
KINDS = (*SCHEDULES, "v-shaped")
"""The schedules by name, and orders of one's own in which rank r has stages r and 2p − 1 − r."""


@dataclass(frozen=True)
class Shape:
    """A schedule on a small cluster.

    Attributes:
        schedule: one of `KINDS`.
        ranks: of the pipeline.
        per_rank: stages of each.
        parts: microbatches.
        ways: data-parallel devices of a stage.
    """

    schedule: str
    ranks: int
    per_rank: int
    parts: int
    ways: int

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return self.ranks * self.per_rank


def draw_shape(rng: random.Random, kind: str) -> Shape:
    """Sizes with which there is such a schedule."""
    ranks = rng.choice([2, 4]) if kind == "chimera" else rng.choice([1, 2, 3, 4])
    per_rank = {"interleaved": rng.choice([2, 3]), "v-shaped": 2}.get(kind, 1)
    if kind == "interleaved":
        ranks = rng.choice([2, 3])
    rounds = {"interleaved": ranks, "chimera": ranks}.get(kind, 1)
    parts = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 12) if n % rounds == 0])
    return Shape(kind, ranks, per_rank, parts, rng.choice([1, 2]))


def draw_plan(rng: random.Random, shape: Shape) -> tuple[Plan, OperatorGraph]:
    """A plan of a shape for a perceptron or a GPT, and the graph.

    Nothing computes slower beside a collective and no pass waits for one, so that a pass takes as
    long with a sync as without.
    """
    causal = shape.schedule == "terapipe" or rng.random() < 0.3
    graph = _gpt() if causal else mlp([64, 256, *[192] * 12, 32], batch=BATCH)
    layers = [i for i, each in enumerate(graph.operators) if not each.is_source]
    cuts = sorted(rng.sample(range(1, len(layers)), shape.num_stages - 1))
    stage_of = {i: sum(place >= cut for cut in cuts) for place, i in enumerate(layers)}
    zero = 0 if shape.schedule.startswith("pipedream") else rng.choice([0, 1, 2, 3])
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
            by_stage(graph, stage_of, shape.num_stages), _ranks(shape), strict=True
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
        schedule=CUSTOM if shape.schedule == "v-shaped" else shape.schedule,
        bucket_bytes=rng.choice([0, 2**16]),
        token_slices=2 if shape.schedule == "terapipe" else 1,
        orders=_v_orders(shape) if shape.schedule == "v-shaped" else (),
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


def _ranks(shape: Shape) -> Sequence[int]:
    if shape.schedule == "v-shaped":
        return [*range(shape.ranks), *reversed(range(shape.ranks))]
    return [stage % shape.ranks for stage in range(shape.num_stages)]


def _v_orders(shape: Shape) -> tuple[str, ...]:
    """Forward down and up again, and back: the later stage's backward whole, the other's split."""
    orders = tuple(tuple(_v_order(shape, rank)) for rank in range(shape.ranks))
    text = Schedule(CUSTOM, shape.num_stages, shape.parts, orders).to_text()
    return tuple(text.splitlines())


def _v_order(shape: Shape, rank: int) -> Iterator[Action]:
    stages, parts = (rank, shape.num_stages - 1 - rank), range(shape.parts)
    for stage in stages:
        yield from (Action(stage, ActionKind.FORWARD, part) for part in parts)
    yield from (Action(stages[1], ActionKind.BACKWARD, part) for part in parts)
    yield from (Action(stages[0], ActionKind.INPUT_GRADIENT, part) for part in parts)
    yield from (Action(stages[0], ActionKind.WEIGHT_GRADIENT, part) for part in parts)
