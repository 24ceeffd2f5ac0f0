"""Folded and unfolded task graphs, pins that split cells, and the flat graph of whole plans."""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.search.space import Options, operator_choices
from stratagem.search.strategies import data_parallel, replicated
from stratagem.simulator.block import NUM_RESOURCES, Block, Role
from stratagem.simulator.builder import GraphBuilder
from stratagem.simulator.cell_layouts import Cells
from stratagem.simulator.cells import CellBlock
from stratagem.simulator.cluster import Calibration, Cluster
from stratagem.simulator.costs import RooflineCosts
from stratagem.simulator.engine import simulate
from stratagem.simulator.flat import FlatGraph, flat_graph
from stratagem.simulator.graph import OperatorGraph, factor_sizes
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.models import bert, gpt, mlp, resnet
from stratagem.simulator.oracle import simulate_plain
from stratagem.simulator.pipeline import BACKWARD, FORWARD, LAST_BACKWARD, SEND, TIE
from stratagem.simulator.placement import (
    REPLICATE,
    Pin,
    Placements,
    Shard,
    input_placements,
    output_placements,
)
from stratagem.simulator.plan import Choice, Plan, Stage
from stratagem.simulator.plan_model import (
    PlanModel,
    StageModel,
    block_times,
    macro_durations,
    plan_model,
)
from stratagem.simulator.simulation import simulate_model, simulate_plan
from stratagem.simulator.spatial import split_images
from stratagem.simulator.training import Training
from stratagem.simulator.transfers import local_bounds

CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
COSTS = RooflineCosts()
BATCH = 240


def shared_linears() -> OperatorGraph:
    """Six linears with two weights between them: parameters tied in and between stages."""
    b = GraphBuilder("shared")
    x, labels = b.input("x", (BATCH, 64)), b.input("target", (BATCH,), "int64")
    weights = [b.parameter(name, (64, 64)) for name in ("one", "two")]
    for i, which in enumerate((0, 1, 0, 1, 1, 0)):
        x = b.pointwise("relu", b.linear(x, weights[which], name=f"linear.{i}"))
    return b.build(b.cross_entropy(x, labels))


MODELS: dict[str, Callable[[], OperatorGraph]] = {
    "gpt": lambda: gpt(
        num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=BATCH
    ),
    "bert": lambda: bert(
        num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=BATCH
    ),
    "shared": shared_linears,
    "mlp": lambda: mlp([64, 128, 96, 32], batch=BATCH),
    "resnet": lambda: resnet(18, batch=BATCH, image=32, classes=16),
    "split resnet": lambda: split_images(resnet(18, batch=BATCH, image=48, classes=16)),
}
SHAPES = {8: [(2, 2, 2), (2, 4), (4, 2), (8,)], 4: [(4,), (2, 2), (1, 4)], 2: [(2,), (2, 1)]}


@functools.cache
def model_graph(name: str) -> OperatorGraph:
    return MODELS[name]()


@functools.cache
def options(
    name: str, parts: int, i: int, shape: tuple[int, ...], plain: bool
) -> tuple[Choice, ...]:
    graph = model_graph(name).microbatch(parts)
    allowed = Options() if plain else Options(chunks=(1, 2), fuse=True)
    return operator_choices(graph, graph.operators[i], shape, (0, 1, 2, 3), allowed)


def mesh_of(shape: Sequence[int], first: int = 0) -> DeviceMesh:
    axes = tuple(MeshAxis(f"a{i}", n) for i, n in enumerate(shape))
    return DeviceMesh(axes, tuple(range(first, first + int(np.prod(shape)))))


def make_plan(graph: OperatorGraph, stages: Sequence[Stage], **more: object) -> Plan:
    fields = {
        "name": "test",
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "cluster": CLUSTER,
        "training": Training(),
        "stages": tuple(stages),
    } | more
    return Plan(**fields)  # type: ignore[arg-type]


