"""dnn-partitioning inputs: files, the objective by hand, solvers against trying all splits."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.inception import inception_input
from stratagem.searcher.planners import (
    PartitionInput,
    PlannedStage,
    device_loads,
    read_partition_input,
    read_split,
    solve_max_load,
    solve_scattered,
    write_partition_input,
    write_split,
)
from stratagem.searcher.planners.inputs.blocks import colour_blocks
from stratagem.searcher.planners.inputs.dnn_partitioning import PartitionEdge, PartitionNode
from stratagem.searcher.planners.solvers.max_load import max_load
from tests.support.examples import examples

SMALL = """{"maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": [
{"id": 1, "fpgaLatency": 2, "cpuLatency": 20, "supportedOnFpga": 1, "isBackwardNode": 0,
 "size": 5.0, "colorClass": 0},
{"id": 7, "fpgaLatency": 3, "cpuLatency": 30, "supportedOnFpga": true, "isBackwardNode": false},
{"id": 3, "fpgaLatency": 4, "cpuLatency": 1, "supportedOnFpga": 0, "isBackwardNode": 0}],
"edges": [{"sourceId": 1, "destId": 7, "cost": 0.5, "size": 12},
          {"sourceId": 1, "destId": 3, "cost": 0.5}, {"sourceId": 7, "destId": 3, "cost": 0.25}]}
