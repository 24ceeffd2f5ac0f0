"""The table of a comparison that tells stage by stage what devices do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.models import MLP
from stratagem.executor import execute, model_state
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.runs.as_run_tells import whole_passes
from stratagem.runs.predicted_and_measured import WAITING, compare
from stratagem.runs.shared_cores import shared_time, shares_beside
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.tables import Unit
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.graph.models import resnet
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.core_pace import OF_MOVING, StepPace
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.timeline.timeline import (
    Row,
    Timeline,
    from_rows,
    lane_group,
    statistics,
)
from stratagem.simulator.torch_ops.capture.capture import capture

KINDS = {kind.value: kind for kind in TaskKind}


def run(
    devices: list[tuple[int, ...]], schedule: str, *, memory: bool = False
) -> tuple[Simulation, ExecutionResult]:
    """An MLP whose linear layers are dealt out to stages on the given devices."""
    torch.manual_seed(0)
    model = MLP([16, 32, 32, 32, 8])
    batch = {"x": torch.randn(8, 16), "target": torch.randint(0, 8, (8,))}
    graph = capture(model, kwargs=batch)
    names = graph.names
    bounds = [round(i * len(names) / len(devices)) for i in range(len(devices) + 1)]
    stages = []
    for here, first, last in zip(devices, bounds, bounds[1:], strict=False):
        mesh = DeviceMesh((MeshAxis("data", len(here)),), here)
        choices = {
            each.name: Choice(
                (Shard("sample"),)
                if any(dim.name == "sample" and not dim.whole for dim in each.dims)
                else (REPLICATE,)
            )
            for each in graph.operators
            if each.name in names[first:last]
        }
        stages.append(Stage(tuple(choices), mesh, choices))
    plan = Plan(
        name="pipeline",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=4),
        training=Training(),
        stages=tuple(stages),
        num_microbatches=2,
        schedule=schedule,
    )
    simulation = simulate_plan(plan, graph, default_costs())
    state = model_state(model)
    return simulation, execute(plan, graph, state, batch, steps=2, memory=memory)


def spans_of(timeline: Timeline, group: str) -> list[tuple[str, TaskKind, int, int]]:
    """Name, kind, start and end of every task of a group of lanes."""
    return [
        (name, kind, int(start), int(end))
        for name, kind, lane, start, end in zip(
            timeline.names,
            timeline.kinds,
            timeline.lane,
            timeline.start,
            timeline.end,
            strict=True,
        )
        if timeline.lanes[lane].split(" · ")[0] == group
    ]


def seconds(
    timeline: Timeline, groups: list[str], kind: TaskKind, ends: Sequence[str] = ()
) -> float:
    """Mean over groups of the time that goes to a kind of task, moment by moment.

    What is under way at once on cores that carry the bytes, too, gets equal parts of them. Who has
    nothing to do while a message is on its way to it, to one of the stages in `ends`, waits for
    that: it communicates.
    """
    total = 0.0
    for group in groups:
        mine = spans_of(timeline, group)
        coming = [
            span
            for other in {lane.split(" · ")[0] for lane in timeline.lanes}
            for span in spans_of(timeline, other)
            if any(f"⇢ {end}," in span[0] for end in ends)
        ]
        moments = sorted({moment for *_, start, end in mine + coming for moment in (start, end)})
        for start, end in pairwise(moments):
            under_way = {k for _, k, begun, over in mine if begun <= start and end <= over}
            if not under_way:
                under_way = {k for _, k, begun, over in coming if begun <= start and end <= over}
            if kind in under_way:
                total += (end - start) / len(under_way)
    return total / len(groups) * 1e-9


@pytest.mark.parametrize(
    ("devices", "schedule", "ranks"),
    [
        ([(0, 1), (2, 3)], "1f1b", {"stage 0": (0, 1), "stage 1": (2, 3)}),
        ([(1,), (0, 2)], "gpipe", {"stage 0": (1,), "stage 1": (0, 2)}),
        ([(2,), (1,), (2,), (1,)], "interleaved", {"rank 0": (1,), "rank 1": (0,)}),
    ],
)
def test_stages_are_laid_side_by_side(
    devices: list[tuple[int, ...]], schedule: str, ranks: dict[str, tuple[int, ...]]
) -> None:
    simulation, result = run(devices, schedule)
    compared = compare(simulation, result)
    assert {row.stage for row in compared.stages} == set(ranks)
    for row in compared.stages:
        theirs = [f"rank {rank}" for rank in ranks[row.stage]]
        if row.what != WAITING:
            kind = KINDS[row.what]
            ends = [
                f"stage {number}"
                for number in range(len(devices))
                if simulation.plan.group(number) == row.stage
            ]
            ours = seconds(simulation.timeline, [row.stage], kind, ends)
            assert row.predicted == pytest.approx(ours, abs=1e-9)
            assert row.measured == pytest.approx(seconds(result.timeline, theirs, kind), abs=1e-9)
    for stage in ranks:
        named = {row.what: row for row in compared.stages if row.stage == stage}
        assert {"forward", "backward", WAITING} <= named.keys()
        spent = sum(row.measured for row in named.values())
        assert spent == pytest.approx(result.timeline.duration, rel=1e-9)
        assert 0 <= named[WAITING].measured < result.timeline.duration


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_comparison_tells_that_the_executor_adds_gradients_apart(
    fused: bool, parts: int
) -> None:
    """Default training has products of GPUs do so, which no prediction of a run may hide."""
    simulation, result = run([(0,), (1,)], "1f1b")
    assert compare(simulation, result).notes == ()  # On CPUs they are priced apart.
    plan = replace(
        simulation.plan,
        cluster=Cluster.preset("dgx-a100", devices_per_node=4),
        num_microbatches=parts,
        training=replace(simulation.plan.training, fused_accumulation=fused),
    )
    batch = {"x": torch.randn(8, 16), "target": torch.randint(0, 8, (8,))}
    graph = capture(MLP([16, 32, 32, 32, 8]), kwargs=batch)
    again = simulate_plan(plan, graph, default_costs())
    compared = compare(again, result)
    assert bool(compared.notes) == (fused and parts > 1)
    assert ("fused_accumulation=False" in str(compared)) == bool(compared.notes)
    if parts > 1 and not fused:
        training = replace(plan.training, fused_accumulation=True)
        fusing = simulate_plan(replace(plan, training=training), graph, default_costs())
        assert again.step_time > fusing.step_time


@pytest.mark.parametrize(("name", "said"), [("eager_loss", "copied"), ("fused_loss", "over")])
def test_a_comparison_tells_of_a_loss_that_the_executor_does_not_run(name: str, said: str) -> None:
    simulation, result = run([(0,)], "1f1b")
    assert compare(simulation, result).notes == ()
    training = replace(simulation.plan.training, **{name: True})
    again = replace(simulation, plan=replace(simulation.plan, training=training))
    [note] = compare(again, result).notes
    assert said in note
    assert f"Training({name}=False)" in note


def test_the_table_has_a_row_a_stage_and_kind() -> None:
    compared = compare(*run([(0,), (1,)], "1f1b"))
    table = compared.stage_table
    assert list(table.columns) == ["stage", "what", "predicted", "measured", "error"]
    assert len(table.rows) == len(compared.stages)
    assert "stage 1" in str(table)
    assert "waiting" in table._repr_html_()


@pytest.mark.parametrize(
    ("devices", "schedule", "ranks"),
    [
        ([(0, 1), (2,)], "1f1b", {"stage 0": (0, 1), "stage 1": (2,)}),
        ([(2,), (0, 1)], "gpipe", {"stage 0": (2,), "stage 1": (0, 1)}),
        ([(1,), (0,), (1,), (0,)], "interleaved", {"rank 0": (1,), "rank 1": (0,)}),
        ([(0,), (1,)], "chimera", {"rank 0": (0,), "rank 1": (1,)}),
    ],
)
def test_memory_is_laid_side_by_side(
    devices: list[tuple[int, ...]], schedule: str, ranks: dict[str, tuple[int, ...]]
) -> None:
    simulation, result = run(devices, schedule, memory=True)
    compared = compare(simulation, result)
    assert [row.stage for row in compared.peaks] == list(ranks)
    for row, memory in zip(compared.peaks, simulation.memory, strict=True):
        assert row.measured == max(result.peak_bytes[rank] for rank in ranks[row.stage])
        assert row.predicted == memory.peak
        assert row.predicted == pytest.approx(row.measured, rel=0.35)
    table = compared.memory_table
    assert table.columns == {
        "stage": Unit.TEXT,
        "predicted": Unit.BYTES,
        "measured": Unit.BYTES,
        "error": Unit.TEXT,
    }
    titles = [axes.get_title(loc="left") for axes in compared.figure.axes]
    for title, column in zip(titles, ("predicted", "measured"), strict=True):
        for name, nbytes in zip(table.column("stage"), table.column(column), strict=True):
            assert isinstance(nbytes, int)
            assert f"{format_bytes(nbytes)} on {name}" in title


def test_looking_at_memory_changes_nothing_else() -> None:
    """States of the optimizer, made in the first step, are among what is found."""
    _, without = run([(0,), (1,)], "1f1b")
    simulation, looked = run([(0,), (1,)], "1f1b", memory=True)
    assert looked.losses == without.losses
    for name, tensor in without.parameters.items():
        assert torch.equal(tensor, looked.parameters[name]), name
    assert without.peak_bytes == ()
    assert compare(simulation, without).peaks == ()
    for axes in compare(simulation, without).figure.axes:
        assert "memory" not in axes.get_title(loc="left")
    stored = 4 * sum(tensor.numel() for tensor in looked.parameters.values())
    assert 4 * stored < sum(looked.peak_bytes) < 8 * stored


def test_result_files_keep_memory_and_old_ones_are_read(tmp_path: Path) -> None:
    simulation, result = run([(0,), (1,)], "1f1b", memory=True)
    path = tmp_path / "run.json"
    result.save(path)
    kept = ExecutionResult.load(path)
    assert kept.peak_bytes == result.peak_bytes
    assert compare(simulation, kept).peaks == compare(simulation, result).peaks
    columns = json.loads(path.read_text())
    del columns["peak_bytes"], columns["no_graph"], columns["first_step"]
    path.write_text(json.dumps(columns))
    old = ExecutionResult.load(path)
    assert (old.peak_bytes, old.no_graph) == ((), "")
    assert compare(simulation, old).peaks == ()


def test_a_run_on_slow_cores_is_compared_at_their_pace() -> None:
    """Cores that take half as long again: products take 1.5 ** 0.6 times as long, bytes less."""
    simulation, result = run([(0, 1), (2, 3)], "1f1b")
    assert compare(simulation, result).at_pace is None
    assert "cores" not in "".join(compare(simulation, result).notes)
    paced = replace(simulation, pace=StepPace(4e-5, 0.6))
    assert compare(paced, result).at_pace is None  # Nobody looked during the run.
    slow = replace(result, step_paces=((6e-5, 5e-5, 4e-5, 5e-5),) * result.num_steps)
    comparison = compare(paced, slow)
    exposed = statistics(simulation.timeline).exposed_communication.values()
    moving = sum(exposed) / len(exposed) / simulation.step_time
    assert 0 < moving < 1
    wanted = simulation.step_time * ((1 - moving) * 1.5**0.6 + moving * 1.5**OF_MOVING)
    assert comparison.at_pace == pytest.approx(wanted, rel=1e-6)
    assert comparison.relative_error == compare(simulation, result).relative_error
    assert comparison.error_at_pace == pytest.approx(wanted / result.step_time - 1)
    assert compare(simulation, result).error_at_pace is None
    (note,) = comparison.notes
    assert "50% slower in the run" in note
    assert format_duration(wanted) in note
    title = comparison.figure.axes[0].get_title(loc="left")
    assert f"{format_duration(wanted)} for cores as fast as in the run" in title
    fast = compare(paced, replace(result, step_paces=((2e-5,),) * result.num_steps))
    assert "50% faster in the run" in fast.notes[0]


def test_each_step_is_compared_at_its_own_pace() -> None:
    """A minority of slow steps says nothing of the median one: the mean pace of all did."""
    simulation, result = run([(0,), (1,)], "gpipe")
    paced = replace(simulation, pace=StepPace(4e-5, 0.9))
    usual = paced.at_pace(5e-5)
    mixed = replace(
        result,
        step_times=(usual, usual, usual, 2 * usual, 3 * usual),
        step_paces=((4e-5, 5e-5), (5e-5, 5e-5), (5e-5, 1e-5), (1.2e-4, 4e-5), (2e-4, 4e-5)),
    )
    assert mixed.step_time == usual
    assert compare(paced, mixed).at_pace == pytest.approx(usual)
    assert compare(paced, mixed).error_at_pace == pytest.approx(0.0, abs=1e-9)
    uneven = replace(mixed, step_paces=((6e-5,), (5e-5,), (4.5e-5,), (1.2e-4,), (2e-4,)))
    ratios = [
        paced.at_pace(p[0]) / s for p, s in zip(uneven.step_paces, uneven.step_times, strict=True)
    ]
    assert compare(paced, uneven).at_pace == pytest.approx(usual * sorted(ratios)[2])


def test_a_pace_outlives_files(tmp_path: Path) -> None:
    simulation, result = run([(0,), (1,)], "gpipe")
    paced = replace(simulation, pace=StepPace(4e-5, 0.6))
    slow = replace(result, step_paces=((5e-5, 4e-5),) * result.num_steps)
    paced.save(tmp_path / "step.json")
    slow.save(tmp_path / "run.json")
    loaded = Simulation.load(tmp_path / "step.json"), ExecutionResult.load(tmp_path / "run.json")
    assert compare(*loaded).at_pace == compare(paced, slow).at_pace
    assert compare(paced, slow).at_pace is not None
    with pytest.raises(ValueError, match=r"'pipeline' was not simulated .* profile it on CPUs"):
        simulation.at_pace(4e-5)


def test_the_tasks_that_are_most_off_are_told_with_why() -> None:
    simulation, result = run([(0, 1), (2, 3)], "1f1b")
    comparison = compare(simulation, result)
    assert [reason.row for reason in comparison.most_off] == list(comparison.tasks[:3])
    assert all("predicted" in str(reason) for reason in comparison.most_off)
    timeline = from_rows(
        [
            Row("a", TaskKind.FORWARD, "rank 0 · compute", 0, 100),
            Row("b", TaskKind.GRADIENT_SYNC, "rank 0 · communication", 60, 200),
            Row("c", TaskKind.UPDATE, "rank 1 · compute", 0, 300),
        ],
        label="measured",
    )
    shares = shares_beside(timeline)
    assert shares == pytest.approx(
        {
            ("a", TaskKind.FORWARD): 0.4,
            ("b", TaskKind.GRADIENT_SYNC): 40 / 140,
            ("c", TaskKind.UPDATE): 0.0,
        }
    )
    counted = shared_time(timeline)
    assert counted[TaskKind.FORWARD] == pytest.approx({"rank 0": 80e-9, "rank 1": 0.0})
    assert counted[TaskKind.GRADIENT_SYNC] == pytest.approx({"rank 0": 120e-9, "rank 1": 0.0})
    assert counted[TaskKind.UPDATE] == pytest.approx({"rank 0": 0.0, "rank 1": 300e-9})


def test_a_pass_is_compared_with_the_collectives_inside_it() -> None:
    """A run times a pass whole: a ResNet's were 57 ms for 135, and 78 ms of links for none."""
    graph = resnet(18, batch=8, image=32, classes=10)
    simulation = simulate_plan(
        TrainingSetup().plan(graph, Cluster.preset("dgx-a100", num_nodes=1)),
        graph,
        default_costs(),
    )
    told, whole = simulation.timeline, whole_passes(simulation.timeline)
    inside = {
        (name, lane_group(told.lanes[lane]))
        for name, kind, lane in zip(told.names, told.kinds, told.lane, strict=True)
        if not kind.is_communication
    }
    talks = [
        row
        for row in range(told.num_rows)
        if told.kinds[row].is_communication
        and (told.names[row], lane_group(told.lanes[told.lane[row]])) in inside
    ]
    assert talks
    assert whole.num_rows == told.num_rows - len(talks)
    assert whole.duration == told.duration
    inner = sum(told.end[row] - told.start[row] for row in talks)
    assert (whole.end - whole.start).sum() == (told.end - told.start).sum()
    ran = compare(simulation, SimpleNamespace(step_time=1.0, timeline=whole))
    rows = {row.what: row for row in ran.rows}
    assert rows["forward"].predicted == pytest.approx(rows["forward"].measured)
    assert inner * 1e-9 > 0.1 * rows["forward"].predicted
    assert {row.error for row in ran.tasks} == {"+0%"}