def random_plan(
    name: str,
    rng: random.Random,
    *,
    pins: float = 0.0,
    blocking: bool = False,
    plain: bool = False,
) -> Plan:
    """Any cut into stages, any meshes, any choices; `pins` is how often an operator is pinned.

    A `plain` plan recomputes nothing, runs nothing in pieces and fuses nothing.
    """
    graph = model_graph(name)
    schedule = rng.choice(["gpipe", "1f1b", "zb-h1", "interleaved"])
    num_stages, parts = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 5, 6])
    if schedule == "interleaved":
        num_stages, parts = 4, rng.choice([2, 4, 6])
    num_ranks = 2 if schedule == "interleaved" else num_stages
    devices = {1: 8, 2: 4, 3: 2, 4: 2}[num_ranks]
    shapes = [rng.choice(SHAPES[devices]) for _ in range(num_ranks)]
    names = [op.name for op in graph.operators]
    cuts = sorted(rng.sample(range(1, len(names)), num_stages - 1))
    stages, again = [], not plain and rng.random() < 0.5
    for s, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, len(names)], strict=True)):
        shape = shapes[s % num_ranks]
        pinned = [axis for axis in range(len(shape)) if rng.random() < 0.6] if pins else []
        choices = {
            names[i]: pin(
                rng.choice(options(name, parts, i, shape, plain)),
                {a: rng.randrange(shape[a]) for a in pinned if rng.random() < pins},
                source=graph.operators[i].kind == "source",
                recompute=again and rng.random() < 0.5,
            )
            for i in range(lo, hi)
        }
        stages.append(Stage(tuple(names[lo:hi]), mesh_of(shape, s % num_ranks * devices), choices))
    return make_plan(
        graph,
        stages,
        num_microbatches=parts,
        schedule=schedule,
        bucket_bytes=rng.choice([0, 4096]),
        inputs_first=rng.random() < 0.3,
        cluster=replace(
            busy_cores(CLUSTER) if blocking else CLUSTER,
            compute_slowdown=rng.choice([0.0, 0.13]),
            calibration=Calibration(launch_us=rng.choice([0.0, 8.0, 40.0])),
        ),
    )


def pin(choice: Choice, where: dict[int, int], *, source: bool, recompute: bool) -> Choice:
    if source:
        return choice
    config = tuple(Pin(where[a]) if a in where else p for a, p in enumerate(choice.config))
    chunks = 1 if where else choice.chunks  # A pin may leave a size that has no such pieces.
    return replace(choice, config=config, recompute=recompute, chunks=chunks)


def busy_cores(cluster: Cluster) -> Cluster:
    return replace(
        cluster,
        intra_node=replace(cluster.intra_node, shares_compute=True, bandwidth_gb_s=1.0),
        inter_node=replace(cluster.inter_node, shares_compute=True),
    )


def unfolded(model: PlanModel) -> PlanModel:
    return model.split_along([range(len(stage.table.mesh.shape)) for stage in model.stages])


def coarse_cell(stage: StageModel, fine: StageModel, cell: int) -> int:
    """The cell of `stage` that a cell of `fine`, split along more axes, is part of."""
    where = [int(fine.cells.index(axis)[cell]) for axis in stage.split]
    return int(np.ravel_multi_index(where, stage.cells.ways)) if where else 0


def assert_same_times(stage: StageModel, fine: StageModel) -> None:
    """Every copy on the fine cells runs when the copy that it is part of does."""
    for kind, ours in stage.cell_blocks.items():
        theirs = fine.cell_blocks[kind]
        once, each = simulate(ours.graph), simulate(theirs.graph)
        assert once.makespan == each.makespan
        copy_at = {
            (int(task), int(cell)): copy
            for copy, task in enumerate(ours.task)
            for cell in ours.cells_of(copy)
        }
        seen = set()
        for copy, task in enumerate(theirs.task.tolist()):
            for cell in theirs.cells_of(copy).tolist():
                assert (task, cell) not in seen, "a cell is in two copies of a task"
                seen.add((task, cell))
                part_of = copy_at[task, coarse_cell(stage, fine, cell)]
                assert each.start[copy] == once.start[part_of]
                assert each.end[copy] == once.end[part_of]
        cells_of_task = defaultdict(set)
        for task, cell in seen:
            cells_of_task[task].add(coarse_cell(stage, fine, cell))
        assert {(t, c) for t, cells in cells_of_task.items() for c in cells} == copy_at.keys()


seeds = st.integers(0, 2**32)
models = st.sampled_from(sorted(MODELS))


