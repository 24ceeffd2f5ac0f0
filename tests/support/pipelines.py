"""Stages of a model cut at places, meshes one behind the other, and a small model for both."""

from __future__ import annotations

import math

from stratagem.searcher.space.stage_cuts import by_stage
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis


def small_gpt(batch: int = 8) -> OperatorGraph:
    return gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=batch)


def cut_at(graph: OperatorGraph, *places: int) -> tuple[tuple[str, ...], ...]:
    layers = [i for i, op in enumerate(graph.operators) if not op.is_source]
    stage_of = {i: sum(k >= place for place in places) for k, i in enumerate(layers)}
    return by_stage(graph, stage_of, len(places) + 1)


def meshes_of(*shapes: tuple[int, ...]) -> tuple[DeviceMesh, ...]:
    made, first = [], 0
    for shape in shapes:
        axes = tuple(MeshAxis(f"axis{k}", size) for k, size in enumerate(shape))
        made.append(DeviceMesh(axes, tuple(range(first, first + math.prod(shape)))))
        first += math.prod(shape)
    return tuple(made)
