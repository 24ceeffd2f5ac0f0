"""As many messages are priced as the executor sends.

Gradients of an operator went in one message and were priced as one each: the sync of a small GPT
was predicted to take almost twice as long as it did. On links whose messages take
a second each, and whose bytes take none, seconds count messages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from stratagem.executor.program.instructions import Bundle
from stratagem.executor.program.instructions.transfer_instructions import Convert
from stratagem.executor.running.execute import prepare
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster, Link
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import Case, chosen, make_plan, one_stage

GRAPH = gpt(
    num_layers=2,
    hidden=16,
    num_heads=2,
    vocabulary=32,
    sequence=8,
    batch=4,
    tied=False,
    positions="none",
)
"""Without learned positions, whose gradient needs no sum: what stands behind such an operator in a
bucket is priced as if it paid the latency anew."""
LINK = Link("a second a message", bandwidth_gb_s=1e12, latency_us=1e6)
CLUSTER = replace(
    Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2),
    intra_node=replace(LINK, name="inside"),
    inter_node=LINK,
)


def whole(zero: int, bucket_bytes: int) -> Plan:
    """Both devices, the samples cut."""
    plan = one_stage(GRAPH, data_parallel(GRAPH, (2,), zero=zero), (2,))
    return replace(plan, cluster=CLUSTER, bucket_bytes=bucket_bytes)


def mirrored(bucket_bytes: int) -> Plan:
    """Chimera: each of two stages on both devices."""
    case, choose = Case(nn.Module(), {}, GRAPH), chosen(data_parallel(GRAPH, (1,)))
    plan = make_plan(case, choose, (1,), (1,), num_microbatches=2, schedule="chimera")
    return replace(plan, cluster=CLUSTER, bucket_bytes=bucket_bytes)


def sent(plan: Plan) -> float:
    """Messages of a rank that bring gradients and parameters together, one behind the other."""
    found = 0.0
    for instruction in prepare(plan, GRAPH).ranks[0].instructions:
        first = instruction.parts[0] if isinstance(instruction, Bundle) else instruction
        if isinstance(first, Convert) and first.kind is TaskKind.GRADIENT_SYNC:
            link = AxisLink(1.0, 0.0, crosses_nodes=False, shares_compute=False)
            found += sum(collective_time(step.collective, 1, 2, link) for step in first.steps)
    return found


def priced(plan: Plan) -> float:
    """Seconds of them on the busiest rank as they are predicted."""
    timeline = simulate_plan(plan, GRAPH, RooflineCosts()).timeline
    groups: dict[str, float] = {}
    for lane, kind, start, end in zip(
        timeline.lane, timeline.kinds, timeline.start, timeline.end, strict=True
    ):
        if kind is TaskKind.GRADIENT_SYNC:
            name = timeline.lanes[lane].split(" · ")[0]
            groups[name] = groups.get(name, 0.0) + (end - start) * 1e-9
    return max(groups.values())


@pytest.mark.parametrize("bucket_bytes", [0, 3000, 2**30])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_message_is_priced_once(zero: int, bucket_bytes: int) -> None:
    plan = whole(zero, bucket_bytes)
    assert sent(plan) > 0
    assert priced(plan) == pytest.approx(sent(plan), rel=1e-3)


@pytest.mark.parametrize("bucket_bytes", [0, 3000, 2**30])
def test_a_message_between_homes_is_priced_once(bucket_bytes: int) -> None:
    plan = mirrored(bucket_bytes)
    assert sent(plan) > 0
    assert priced(plan) == pytest.approx(sent(plan), rel=1e-3)