@settings(max_examples=40, deadline=None)
@given(models, seeds)
def test_a_task_per_device_takes_the_same_time_as_one_for_all(name: str, seed: int) -> None:
    model = plan_model(random_plan(name, random.Random(seed)), model_graph(name), COSTS)
    for stage, fine in zip(model.stages, unfolded(model).stages, strict=True):
        assert stage.cells.count == 1
        assert fine.cells.count == stage.table.mesh.num_devices
        assert_same_times(stage, fine)


@settings(max_examples=20, deadline=None)
@given(models, seeds, st.sets(st.integers(0, 2)))
def test_cutting_along_some_axes_takes_the_same_time(name: str, seed: int, axes: set[int]) -> None:
    model = plan_model(random_plan(name, random.Random(seed)), model_graph(name), COSTS)
    some = [sorted(a for a in axes if a < len(s.table.mesh.shape)) for s in model.stages]
    for stage, fine in zip(model.split_along(some).stages, unfolded(model).stages, strict=True):
        assert_same_times(stage, fine)


@settings(max_examples=40, deadline=None)
@given(models, seeds, st.sampled_from([0.2, 0.5, 1.0]))
def test_pins_need_cells_along_their_own_axes_only(name: str, seed: int, pins: float) -> None:
    """Cells split along the pinned axes say the same as a task per device."""
    plan = random_plan(name, random.Random(seed), pins=pins)
    model = plan_model(plan, model_graph(name), COSTS)
    for stage, fine in zip(model.stages, unfolded(model).stages, strict=True):
        configs = [stage.table.row(i).choices[0].config for i in stage.table.operators]
        assert stage.split == tuple(
            axis
            for axis, ways in enumerate(stage.table.mesh.shape)
            if ways > 1 and any(isinstance(config[axis], Pin) for config in configs)
        )
        assert_same_times(stage, fine)


@settings(max_examples=20, deadline=None)
@given(models, seeds)
def test_every_copy_waits_for_all_that_it_reads(name: str, seed: int) -> None:
    graph = model_graph(name)
    model = plan_model(random_plan(name, random.Random(seed), pins=0.5), graph, COSTS)
    for stage in (*model.stages, *unfolded(model).stages):
        small, table = stage.table.graph, stage.table
        forward, last = (_Reads(stage.cell_blocks[k]) for k in (FORWARD, LAST_BACKWARD))
        for edge in table.edges:
            forward.check((Role.FORWARD, edge.consumer), (Role.FORWARD, edge.producer))
            if small.edge_needs_gradient(edge):
                last.check((Role.BACKWARD, edge.producer), (Role.BACKWARD, edge.consumer))
        for i in table.operators:
            if small.operators[i].weights:
                forward.check((Role.FORWARD, i), (Role.GATHER, i))
            last.check((Role.SYNC, i), (Role.BACKWARD, i))
            last.check((Role.UPDATE, i), (Role.SYNC, i))
            last.check((Role.PUBLISH, i), (Role.UPDATE, i))
        for k, (owner, user) in enumerate(table.ties):
            last.check((Role.TIE_GRADIENT, k), (Role.BACKWARD, user), busy=True)
            last.check((Role.UPDATE, owner), (Role.TIE_GRADIENT, k))
            last.check((Role.TIE_PUBLISH, k), (Role.UPDATE, owner), busy=True)


@settings(max_examples=20, deadline=None)
@given(models, seeds)
def test_nothing_takes_memory_before_its_cell_has_run_what_was_before(
    name: str, seed: int
) -> None:
    """A gather or a recomputation waits for the last of its cell's passes up to its release."""
    graph = model_graph(name)
    plan = random_plan(name, random.Random(seed), pins=0.5)
    passes = (Role.FORWARD, Role.BACKWARD)
    for stage in plan_model(plan, graph, COSTS).stages:
        for kind in (FORWARD, LAST_BACKWARD):
            block = stage.cell_blocks[kind]
            roles, before = block.block.roles, _Reads(block).before
            ran: dict[int, list[int]] = defaultdict(list)
            for copy, task in enumerate(block.task.tolist()):
                for cell in block.cells_of(copy).tolist() if roles[task] in passes else ():
                    ran[cell].append(task)
            released = releases(block.block, (Role.GATHER, Role.RECOMPUTE), passes)
            for copy, task in enumerate(block.task.tolist()):
                for cell in block.cells_of(copy).tolist() if task in released else ():
                    earlier = [p for p in ran[cell] if p <= released[task]]
                    assert set(earlier[-1:]) <= before[copy]


