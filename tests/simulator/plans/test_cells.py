"""Folded and unfolded task graphs, pins that split cells, and the flat graph of whole plans."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.space.strategies import data_parallel, replicated
from stratagem.simulator.cells.cell_layouts import Cells
from stratagem.simulator.cells.device_cells import CellBlock
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.reference_engines import simulate_plain
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Pin,
    Placements,
    Shard,
    input_placements,
    output_placements,
)
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import factor_sizes
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.work_kinds import FORWARD, LAST_BACKWARD
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.tensor_parts import part_of
from stratagem.simulator.simulation.priced_plan import StageModel, block_times, plan_model
from stratagem.simulator.simulation.simulation import simulate_model, simulate_plan
from stratagem.simulator.stage.stage_blocks import Block, TaskRole
from tests.support.cell_plans import (
    COSTS,
    assert_same_times,
    make_plan,
    mesh_of,
    model_graph,
    models,
    random_plan,
    seeds,
    unfolded,
)
from tests.support.examples import examples


@settings(max_examples=examples(40))
@given(models, seeds)
def test_a_task_per_device_takes_the_same_time_as_one_for_all(name: str, seed: int) -> None:
    model = plan_model(random_plan(name, random.Random(seed)), model_graph(name), COSTS)
    for stage, fine in zip(model.stages, unfolded(model).stages, strict=True):
        assert stage.cells.count == 1
        assert fine.cells.count == stage.table.mesh.num_devices
        assert_same_times(stage, fine)


@pytest.mark.slow
@settings(max_examples=examples(20, few=4))
@given(models, seeds, st.sets(st.integers(0, 2)))
def test_cutting_along_some_axes_takes_the_same_time(name: str, seed: int, axes: set[int]) -> None:
    model = plan_model(random_plan(name, random.Random(seed)), model_graph(name), COSTS)
    some = [sorted(a for a in axes if a < len(s.table.mesh.shape)) for s in model.stages]
    for stage, fine in zip(model.split_along(some).stages, unfolded(model).stages, strict=True):
        assert_same_times(stage, fine)


@pytest.mark.slow
@settings(max_examples=examples(40))
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


@settings(max_examples=examples(20, few=4))
@given(models, seeds)
def test_every_copy_waits_for_all_that_it_reads(name: str, seed: int) -> None:
    graph = model_graph(name)
    model = plan_model(random_plan(name, random.Random(seed), pins=0.5), graph, COSTS)
    for stage in (*model.stages, *unfolded(model).stages):
        small, table = stage.table.graph, stage.table
        forward, last = (_Reads(stage.cell_blocks[k]) for k in (FORWARD, LAST_BACKWARD))
        for edge in table.edges:
            forward.check((TaskRole.FORWARD, edge.consumer), (TaskRole.FORWARD, edge.producer))
            if small.edge_needs_gradient(edge):
                last.check((TaskRole.BACKWARD, edge.producer), (TaskRole.BACKWARD, edge.consumer))
        for i in table.operators:
            if small.operators[i].weights:
                forward.check((TaskRole.FORWARD, i), (TaskRole.GATHER, i))
            last.check((TaskRole.SYNC, i), (TaskRole.BACKWARD, i))
            last.check((TaskRole.UPDATE, i), (TaskRole.SYNC, i))
            last.check((TaskRole.PUBLISH, i), (TaskRole.UPDATE, i))
        for k, (owner, user) in enumerate(table.ties):
            forward.check((TaskRole.FORWARD, user), (TaskRole.TIE_GATHER, k), busy=True)
            last.check((TaskRole.BACKWARD, user), (TaskRole.TIE_GATHER, k), busy=True)
            last.check((TaskRole.TIE_GRADIENT, k), (TaskRole.BACKWARD, user), busy=True)
            last.check((TaskRole.UPDATE, owner), (TaskRole.TIE_GRADIENT, k))
            last.check((TaskRole.TIE_PUBLISH, k), (TaskRole.UPDATE, owner), busy=True)


@settings(max_examples=examples(20, few=4))
@given(models, seeds)
def test_nothing_takes_memory_before_its_cell_has_run_what_was_before(
    name: str, seed: int
) -> None:
    """A gather or a recomputation waits for the last of its cell's passes up to its release."""
    graph = model_graph(name)
    plan = random_plan(name, random.Random(seed), pins=0.5)
    passes = (TaskRole.FORWARD, TaskRole.BACKWARD)
    for stage in plan_model(plan, graph, COSTS).stages:
        for kind in (FORWARD, LAST_BACKWARD):
            block = stage.cell_blocks[kind]
            roles, before = block.block.roles, _Reads(block).before
            ran: dict[int, list[int]] = defaultdict(list)
            for copy, task in enumerate(block.task.tolist()):
                for cell in block.cells_of(copy).tolist() if roles[task] in passes else ():
                    ran[cell].append(task)
            released = releases(
                block.block, (TaskRole.GATHER, TaskRole.TIE_GATHER, TaskRole.RECOMPUTE), passes
            )
            for copy, task in enumerate(block.task.tolist()):
                for cell in block.cells_of(copy).tolist() if task in released else ():
                    earlier = [p for p in ran[cell] if p <= released[task]]
                    assert set(earlier[-1:]) <= before[copy]


