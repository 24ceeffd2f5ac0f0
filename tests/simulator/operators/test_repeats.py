"""What is extrapolated from a few layers is what writing all of them gives, array by array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.methods.literature.shortened_models import shortened
from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.searcher.space.strategies import with_recompute
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import gpt, llama, mlp, moe, nmt
from stratagem.simulator.graph.models.layers import linear
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.repeats import Repeat, repeats
from stratagem.simulator.pricing import repeated_layers
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.pricing.repeated_layers import LEAST, extrapolated, sparing_repeat
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.stage.shared_conversions import Sharing
from stratagem.simulator.stage.stage_blocks import Block, StageBlocks
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes, stage_lifetimes
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
LAUNCHING = replace(
    CLUSTER, calibration=replace(CLUSTER.calibration, launch_us=5.0, stall_us=20.0)
)
MESH = DeviceMesh((MeshAxis("data", 2), MeshAxis("tensor", 2)), (0, 1, 2, 3))


def reaching(num_layers: int, back: int) -> OperatorGraph:
    """Layers that add what one `back` layers before them made."""
    b = GraphBuilder("reaching")
    made = [b.input("x", (16, 64))]
    labels = b.input("target", (16,), "int64")
    for i in range(num_layers):
        x = b.pointwise("relu", linear(b, f"layers.{i}", made[-1], 64))
        made.append(b.pointwise("add", x, made[max(0, i - back)]))
    return b.build(b.cross_entropy(made[-1], labels))


MODELS: dict[str, Callable[[int], OperatorGraph]] = {
    "gpt": lambda n: gpt(num_layers=n, hidden=64, num_heads=4, sequence=16, batch=8),
    "gpt unfused": lambda n: gpt(
        num_layers=n, hidden=64, num_heads=4, sequence=16, batch=8, attention="unfused"
    ),
    "llama": lambda n: llama(num_layers=n, hidden=64, num_heads=4, sequence=16, batch=8),
    "moe": lambda n: moe(num_layers=n, hidden=64, experts=4, sequence=16, batch=8),
    "mlp": lambda n: mlp([64] * (n + 1), batch=16),
    "an odd layer": lambda n: mlp([64] * n + [32] + [64] * (n + 2), batch=16),
    "skips": lambda n: reaching(2 * n, 0),
    "long skips": lambda n: reaching(3 * n, 5),
    "nmt": lambda n: nmt(num_layers=1, sequence=n, hidden=32, vocabulary=64, batch=8),
}


@lru_cache
def graph_of(name: str, layers: int) -> OperatorGraph:
    return MODELS[name](layers)


@lru_cache
def table_of(
    name: str,
    layers: int,
    cut: str,
    options: Options,
    which: str,
    launches: bool = False,
    policy: str = "none",
) -> CostTable:
    """The table of a stage, all operators or cut amid a layer: every choice, or one alone."""
    graph = graph_of(name, layers)
    size = len(graph.operators)
    inside = range(size // 7 if cut == "end" else 0, size - size // 9 if cut == "begin" else size)
    again = {name for name, c in _recomputed(graph, policy).items() if c.recompute}
    choices: dict[int, tuple[Choice, ...]] = {}
    for i in range(len(graph.operators)):
        operator = graph.operators[i]
        listed = operator_choices(
            graph, operator, MESH.shape, (0, 3), options, recompute=operator.name in again
        )
        # Equal operators have equal lists, as in a search.
        choices[i] = listed if which == "all" else listed[-1:]
    cluster = LAUNCHING if launches else CLUSTER
    builder = TableBuilder(graph, MESH, cluster, Training(), default_costs(), stalls=launches)
    return builder.build(inside, choices)


def _recomputed(graph: OperatorGraph, policy: str) -> dict[str, Choice]:
    plain = {
        op.name: operator_choices(graph, op, MESH.shape, (0,), Options())[0]
        for op in graph.operators
    }
    return dict(with_recompute(graph, plain, policy))


def all_written() -> object:
    """Within it nothing is extrapolated."""
    return patch.object(repeated_layers, "LEAST", 10**9)


KINDS = st.lists(st.integers(0, 3), max_size=4)


@given(st.lists(st.integers(0, 2), max_size=60), KINDS)
def test_what_repeats_is_a_run_of_equal_copies(around: list[int], layer: list[int]) -> None:
    half = len(around) // 2
    layer = [*layer, 9]
    kinds = around[:half] + layer * 11 + around[half:]
    found = sparing_repeat(kinds)
    assert found is not None
    assert found.count >= LEAST
    copy = kinds[found.start : found.start + found.length]
    assert kinds[found.start : found.stop] == copy * found.count
    assert found.length * found.count >= len(layer) * 10


def runs_by_trying_all(kinds: list[int], shortest: int, fewest: int) -> list[Repeat]:
    found, start = [], 0
    while start < len(kinds):
        tried = [
            Repeat(start, length, count)
            for length in range(shortest, len(kinds) + 1)
            for count in range(fewest, len(kinds) // length + 1)
            if kinds[start : start + length * count] == kinds[start : start + length] * count
        ]
        if not tried:
            start += 1
            continue
        best = max(tried, key=lambda repeat: (repeat.length * repeat.count, -repeat.length))
        found.append(best)
        start = best.stop
    return found


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 3), st.integers(2, 4))
def test_runs_of_equal_sequences_are_those_of_trying_all(
    kinds: list[int], shortest: int, fewest: int
) -> None:
    found = list(repeats(kinds, shortest=shortest, fewest=fewest))
    assert found == runs_by_trying_all(kinds, shortest, fewest)


@given(st.data(), st.integers(1, 3), st.integers(2, 4))
def test_copies_read_alike(data: st.DataObject, shortest: int, fewest: int) -> None:
    kinds = [0, *data.draw(st.lists(st.integers(0, 2), max_size=20))]
    # Few places are read, so that copies come to read the same, or equally far.
    reads = [
        [data.draw(st.sampled_from([i - 1, i // 2, 0]))] if kind else []
        for i, kind in enumerate(kinds)
    ]

    def are_alike(start: int, length: int, count: int) -> bool:
        for i in range(start, start + length):
            places = range(i, i + length * count, length)
            if len({kinds[p] for p in places}) > 1:
                return False
            far = {p - reads[p][0] for p in places if reads[p]}
            same = {reads[p][0] for p in places if reads[p]}
            if len(far) > 1 and (len(same) > 1 or min(same) >= start):
                return False
        return True

    found, start = list[Repeat](), 0
    while start < len(kinds):
        tried = [
            Repeat(start, length, count)
            for length in range(shortest, len(kinds) + 1)
            for count in range(fewest, (len(kinds) - start) // length + 1)
            if are_alike(start, length, count)
        ]
        if tried:
            found.append(max(tried, key=lambda run: (run.length * run.count, -run.length)))
        start = found[-1].stop if tried else start + 1
    assert list(repeats(kinds, reads=reads, shortest=shortest, fewest=fewest)) == found


def test_layers_that_read_the_same_before_them_are_repeated() -> None:
    """What T5's encoder made all layers of its decoder read, each farther back: none was a copy of
    another, and 784 operators were priced wherever 144 stand for them."""
    b = GraphBuilder("decoder")
    memory = b.pointwise("tanh", linear(b, "encoder", b.input("x", (16, 64)), 64))
    labels = b.input("target", (16,), "int64")
    x = b.pointwise("sigmoid", linear(b, "first", memory, 64))
    for i in range(5):
        x = b.pointwise("add", b.pointwise("relu", linear(b, f"layers.{i}", x, 64)), memory)
    graph = b.build(b.cross_entropy(x, labels))
    (block,) = repeated_blocks(graph)
    assert graph.names[block.start] == "layers.0"
    assert block.count == 5
    short = shortened(graph).graph
    assert len(short.operators) == len(graph.operators) - 2 * block.length
    read = [operator.inputs[-1].source for operator in short.operators if len(operator.inputs) > 1]
    assert len(set(read[:3])) == 1, "all layers that are left read what the encoder made"


def test_layers_are_found_and_those_that_reach_far_are_not() -> None:
    def repeat(name: str, layers: int) -> Repeat | None:
        return table_of(name, layers, "nowhere", Options(), "all").repeat

    assert repeat("gpt", 12) == Repeat(start=12, length=10, count=11)
    assert repeat("moe", 24) is not None
    assert repeat("skips", 10) is not None
    assert repeat("long skips", 10) is None


def test_layers_that_do_not_differ_alike_are_all_written() -> None:
    assert extrapolated(np.array([[1, 2, 4]]), 3) is None


def assert_equal_arrays(one: object, other: object) -> None:
    assert type(one) is type(other)
    for each in fields(one):  # type: ignore[arg-type]
        ours, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(ours, (Block, Sharing)):
            assert_equal_arrays(ours, theirs)
        elif isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, err_msg=each.name)
        else:
            assert ours == theirs, each.name


def built(table: CostTable, **settings: object) -> tuple[StageBlocks, Lifetimes]:
    split = bool(settings.get("split"))
    versions = 2 if settings.get("stashes") else None
    return (
        stage_blocks(table, **settings),  # type: ignore[arg-type]
        stage_lifetimes(table, {}, split=split, num_versions=versions),
    )


@settings(max_examples=examples(60))
@given(st.data())
def test_extrapolated_layers_are_the_written_ones(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(MODELS)))
    layers = data.draw(st.sampled_from([10, 13]))
    cut = data.draw(st.sampled_from(["nowhere", "begin", "end"]))
    chunks = data.draw(st.sampled_from([(1,), (1, 2)]))
    policy = data.draw(st.sampled_from(["none", "selective", "full"]))
    options = Options(
        chunks=chunks,
        stream=len(chunks) > 1 and data.draw(st.booleans()),
        regather=data.draw(st.booleans()),
    )
    which = data.draw(st.sampled_from(["all", "one"]))
    settings = {
        "split": data.draw(st.booleans()),
        "options": StepOptions(
            bucket_bytes=data.draw(st.sampled_from([0, 100_000])),
            inputs_first=data.draw(st.booleans()),
        ),
        "stashes": data.draw(st.booleans()),
    }
    settings["split"] = settings["split"] and not settings["stashes"]
    table = table_of(name, layers, cut, options, which, data.draw(st.booleans()), policy)
    found = built(replace(table), **settings)
    with all_written():
        written = built(replace(table), **settings)
    for one, other in zip(found, written, strict=True):
        assert_equal_arrays(one, other)