def releases(block: Block, what: tuple[Role, ...], by: tuple[Role, ...]) -> dict[int, int]:
    """The first of the tasks `by` that each task of `what` waits for in the folded block."""
    found: dict[int, int] = {}
    for task, role in enumerate(block.roles):
        if role in by:
            lo, hi = block.successor_offsets[task : task + 2]
            for after in block.successors[lo:hi].tolist():
                if block.roles[after] in what:
                    found.setdefault(after, task)
    return found


class _Reads:
    """What each copy of a block waits for, directly or through others."""

    def __init__(self, block: CellBlock) -> None:
        self.block = block
        self.before: list[set[int]] = [set() for _ in range(block.graph.num_tasks)]
        for copy, task in enumerate(block.task.tolist()):
            for after in successors(block, copy):
                assert after > copy
                self.before[after] |= self.before[copy] | {task}

    def tasks(self, role: Role, of: int) -> list[int]:
        block = self.block.block
        subject = block.subjects
        return [t for t, r in enumerate(block.roles) if r is role and subject[t] == of]

    def check(
        self, reads: tuple[Role, int], made: tuple[Role, int], *, busy: bool = False
    ) -> None:
        """The last of the pieces of `reads` waits for all of `made`, on all of its cells."""
        for copy in np.flatnonzero(self.block.task == self.tasks(*reads)[-1]).tolist():
            if not busy or self.block.graph.durations[copy]:
                assert set(self.tasks(*made)) <= self.before[copy], (reads, made)


def test_a_reader_in_pieces_waits_for_a_producer_on_another_cell() -> None:
    graph = mlp([64, 64, 64], batch=32)
    linears = [op.name for op in graph.operators if op.kind == "linear"]
    choices = dict(replicated(graph, (2,)))
    choices[linears[0]] = Choice((Pin(0),))
    choices[linears[1]] = Choice((Pin(1),), chunks=4)
    between = next(op.name for op in graph.operators if op.kind == "elementwise")
    choices[between] = Choice((Pin(0),))
    timeline = simulate_plan(one_stage(graph, (2,), choices), graph, COSTS).timeline
    rows = list(zip(timeline.names, timeline.start, timeline.end, strict=True))
    made = max(end for name, _, end in rows if name == f"{between} forward")
    moved = [start for name, start, _ in rows if name.startswith(f"{between} → {linears[1]}")]
    assert len(set(moved)) == 4
    assert min(moved) >= made


@settings(max_examples=15, deadline=None)
@given(models, seeds)
def test_conversions_join_the_devices_that_talk(name: str, seed: int) -> None:
    """Against the groups of the mesh, one collective after the other, device by device."""
    graph = model_graph(name)
    plan = random_plan(name, random.Random(seed), pins=0.5, plain=True)
    model = plan_model(plan, graph, COSTS)
    for stage in unfolded(model).stages:
        block, mesh = stage.cell_blocks[FORWARD], stage.table.mesh
        small = stage.table.graph
        for task, groups in copies(block, Role.CONVERT).items():
            edge = stage.table.edges[int(block.block.subjects[task])]
            producer, consumer = small.operators[edge.producer], small.operators[edge.consumer]
            made, read = producer.outputs[edge.output], consumer.inputs[edge.slot]
            ours, theirs = (
                stage.table.row(i).choices[0].config for i in (edge.producer, edge.consumer)
            )
            sizes = factor_sizes(made.layout, producer.sizes)
            expected = talking(
                stage,
                sizes,
                Training().bytes_of(made.dtype),
                output_placements(made, ours),
                input_placements(read, theirs),
            )
            first = mesh.devices[0]
            assert sorted(groups) == sorted([d - first for d in group] for group in expected)


def talking(
    stage: StageModel,
    sizes: tuple[int, ...],
    itemsize: int,
    state: Placements,
    target: Placements,
) -> list[list[int]]:
    """Devices that a conversion joins, directly or through others."""
    mesh, joined = stage.table.mesh, list[set[int]]()
    for step in stage.builder.resharder.path(sizes, itemsize, state, target):
        after = (*state[: step.axis], step.target, *state[step.axis + 1 :])
        for group in mesh.groups(step.axis) if step.collective.value != "slice" else ():
            members = {
                device
                for device in group
                if any(local_bounds(sizes, s, mesh, device) is not None for s in (state, after))
            }
            if members:
                apart = [each for each in joined if not each & members]
                joined = [*apart, members.union(*(each for each in joined if each & members))]
        state = after
    return [sorted(each) for each in joined]


