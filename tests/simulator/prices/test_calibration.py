"""Calibration of clusters: scaled kernels, a host that launches them, reserved memory."""

from dataclasses import replace

import pytest

from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.hardware.device_type import GIB, DeviceType
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.memory_traffic import num_kernels
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import simulate_plan

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=1)
TRAINING = Training(precision="bfloat16")
SETUP = TrainingSetup(microbatch=4, training=TRAINING)


def step(graph, calibration, setup=SETUP):
    cluster = replace(CLUSTER, calibration=calibration)
    return simulate_plan(setup.plan(graph, cluster), graph, default_costs())


def launches(graph):
    """Kernels of forward and backward, counted operator by operator."""
    training = TRAINING
    return sum(
        num_kernels(operator, training)
        + (num_kernels(operator, training, backward=True) if graph.needs_gradient[i] else 0)
        for i, operator in enumerate(graph.operators)
        if not operator.is_source
    )


def test_a_scale_of_all_kernels_scales_the_step():
    """One device communicates nothing, so a step is its kernels."""
    graph = gpt(num_layers=2, batch=4)
    plain = step(graph, Calibration()).step_time
    scaled = step(graph, Calibration(product_scale=1.5, memory_scale=1.5)).step_time
    assert scaled == pytest.approx(1.5 * plain, rel=0.02)


def test_a_slow_host_rules_a_step_of_small_kernels():
    """Every kernel waits for its launch: the step takes all launches, and the last kernels."""
    graph = mlp([64] * 12, batch=4)
    slow = Calibration(launch_us=1000.0)
    took = step(graph, slow).step_time
    assert took == pytest.approx(launches(graph) * 1e-3, rel=0.02)
    assert took > launches(graph) * 1e-3


def test_a_fast_host_runs_ahead_and_costs_nothing_but_its_first_launch():
    graph = gpt(num_layers=2, hidden=2048, num_heads=16, batch=8)
    setup = replace(SETUP, microbatch=8)
    fast = step(graph, Calibration(launch_us=0.5), setup).step_time
    without = step(graph, Calibration(launch_us=1e-6), setup).step_time
    assert without <= fast < without + 20e-6


def test_recomputing_is_launched_again():
    graph = gpt(num_layers=4, hidden=64, num_heads=4, sequence=16, vocabulary=64, batch=4)
    slow = Calibration(launch_us=1000.0)
    again = step(graph, slow, replace(SETUP, recompute="full")).step_time
    assert again > 1.2 * step(graph, slow).step_time


def test_the_host_has_a_lane_of_its_own_in_the_timeline():
    graph = mlp([64] * 4, batch=4)
    timeline = step(graph, Calibration(launch_us=10.0)).timeline
    assert any("host" in lane for lane in timeline.lanes)
    assert not any("host" in lane for lane in step(graph, Calibration()).timeline.lanes)


STALLED = Calibration(launch_us=1.0, stall_us=100.0)
ONE_NODE = CLUSTER.resized(devices_per_node=4)
TWO_NODES = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)


def stalls_of(setup, cluster=TWO_NODES, calibration=STALLED):
    """Host time of launched conversions and collectives of a step, by stage."""
    graph = gpt(num_layers=4, hidden=64, num_heads=4, sequence=16, vocabulary=64, batch=8)
    cluster = replace(cluster, calibration=calibration)
    timeline = simulate_plan(setup.plan(graph, cluster), graph, default_costs()).timeline
    found = {}
    for name, lane, start, end in zip(
        timeline.names, timeline.lane, timeline.start, timeline.end, strict=True
    ):
        stage, what = timeline.lanes[lane].split(" · ")
        lost, moved = found.get(stage, (0, 0))
        if what == "host" and ("→" in name or "←" in name):
            found[stage] = lost + int(end - start), moved
        elif what == "link in node" and ("→" in name or "←" in name):
            found[stage] = lost, moved + 1
    return found


@pytest.mark.parametrize("tensor", [2, 4])
def test_hosts_of_a_pipeline_between_nodes_stall_once_for_each_member_of_a_collective(tensor):
    setup = TrainingSetup(tensor=tensor, pipeline=2, training=TRAINING, recompute="selective")
    found = stalls_of(setup)
    assert len(found) == 2
    for lost, conversions in found.values():
        assert conversions > 20
        collectives, rest = divmod(lost, tensor * 100_000)
        assert rest == 0
        assert conversions <= collectives <= 1.05 * conversions  # Few have two.


@pytest.mark.parametrize(
    ("setup", "cluster"),
    [
        (TrainingSetup(tensor=2, training=TRAINING), TWO_NODES),
        (TrainingSetup(tensor=2, pipeline=2, training=TRAINING), ONE_NODE),
    ],
    ids=["no pipeline", "one node"],
)
def test_where_the_network_is_idle_no_host_stalls(setup, cluster):
    for lost, collectives in stalls_of(setup, cluster).values():
        assert collectives > 0
        assert lost == 0


def test_stalls_hide_behind_long_kernels():
    """The host is ahead of the device again as soon as kernels take longer than launches."""
    graph = gpt(num_layers=2, hidden=2048, num_heads=16, batch=16)
    setup = TrainingSetup(microbatch=8, tensor=2, pipeline=2, training=TRAINING)
    cluster = TWO_NODES.resized(devices_per_node=2)
    plain, stalled = (
        simulate_plan(
            setup.plan(graph, replace(cluster, calibration=calibration)), graph, default_costs()
        ).step_time
        for calibration in (Calibration(launch_us=1.0), Calibration(launch_us=1.0, stall_us=5.0))
    )
    assert plain <= stalled < 1.005 * plain


def test_reserved_memory_is_not_for_plans():
    graph = mlp([64] * 4, batch=4)
    free = step(graph, Calibration()).memory[0].capacity
    less = step(graph, Calibration(reserved_gib=3.0)).memory[0].capacity
    assert free - less == 3 * GIB
    device = DeviceType.preset("A100-80GB")
    assert free == round((device.memory_gib - device.reserved_gib) * GIB)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"product_scale": 0.0}, "product_scale is 0"),
        ({"memory_scale": -1.0}, "memory_scale is -1"),
        ({"launch_us": -2.0}, "launch_us is -2"),
        ({"reserved_gib": -1.0}, "reserved_gib is -1"),
        ({"stall_us": -3.0}, "stall_us is -3"),
    ],
)
def test_impossible_constants_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Calibration(**wrong)


def test_more_memory_reserved_than_there_is_is_refused():
    device = DeviceType.preset("A100-80GB")
    with pytest.raises(ValueError, match=r"reserved_gib is 90.*80"):
        replace(device, reserved_gib=90.0)