def releases(block: Block, what: tuple[TaskRole, ...], by: tuple[TaskRole, ...]) -> dict[int, int]:
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

    def tasks(self, role: TaskRole, of: int) -> list[int]:
        block = self.block.block
        subject = block.subjects
        return [t for t, r in enumerate(block.roles) if r is role and subject[t] == of]

    def check(
        self, reads: tuple[TaskRole, int], made: tuple[TaskRole, int], *, busy: bool = False
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


@settings(max_examples=examples(15, few=4))
@given(models, seeds)
def test_conversions_join_the_devices_that_talk(name: str, seed: int) -> None:
    """Against the groups of the mesh, one collective after the other, device by device."""
    graph = model_graph(name)
    plan = random_plan(name, random.Random(seed), pins=0.5, plain=True)
    model = plan_model(plan, graph, COSTS)
    for stage in unfolded(model).stages:
        block, mesh = stage.cell_blocks[FORWARD], stage.table.mesh
        small = stage.table.graph
        for task, groups in copies(block, TaskRole.CONVERT).items():
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
                if any(part_of(sizes, s, mesh, device) is not None for s in (state, after))
            }
            if members:
                apart = [each for each in joined if not each & members]
                joined = [*apart, members.union(*(each for each in joined if each & members))]
        state = after
    return [sorted(each) for each in joined]


@pytest.mark.slow
@settings(max_examples=examples(25))
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


@settings(max_examples=examples(20, few=4))
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


def copies(block: CellBlock, role: TaskRole) -> dict[int, list[list[int]]]:
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
    syncs = copies(model.stages[0].cell_blocks[LAST_BACKWARD], TaskRole.SYNC)
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
    for task, groups in copies(block, TaskRole.FORWARD).items():
        name = graph.operators[int(block.block.subjects[task])].name
        assert sorted(groups) == (together if name in names else apart)


def test_a_send_holds_its_two_ends_and_no_other_cell() -> None:
    graph = mlp([64, 64, 64], batch=32)
    choices = replicated(graph, (4,))
    names = [op.name for op in graph.operators if not op.is_source]
    for name in names:
        choices[name] = Choice((Pin(1 if name == names[0] else 3),))
    forward = stage_of(one_stage(graph, (4,), choices), graph).cell_blocks[FORWARD]
    assert list(copies(forward, TaskRole.CONVERT).values()) == [[[1, 3]]]
    assert copies(forward, TaskRole.FORWARD)[forward.block.names.index(f"{names[0]} forward")] == [
        [1]
    ]


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