@settings(max_examples=25, deadline=None)
@given(models, seeds, st.sampled_from([0.0, 0.5]))
def test_whole_plans_are_equal_on_every_lane(name: str, seed: int, pins: float) -> None:
    plan = random_plan(name, random.Random(seed), pins=pins)
    model = plan_model(plan, model_graph(name), COSTS)
    one, each = simulate_model(model), simulate_model(unfolded(model))
    assert one.step_time == each.step_time
    assert one.step_time == simulate_plan(plan, model_graph(name), COSTS).step_time
    if pins:
        return
    folded, lanes = rows_by_lane(one), rows_by_lane(each)
    for s, stage in enumerate(model.stages):
        for lane, rows in folded.items():
            group, _, what = lane.partition(" · ")
            if group == f"stage {s}" and not what.startswith(("to stage", "tied")):
                alike = [
                    r
                    for each, r in lanes.items()
                    if each.endswith(f" · {what}")
                    and each.partition(" · ")[0].partition(",")[0] == group
                ]
                assert len(alike) == stage.table.mesh.num_devices
                assert all(found == rows for found in alike)


def rows_by_lane(simulation: object) -> dict[str, list[tuple[str, int, int]]]:
    timeline = simulation.timeline  # type: ignore[attr-defined]
    rows: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for name, lane, start, end in zip(
        timeline.names, timeline.lane, timeline.start, timeline.end, strict=True
    ):
        rows[timeline.lanes[lane]].append((name, int(start), int(end)))
    return {lane: sorted(found) for lane, found in rows.items()}


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_the_engine_plays_cells_as_plain_python_does(seed: int) -> None:
    plan = random_plan("mlp", random.Random(seed), pins=0.4)
    for stage in unfolded(plan_model(plan, model_graph("mlp"), COSTS)).stages:
        for block in stage.cell_blocks.values():
            ours, truth = simulate(block.graph), simulate_plain(block.graph)
            assert (ours.start == truth.start).all()
            assert (ours.end == truth.end).all()


def one_stage(
    graph: OperatorGraph, shape: Sequence[int], choices: dict[str, Choice], **more: object
) -> Plan:
    names = tuple(op.name for op in graph.operators)
    return make_plan(graph, [Stage(names, mesh_of(shape), choices)], **more)


def stage_of(plan: Plan, graph: OperatorGraph) -> StageModel:
    return plan_model(plan, graph, COSTS).stages[0]


def test_one_cell_is_the_block_itself() -> None:
    """Through the copying as well: an axis of one device cuts nothing."""
    graph = model_graph("gpt")
    plan = one_stage(graph, (1, 8), data_parallel(graph, (1, 8), zero=3))
    model = plan_model(plan, graph, COSTS)
    split = model.split_along([(0,)]).stages[0].cell_blocks
    for kind, folded in model.stages[0].cell_blocks.items():
        cut = split[kind]
        assert cut.num_cells == 1
        for attribute in ("successor_offsets", "num_predecessors", "durations"):
            ours, theirs = (getattr(b.graph, attribute) for b in (folded, cut))
            assert (ours == theirs).all()
        for task in range(folded.graph.num_tasks):
            assert successors(folded, task) == successors(cut, task)
            assert resources(folded, task) == resources(cut, task)


def successors(block: CellBlock, copy: int) -> list[int]:
    lo, hi = block.graph.successor_offsets[copy : copy + 2]
    return sorted(block.graph.successors[lo:hi].tolist())


def resources(block: CellBlock, copy: int) -> list[int]:
    held = int(block.graph.resource_sets[copy])
    lo, hi = block.graph.set_offsets[held : held + 2]
    return sorted(block.graph.set_resources[lo:hi].tolist())