"""


def published(name: str) -> Path:
    """An input of the planner itself, where there is one."""
    folder = os.environ.get("STRATAGEM_DATA")
    if folder is None:
        pytest.skip("STRATAGEM_DATA names no folder with planners/dnn-partitioning")
    path = Path(folder) / "planners" / "dnn-partitioning" / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(SMALL)
    return path


@st.composite
def inputs(draw: st.DrawFn) -> PartitionInput:
    """A small graph, in training with colours, orphaned backward nodes and tight memory."""
    count = draw(st.integers(1, 5))
    latency = st.integers(0, 5)
    training = draw(st.booleans())
    nodes, edges = [], []
    cost = [draw(st.integers(0, 3)) / 4 for _ in range(2 * count + 1)]
    for v in range(count):
        colour = draw(st.sampled_from([None, v, v, 0]))
        supported = draw(st.sampled_from([True, True, True, False]))
        work = draw(latency)
        nodes.append(PartitionNode(v, work, draw(latency) + work, supported, False, 1.0, colour))
        edges += [PartitionEdge(u, v, cost[u]) for u in range(v) if draw(st.booleans())]
        if training and draw(st.booleans()):
            nodes.append(PartitionNode(v + count, work, 9.0, True, True, 1.0, colour))
    present = {node.id for node in nodes}
    edges += [
        PartitionEdge(e.dest_id + count, e.source_id + count, cost[e.dest_id + count])
        for e in edges
        if {e.dest_id + count, e.source_id + count} <= present
    ]
    memory = draw(st.sampled_from([100.0, 100.0, 3.0]))
    return PartitionInput(
        "drawn",
        tuple(nodes),
        tuple(edges),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 1)),
        memory,
    )


def feasible(graph: PartitionInput, stages: list[PlannedStage]) -> bool:
    node_of = {node.id: node for node in graph.nodes}
    for stage in stages:
        if stage.device == "cpu":
            continue
        nodes = [node_of[int(node)] for node in stage.nodes]
        if sum(node.size for node in nodes) > graph.memory_bytes:
            return False
        if not all(node.supported_on_fpga for node in nodes):
            return False
    return True


def all_splits(graph: PartitionInput, num_devices: int) -> Iterator[list[PlannedStage]]:
    """Every way to put blocks of one colour on devices, the last ones CPU cores."""
    groups = colour_blocks(graph).nodes
    for place in itertools.product(range(num_devices), repeat=len(groups)):
        stages = []
        for device in range(num_devices):
            nodes = tuple(n for g, p in zip(groups, place, strict=True) if p == device for n in g)
            kind = "cpu" if device >= graph.num_accelerators else "accelerator"
            if nodes:
                stages.append(PlannedStage(nodes, device=kind))
        if feasible(graph, stages):
            yield stages


def in_an_order(graph: PartitionInput, stages: list[PlannedStage]) -> bool:
    """Whether devices can be put in an order in which nothing is sent back.

    Edges between forward nodes count, and of colours without forward nodes those of backward
    nodes turned round. Colours of one cycle count as one, so whoever splits it is refused.
    """
    place = {node: number for number, stage in enumerate(stages) for node in stage.nodes}
    backward = {node.id for node in graph.nodes if node.is_backward_node}
    colour = {
        n.id: ("c", n.color_class) if n.color_class is not None else n.id for n in graph.nodes
    }
    forward_colours = {colour[node.id] for node in graph.nodes if node.id not in backward}
    order = set()
    for edge in graph.edges:
        tail, head = edge.source_id, edge.dest_id
        if tail in backward:
            if {colour[tail], colour[head]} <= forward_colours:
                continue
            tail, head = head, tail
        elif head in backward:
            continue
        order.add((place[tail], place[head]))
    return any(
        all(rank[a] <= rank[b] for a, b in order)
        for rank in itertools.permutations(range(len(stages)))
    )


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(inputs())
def test_contiguous_splits_equal_trying_all(graph: PartitionInput) -> None:
    devices = graph.num_accelerators + graph.num_cpus
    loads = [
        max_load(graph, stages)
        for stages in all_splits(graph, devices)
        if in_an_order(graph, stages)
    ]
    if not loads:
        with pytest.raises(ValueError, match=r"no contiguous split fits: .*GB"):
            solve_max_load(graph)
        return
    result = solve_max_load(graph)
    assert result.value == pytest.approx(result.recurrence, rel=1e-12)
    assert feasible(graph, list(result.stages))
    assert in_an_order(graph, list(result.stages))
    assert result.bound <= min(loads) + 1e-12
    if result.exact:
        assert result.value == pytest.approx(min(loads), rel=1e-12)
    assert result.value >= min(loads) - 1e-12


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(inputs())
def test_scattered_splits_are_bounded_and_proved_ones_best(graph: PartitionInput) -> None:
    loads = [
        max_load(graph, stages)
        for stages in all_splits(graph, graph.num_accelerators + graph.num_cpus)
    ]
    try:
        result = solve_scattered(graph, num_moves=2_000, rounds=2, proof_seconds=2.0)
    except ValueError:
        return
    assert feasible(graph, list(result.stages))
    assert result.bound <= min(loads) * (1 + 1e-6) + 1e-9
    assert result.value <= solve_max_load(graph).value + 1e-12
    assert result.value == pytest.approx(min(loads), rel=1e-6, abs=1e-9)
    assert result.exact


def test_loads_by_hand(small: Path) -> None:
    graph = read_partition_input(small)
    # The output of node 1 is fetched by both other devices but sent once; the CPU pays nothing.
    stages = [PlannedStage((1,)), PlannedStage((7,)), PlannedStage((3,), device="cpu")]
    assert device_loads(graph, stages) == [2 + 0.5, 3 + 0.5 + 0.25, 1]
    assert max_load(graph, stages) == 3.75
    assert solve_max_load(graph).value == 3.75


def test_corrected_units_are_named_in_the_result(small: Path) -> None:
    graph = read_partition_input(small, corrected=True)
    assert graph.output_costs() == {1: 500.0, 7: 250.0}
    result = solve_max_load(small, corrected=True)
    assert "edge costs × 1000" in result.input
    assert "edge costs × 1000" in str(result)


def test_inputs_and_splits_round_trip(small: Path, tmp_path: Path) -> None:
    graph = read_partition_input(small)
    write_partition_input(graph, tmp_path / "again" / "small.json")
    assert read_partition_input(tmp_path / "again" / "small.json") == graph
    result = solve_max_load(graph)
    write_split(result.stages, tmp_path / "split.json")
    assert max_load(graph, read_split(tmp_path / "split.json", graph)) == result.value


def test_backward_nodes_follow_their_colour_in_a_split(tmp_path: Path) -> None:
    nodes = (
        PartitionNode(0, 1.0, 1.0, True, False, color_class=0),
        PartitionNode(1, 2.0, 2.0, True, False, color_class=5),
        PartitionNode(2, 4.0, 4.0, True, True, color_class=0),
    )
    graph = PartitionInput("coloured", nodes, (), 2, 0, 1.0)
    (tmp_path / "split.json").write_text('{"fpgas": [{"nodes": [0]}, {"nodes": [1]}], "cpus": []}')
    stages = read_split(tmp_path / "split.json", graph)
    assert [stage.nodes for stage in stages] == [(0, 2), (1,)]
    assert max_load(graph, stages) == 5.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"id": 7', '"id": 1', "two nodes have the id 1; make ids unique"),
        ('"destId": 7', '"destId": 9', "edge 1 → 9 names node 9, which is not in `nodes`"),
        ('"destId": 3, "cost": 0.5', '"destId": 3, "cost": 2', "node 1 cost 0.5 and 2.0"),
        ('"fpgaLatency": 2', '"fpgaLatency": -2', "node 1 has -2"),
        ('"maxFPGAs": 2', '"maxFPGAs": 0', "0 accelerators"),
        ('"fpgaLatency": 2', '"fpgaLatency": "2"', r"fpgaLatency"),
        ('"isBackwardNode": 0,\n', '"isBackwardNode": 1,\n', "from a backward node to a forward"),
        ('"maxFPGAs": 2,', "", "maxFPGAs"),
    ],
)
def test_broken_inputs_name_file_and_field(small: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    small.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        read_partition_input(small)
    assert str(small) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fpgas": [{"nodes": [1, 99]}], "cpus": []}', "node 99 of device 0 is not among the 3"),
        ('{"fpgas": [{"nodes": [1]}, {"nodes": [1]}], "cpus": []}', "on devices 0 and 1"),
        ('{"fpgas": [{"nodes": [1]}], "cpus": []}', "node 7 is on no device"),
        ('{"fpgas": 3, "cpus": []}', "fpgas"),
    ],
)
def test_broken_splits_name_file_and_node(small: Path, text: str, message: str) -> None:
    split = small.parent / "split.json"
    split.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_split(split, read_partition_input(small))
    assert str(split) in str(caught.value)


def test_splits_that_are_not_allowed_are_refused(small: Path) -> None:
    graph = read_partition_input(small)
    with pytest.raises(ValueError, match="node 3 is on no device"):
        max_load(graph, [PlannedStage((1, 7))])
    with pytest.raises(ValueError, match="uses 3 devices of kind accelerator, there are 2"):
        max_load(graph, [PlannedStage((n,)) for n in (1, 7, 3)])


def test_too_many_down_sets_leave_linear_orders_and_say_so() -> None:
    wide = PartitionInput(
        "wide",
        tuple(PartitionNode(v, 1.0 + v, 99.0, True, False) for v in range(12)),
        tuple(PartitionEdge(0, v, 1.0) for v in range(1, 12)),
        3,
        0,
        1.0,
    )
    result = solve_max_load(wide, limit=50)
    assert not result.exact
    assert "more than 50 down-sets" in result.notes[0]
    assert result.bound <= solve_max_load(wide).value <= result.value


@pytest.mark.slow
def test_a_graph_like_inception_is_solved_and_linear_orders_are_no_better() -> None:
    graph = inception_input(training=True)
    result = solve_max_load(graph)
    assert "35,684 down-sets of 314 blocks" in result.notes[0]
    assert result.exact
    assert result.value <= solve_max_load(graph, limit=1_000).value
    assert result.value == pytest.approx(result.recurrence, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "expert", "optimum", "by_hand"),
    [
        ("bert24_inference", "bert24_inference", 17.7899, 20.08),
        ("bert24_training", "bert24_training", 41.7458, 49.40),
        ("resnet50_inference", "resnet50_inference", 33.7747, 43.92),
        ("resnet50_training", "resnet50_inference", 78.6318, 112.11),
    ],
)
def test_published_values_of_layer_graphs(
    name: str, expert: str, optimum: float, by_hand: float
) -> None:
    graph = read_partition_input(published(f"LayerGraphs/{name}.json"))
    result = solve_max_load(graph)
    assert result.exact
    assert round(result.value, 4) == optimum
    split = read_split(published(f"human-experts/{expert}_expert.json"), graph)
    assert round(max_load(graph, split), 2) == by_hand


@pytest.mark.parametrize(
    ("name", "optimum"), [("bert_l-3_inference", 27.918568), ("bert_l-3_training", 65.3031)]
)
def test_published_values_of_operator_graphs(name: str, optimum: float) -> None:
    result = solve_max_load(published(f"OperatorGraphs/{name}.json"))
    assert result.exact
    assert math.isclose(result.value, optimum, rel_tol=1e-6)
