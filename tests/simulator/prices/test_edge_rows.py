"""The row of an edge that needs no conversion is made without pricing, and is the same."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from stratagem.searcher.space.strategies import known_strategies
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.cost_rows import MANY, PricedTime, masked
from stratagem.simulator.pricing.cost_table import UNCONVERTED, TableBuilder

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)


@pytest.mark.parametrize("shape", [(2, 2), (4,)])
def test_an_unconverted_edge_is_priced_as_any_other(shape: tuple[int, ...]) -> None:
    graph = gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    axes = tuple(MeshAxis(f"axis{k}", ways) for k, ways in enumerate(shape))
    mesh = DeviceMesh(axes, tuple(range(4)))
    met = 0
    for choices in known_strategies(graph, shape, zero_stages=(0, 3), model_zero_stages=(0,)):
        builder = TableBuilder(graph, mesh, CLUSTER, Training(), default_costs())
        one = {i: (choices[name],) for i, name in enumerate(graph.names)}
        # Each choice twice: tables of several choices take no short way.
        two = {i: listed * 2 for i, listed in one.items()}
        short, long = (builder.build(range(len(graph.operators)), each) for each in (one, two))
        for k, number in enumerate(short.edge_row_of):
            if short.edge_rows[number] is UNCONVERTED:
                met += 1
                # Who would share a conversion counts only where there is one.
                for field in (f for f in fields(UNCONVERTED) if f.name != "shares"):
                    quick = getattr(UNCONVERTED, field.name)
                    whole = getattr(long.edge_rows[long.edge_row_of[k]], field.name)
                    assert _numbers(quick) == _numbers(whole), field.name
    assert met > 20


def _numbers(entry: PricedTime | np.ndarray | None) -> list[int]:
    if entry is None:  # Launches, which this cluster does not model.
        return []
    parts = (entry.ns, entry.mask) if isinstance(entry, PricedTime) else (entry,)
    return [int(part[0, 0]) for part in parts]


@pytest.mark.parametrize("size", [3, MANY + 1])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_masks_keep_what_they_keep(size: int, share: float) -> None:
    rng = np.random.default_rng(0)
    values, keep = rng.integers(1, 9, size), rng.random(size) < share
    assert masked(values, keep).tolist() == (values * keep).tolist()