def copies(block: CellBlock, role: Role) -> dict[int, list[list[int]]]:
    """Per task of a role that has something to do the cells of each of its copies."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    for copy, task in enumerate(block.task.tolist()):
        if block.block.roles[task] is role and block.graph.durations[copy]:
            found[task].append(block.cells_of(copy).tolist())
    return found


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gradients_are_summed_by_the_groups_of_the_mesh(axis: int) -> None:
    """With samples sharded along one axis, the groups of its all-reduces are the mesh's own."""
    graph, shape = mlp([64, 64], batch=32), (2, 2, 2)
    wanted = data_parallel(graph, (2,))
    choices = {
        name: Choice(tuple(choice.config[0] if a == axis else REPLICATE for a in range(3)))
        for name, choice in wanted.items()
    }
    model = unfolded(plan_model(one_stage(graph, shape, choices), graph, COSTS))
    syncs = copies(model.stages[0].cell_blocks[LAST_BACKWARD], Role.SYNC)
    assert syncs
    expected = sorted(list(group) for group in mesh_of(shape).groups(axis))
    assert all(sorted(groups) == expected for groups in syncs.values())


@pytest.mark.parametrize(("kind", "dim"), [("batch_norm", "sample"), ("cross_entropy", "class")])
def test_sums_inside_an_operator_are_gangs(kind: str, dim: str) -> None:
    """Statistics over the samples and a loss over the vocabulary need all shards at once."""
    graph, shape = model_graph("resnet"), (2, 4)
    choices = replicated(graph, shape)
    names = [op.name for op in graph.operators if op.kind == kind]
    dims = {n: [d.name for d in graph.operator(n).dims] for n in names}
    assert all(dim in found for found in dims.values()), dims
    for name in names:
        choices[name] = Choice((REPLICATE, Shard(dim)))
    stage = unfolded(plan_model(one_stage(graph, shape, choices), graph, COSTS)).stages[0]
    together = sorted(list(group) for group in mesh_of(shape).groups(1))
    apart = [[device] for device in range(8)]
    block = stage.cell_blocks[FORWARD]
    for task, groups in copies(block, Role.FORWARD).items():
        name = graph.operators[int(block.block.subjects[task])].name
        assert sorted(groups) == (together if name in names else apart)


def test_a_send_holds_its_two_ends_and_no_other_cell() -> None:
    graph = mlp([64, 64, 64], batch=32)
    choices = replicated(graph, (4,))
    names = [op.name for op in graph.operators if op.kind != "source"]
    for name in names:
        choices[name] = Choice((Pin(1 if name == names[0] else 3),))
    forward = stage_of(one_stage(graph, (4,), choices), graph).cell_blocks[FORWARD]
    assert list(copies(forward, Role.CONVERT).values()) == [[[1, 3]]]
    assert copies(forward, Role.FORWARD)[forward.block.names.index(f"{names[0]} forward")] == [[1]]


def branches(depth: int, width: int, batch: int) -> OperatorGraph:
    """Two equal chains of linears over one input, added up."""
    b = GraphBuilder("branches")
    x, labels = b.input("x", (batch, width)), b.input("target", (batch,), "int64")
    ends = []
    for side in "ab":
        y = x
        for i in range(depth):
            weight = b.parameter(f"{side}.{i}.weight", (width, width))
            y = b.linear(y, weight, name=f"{side}.{i}")
        ends.append(y)
    return b.build(b.cross_entropy(b.pointwise("add", *ends), labels))


def test_branches_pinned_apart_run_at_the_same_time() -> None:
    """Half of the serial time of the chains, then both outputs are broadcast over the one link."""
    depth, graph = 4, branches(4, 1024, 512)
    plans = {}
    for where in ((0, 0), (0, 1)):
        choices = replicated(graph, (2,))
        for side, index in zip("ab", where, strict=True):
            for i in range(depth):
                choices[f"{side}.{i}"] = Choice((Pin(index),))
        plans[where] = one_stage(graph, (2,), choices)
    stage = stage_of(plans[0, 1], graph)
    row = {op.name: stage.table.row(i) for i, op in enumerate(graph.operators)}
    chain = sum(int(row[f"a.{i}"].forward.ns[0]) for i in range(depth))
    moved = {int(stage.table.edge_rows[r].forward.ns[0, 0]) for r in stage.table.edge_row_of} - {0}
    rest = sum(int(row[n].forward.ns[0]) for n in row if n[0] not in "ab" or "." not in n)
    assert len(moved) == 1
    apart, together = (block_times(stage_of(plans[w], graph))[FORWARD] for w in ((0, 1), (0, 0)))
    assert apart.makespan == chain + 2 * moved.pop() + rest
    assert together.makespan >= 2 * chain + rest
    backward = sum(int(row[f"a.{i}"].backward.ns[0]) for i in range(depth))
    steps = [simulate_plan(plans[w], graph, COSTS) for w in ((0, 1), (0, 0))]
    assert round((steps[1].step_time - steps[0].step_time) * 1e9) > 0.9 * (chain + backward)


def test_lanes_name_their_cells() -> None:
    graph = branches(1, 64, 32)
    choices = replicated(graph, (2, 2)) | {"a.0": Choice((REPLICATE, Pin(1)))}
    timeline = simulate_plan(one_stage(graph, (2, 2), choices), graph, COSTS).timeline
    assert "stage 0, a1 1 · compute" in timeline.lanes
    pinned = [
        timeline.lanes[lane]
        for name, lane in zip(timeline.names, timeline.lane, strict=True)
        if name == "a.0 forward"
    ]
    assert pinned == ["stage 0, a1 1 · compute"]
    plain = simulate_plan(one_stage(graph, (2, 2), replicated(graph, (2, 2))), graph, COSTS)
    assert plain.timeline.lanes == ("stage 0 · compute",)


def test_a_gather_waits_for_what_its_own_cell_runs() -> None:
    """ZeRO-3 gathers two ahead; a pass on another cell cannot release one, the one before does."""
    graph, depth = mlp([64] * 6, batch=32), 5
    choices = {
        name: Choice((REPLICATE, *choice.config), choice.zero)
        for name, choice in data_parallel(graph, (4,), zero=3).items()
    }
    linears = [op.name for op in graph.operators if op.kind == "linear"]
    assert len(linears) == depth
    away = linears[1]
    choices[away] = Choice((Pin(1), *choices[away].config[1:]), 3)
    for name in (linears[3], linears[0]):
        choices[name] = Choice((Pin(0), *choices[name].config[1:]), 3)
    block = stage_of(one_stage(graph, (2, 4), choices), graph).cell_blocks[FORWARD]
    copy = {
        (block.block.names[t], tuple(block.cells_of(c).tolist())): c
        for c, t in enumerate(block.task.tolist())
    }
    gather = copy[f"{linears[3]} gather", (0,)]
    names = [op.name for op in graph.operators]
    before = names[names.index(away) - 1]
    assert gather in successors(block, copy[f"{before} forward", (0,)])
    assert gather not in successors(block, copy[f"{away} forward", (1,)])


def test_axes_that_are_not_there_are_refused() -> None:
    for split in ((2,), (0, 0), (-1,)):
        with pytest.raises(ValueError, match="name each axis once, from 0 to 1"):
            Cells((2, 4), split)


def composed_times(model: PlanModel, flat: FlatGraph) -> tuple[list[int], list[int]]:
    """When two levels say that each task of the flat graph starts and ends."""
    macro = simulate(model.macro.with_durations(macro_durations(model)))
    start, end = [], []
    begun: set[int] = set()
    for task, within in zip(flat.macro_task.tolist(), flat.block_task.tolist(), strict=True):
        kind, stage = int(model.macro.kind[task]), int(model.macro.item[task])
        if within >= 0:
            times = model.block_times[stage][kind]
            start.append(int(macro.start[task] + times.start[within]))
            end.append(int(macro.start[task] + times.end[within]))
        elif kind >= SEND:
            start.append(int(macro.start[task]))
            end.append(int(macro.end[task]))
        else:
            both = macro.end if task in begun else macro.start
            start.append(int(both[task]))
            end.append(int(both[task]))
        begun.add(task)
    return start, end


@settings(max_examples=40, deadline=None)
@given(models, seeds, st.sampled_from([0.0, 0.4]), st.booleans())
def test_two_levels_are_the_flat_graph(name: str, seed: int, pins: float, blocking: bool) -> None:
    plan = random_plan(name, random.Random(seed), pins=pins, blocking=blocking)
    model = plan_model(plan, model_graph(name), COSTS)
    flat = flat_graph(model)
    times = simulate(flat.graph)
    assert times.makespan == round(simulate_model(model).step_time * 1e9)
    start, end = composed_times(model, flat)
    assert times.start.tolist() == start
    assert times.end.tolist() == end


def test_the_flat_graph_of_a_tied_pipeline_has_its_ties_and_all_tasks() -> None:
    graph, parts = model_graph("gpt"), 3
    names = [op.name for op in graph.operators]
    stages = [
        Stage(part, mesh_of((2,), 2 * s), {n: replicated(graph, (2,))[n] for n in part})
        for s, part in enumerate((tuple(names[:8]), tuple(names[8:])))
    ]
    model = plan_model(make_plan(graph, stages, num_microbatches=parts), graph, COSTS)
    assert (model.macro.kind == TIE).any()
    flat = flat_graph(model)
    tasks = sum(
        (block.graph.num_tasks + 2) * {FORWARD: parts, BACKWARD: parts - 1, LAST_BACKWARD: 1}[kind]
        for stage in model.stages
        for kind, block in stage.cell_blocks.items()
    )
    transfers = int((model.macro.kind >= SEND).sum())
    assert flat.graph.num_tasks == tasks + transfers
    assert flat.graph.num_resources == 2 * NUM_RESOURCES + 2 * len(model.macro.pairs)


def test_ties_of_one_stage_go_one_after_the_other() -> None:
    """Two parameters of the last stage are owned by two others: both ties hold the last stage."""
    graph = model_graph("shared")
    names = tuple(op.name for op in graph.operators)
    first, second = (next(i for i, n in enumerate(names) if n == f"linear.{k}") for k in (1, 2))
    stages = [
        Stage(part, mesh_of((2,), 2 * s), {n: replicated(graph, (2,))[n] for n in part})
        for s, part in enumerate((names[:first], names[first:second], names[second:]))
    ]
    model = plan_model(make_plan(graph, stages), graph, COSTS)
    flat = flat_graph(model)
    times = simulate(flat.graph)
    ties = [
        (int(times.start[t]), int(times.end[t]))
        for t, task in enumerate(flat.macro_task.tolist())
        if model.macro.kind[task] == TIE
    ]
    assert len(ties) >= 2
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(ties)))
    start, end = composed_times(model, flat)
    assert (times.start.tolist(), times.end.tolist()) == (start, end)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("last", [3, 4, 5])
def test_ties_wait_between_the_blocks_of_a_rank_that_has_two_stages(parts: int, last: int) -> None:
    """The later stage of a rank is done, and tied, while its earlier one still works."""
    graph = model_graph("shared")
    names = tuple(op.name for op in graph.operators)
    cuts = [0, *(names.index(f"linear.{k}") for k in (1, 2, last)), len(names)]
    choices = data_parallel(graph, (2,))
    stages = [
        Stage(names[lo:hi], mesh_of((2,), 2 * (s % 2)), {n: choices[n] for n in names[lo:hi]})
        for s, (lo, hi) in enumerate(itertools.pairwise(cuts))
    ]
    plan = make_plan(graph, stages, num_microbatches=parts, schedule="interleaved")
    model = plan_model(plan, graph, COSTS)
    assert (model.macro.kind == TIE).any()
    flat = flat_graph(model)
    times = simulate(flat.graph)
    assert (times.start.tolist(), times.end.tolist()) == composed_times(model, flat)


def test_equal_stages_are_played_once_and_others_are_not() -> None:
    graph = mlp([64] * 9, batch=32)
    names = [op.name for op in graph.operators if op.kind != "source"]
    sources = tuple(op.name for op in graph.operators if op.kind == "source")
    parts = [(*sources, *names[:4]), tuple(names[4:8]), tuple(names[8:12]), tuple(names[12:])]
    choices = data_parallel(graph, (2,))
    stages = [
        Stage(part, mesh_of((2,), 2 * s), {n: choices[n] for n in part})
        for s, part in enumerate(parts)
    ]
    model = plan_model(make_plan(graph, stages), graph, COSTS)
    times = model.block_times
    assert times[1] is times[2]
    assert times[1] is not times[3]
    for stage, found in zip(model.stages, times, strict=True):
        for ours, fresh in zip(found.values(), block_times(stage).values(), strict=True):
            assert (ours.end == fresh.end).all()
