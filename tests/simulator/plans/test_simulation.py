"""Plans on the simulator: against closed forms, hand-made timelines and brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import (
    data_parallel,
    replicated,
    tensor_dims,
    tensor_parallel,
)
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Pin, Replicate, Shard
from stratagem.simulator.hardware.cluster import Cluster, GroupFigures, Link
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import Direction, RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import factors
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.work_kinds import (
    BACKWARD,
    LAST_BACKWARD,
    NUM_KINDS,
    RESHARD,
    SEND,
    SEND_BACK,
)
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.priced_plan import block_times, macro_durations, plan_model
from stratagem.simulator.simulation.simulation import simulate_plan

CLUSTER = Cluster.preset("dgx-a100")
COSTS = RooflineCosts()


def small_gpt(**changes: int) -> OperatorGraph:
    sizes = {
        "num_layers": 2,
        "hidden": 64,
        "num_heads": 4,
        "vocabulary": 96,
        "sequence": 32,
        "batch": 16,
    } | changes
    return gpt(**sizes)


def mesh(*sizes: int, first: int = 0) -> DeviceMesh:
    axes = tuple(MeshAxis(f"a{i}", n) for i, n in enumerate(sizes))
    return DeviceMesh(axes, tuple(range(first, first + int(np.prod(sizes)))))


def one_stage(graph: OperatorGraph, where: DeviceMesh, choices: Choices, **more: object) -> Plan:
    names = tuple(op.name for op in graph.operators)
    fields = {
        "name": "test",
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "cluster": CLUSTER,
        "training": Training(),
        "stages": (Stage(names, where, choices),),
    } | more
    return Plan(**fields)  # type: ignore[arg-type]


def pipeline(graph: OperatorGraph, num_stages: int, parts: int, schedule: str) -> Plan:
    small = graph.microbatch(parts)
    stages = balanced_stages(graph, CLUSTER, num_stages)
    meshes = [mesh(1, first=s) for s in range(num_stages)]
    return Plan(
        name="pipeline",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(),
        stages=tuple(
            Stage(names, where, {n: replicated(small, (1,))[n] for n in names})
            for names, where in zip(stages, meshes, strict=True)
        ),
        num_microbatches=parts,
        schedule=schedule,
    )


def test_one_device_takes_the_sum_of_its_operators() -> None:
    graph = small_gpt()
    plan = one_stage(graph, mesh(1), replicated(graph, (1,)))
    device, training = CLUSTER.device_type(0), Training()
    passes = 0
    for i, op in enumerate(graph.operators):
        if not op.is_source:
            for direction in Direction:
                if direction is Direction.FORWARD or graph.needs_gradient[i]:
                    cost = COSTS.operator_cost(op, op.sizes, direction, training, device)
                    passes += round(cost.seconds * 1e9)
    simulation = simulate_plan(plan, graph, COSTS)
    updates = [
        end - start
        for kind, start, end in zip(
            simulation.timeline.kinds,
            simulation.timeline.start,
            simulation.timeline.end,
            strict=True,
        )
        if kind is TaskKind.UPDATE
    ]
    assert round(simulation.step_time * 1e9) == passes + sum(updates)


def test_data_parallel_needs_exactly_one_reduction_a_parameter() -> None:
    graph = mlp([64, 64, 64], batch=32)
    choices = data_parallel(graph, (8,))
    simulation = simulate_plan(one_stage(graph, mesh(8), choices), graph, COSTS)
    kinds = set(simulation.timeline.kinds)
    assert TaskKind.COMMUNICATION not in kinds
    synced = {
        name
        for name, kind in zip(simulation.timeline.names, simulation.timeline.kinds, strict=True)
        if kind is TaskKind.GRADIENT_SYNC
    }
    linears = {f"{op.name} sync" for op in graph.operators if op.weights}
    assert synced == linears


def test_tied_weights_are_reduced_once_when_both_uses_lie_alike() -> None:
    graph = small_gpt()
    tied = [
        p
        for p in graph.parameters
        if sum(p.name == w.parameter for op in graph.operators for w in op.weights) > 1
    ]
    assert tied, "the GPT builder ties its embedding"
    simulation = simulate_plan(one_stage(graph, mesh(8), data_parallel(graph, (8,))), graph, COSTS)
    assert not any("↔" in name for name in simulation.timeline.names)
    choices = dict(data_parallel(graph, (8,)))
    head = next(op for op in graph.operators if op.kind == "linear" and op.name.endswith("head"))
    choices[head.name] = Choice((Shard("out"),))
    mixed = simulate_plan(one_stage(graph, mesh(8), choices), graph, COSTS)
    assert any("↔" in name for name in mixed.timeline.names)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline_of_equal_stages_has_the_papers_bubble(schedule: str) -> None:
    """(stages − 1) / microbatches of the ideal time (Huang et al. 2019), transfers left out."""
    graph, stages, parts = mlp([64] * 9, batch=32), 4, 8
    model = plan_model(pipeline(graph, stages, parts, schedule), graph, COSTS)
    forward, backward = 1000, 2000
    durations = np.zeros((NUM_KINDS, model.macro.num_items), dtype=np.int64)
    durations[0], durations[1], durations[2] = forward, backward, backward
    makespan = simulate(model.macro.with_durations(durations)).makespan
    ideal = parts * (forward + backward)
    assert makespan - ideal == (stages - 1) * (forward + backward)


def on_ranks(plan: Plan, ranks: tuple[int, ...], **fields: object) -> Plan:
    """The plan with its stages on the devices of `ranks`."""
    stages = zip(plan.stages, ranks, strict=True)
    moved = tuple(replace(stage, mesh=mesh(1, first=rank)) for stage, rank in stages)
    return replace(plan, stages=moved, **fields)  # type: ignore[arg-type]


def test_stages_of_one_rank_take_turns() -> None:
    graph = small_gpt(num_layers=4, batch=32)
    plan = on_ranks(pipeline(graph, 4, 8, "1f1b"), (0, 1, 0, 1), schedule="interleaved")
    simulation = simulate_plan(plan, graph, COSTS)
    timeline = simulation.timeline
    assert int(timeline.end.max()) == round(simulation.step_time * 1e9)
    for rank in (0, 1):
        lane = timeline.lanes.index(f"rank {rank} · compute")
        rows = np.flatnonzero(timeline.lane == lane)
        order = rows[np.argsort(timeline.start[rows], kind="stable")]
        assert (timeline.start[order][1:] >= timeline.end[order][:-1]).all()
    assert "4 stages that take turns on 2 sets of" in " ".join(describe(simulation, graph).split())
    apart = simulate_plan(pipeline(graph, 4, 8, "1f1b"), graph, COSTS)
    assert apart.step_time < simulation.step_time < 2.2 * apart.step_time


def busy(wait: float = 0.0) -> Cluster:
    """Transfers keep cores busy, and members of groups of two wait for each other."""
    cluster = Cluster.preset("local-cpu", devices_per_node=2)
    figures = (GroupFigures(2, 1.0, 1000.0, wait=wait),)
    link = Link("loopback", 1.0, 1000.0, shares_compute=True, by_group_size=figures)
    return replace(cluster, intra_node=link, inter_node=link)


def test_a_transfer_that_keeps_cores_busy_goes_before_what_its_sender_does_next() -> None:
    """As in the program of a rank, which sends when a block has ended; who receives goes on.

    Once both ranks had to be idle, so activations left behind the next block, and a pipeline of
    two processes was predicted a third too slow.
    """
    graph = small_gpt(num_layers=4, batch=32)
    plan = replace(pipeline(graph, 2, 4, "1f1b"), cluster=busy())
    model = plan_model(plan, graph, COSTS)
    macro, times = model.macro, simulate(model.macro.with_durations(macro_durations(model)))
    sends = np.flatnonzero((macro.kind == SEND) | (macro.kind == SEND_BACK))
    assert sends.size == 8
    early = set(macro.rests)
    for send in sends.tolist():
        (block,) = (task for task in macro.blocks if send in successors(macro.graph, task))
        if block in early:  # A last backward: its update goes on meanwhile.
            assert times.start[send] >= times.end[block]
            continue
        assert times.start[send] == times.end[block]
        behind = [t for t in macro.blocks if macro.rank[t] == macro.rank[block] and t > block]
        assert all(times.start[task] >= times.end[send] for task in behind)
    first, second = (
        [(times.start[t], times.end[t]) for t in macro.blocks if macro.rank[t] == rank]
        for rank in (0, 1)
    )
    whole = [(times.start[t], times.end[t]) for t in sends.tolist()]
    assert any(a < d and c < b for a, b in whole for c, d in (*first, *second)), "beside blocks"


def successors(graph: TaskGraph, task: int) -> list[int]:
    lo, hi = graph.successor_offsets[task : task + 2]
    found: list[int] = graph.successors[lo:hi].tolist()
    return found


def test_devices_of_a_mesh_wait_for_the_slowest() -> None:
    """Computing of a mesh takes longer by the share that its links say, that of one device not."""
    graph = mlp([64] * 3, batch=32)
    for devices, factor in ((2, 1.25), (1, 1.0)):
        choices = data_parallel(graph, (devices,))
        tables = [
            plan_model(one_stage(graph, mesh(devices), choices, cluster=cluster), graph, COSTS)
            .stages[0]
            .table
            for cluster in (busy(), busy(wait=0.25))
        ]
        for plain, waiting in zip(*(table.rows for table in tables), strict=True):
            for row in ("forward", "backward"):
                expected = getattr(plain, row).ns * factor
                assert getattr(waiting, row).ns == pytest.approx(expected, abs=1)
            assert np.array_equal(plain.update.ns, waiting.update.ns)


def test_a_plans_own_orders_are_played() -> None:
    graph = small_gpt(batch=32)
    plan = pipeline(graph, 2, 8, "1f1b")
    lines = tuple(plan.make_schedule().to_text().splitlines())
    custom = replace(plan, schedule="custom", orders=lines)
    assert simulate_plan(custom, graph, COSTS).step_time == pytest.approx(
        simulate_plan(plan, graph, COSTS).step_time, abs=0
    )


def test_two_stages_of_one_device_take_as_long_as_one_stage() -> None:
    graph = mlp([64] * 9, batch=32)
    plan = on_ranks(
        pipeline(graph, 2, 1, "1f1b"),
        (0, 0),
        schedule="custom",
        orders=("rank 0: 0F0 1F0 1B0 0B0",),
    )
    whole = one_stage(graph, mesh(1), replicated(graph, (1,)))
    assert simulate_plan(plan, graph, COSTS).step_time == pytest.approx(
        simulate_plan(whole, graph, COSTS).step_time, abs=0
    )


def test_between_stages_of_one_mesh_a_tensor_is_resharded() -> None:
    """As inside a stage: no time where both lie alike, else the cheapest path of collectives."""
    graph = mlp([64] * 3, batch=32)
    names = tuple(op.name for op in graph.operators)
    cut = next(k for k, op in enumerate(graph.operators) if op.kind == "linear") + 1
    spread, whole = data_parallel(graph, (2,)), replicated(graph, (2,))

    def boundary(second: Choices) -> tuple[int, int]:
        parts = ((names[:cut], spread), (names[cut:], second))
        stages = tuple(Stage(part, mesh(2), {n: c[n] for n in part}) for part, c in parts)
        orders = ("rank 0: 0F0 1F0 1B0 0B0",)
        plan = one_stage(graph, mesh(2), spread, stages=stages, schedule="custom", orders=orders)
        model = plan_model(plan, graph, COSTS)
        durations = macro_durations(model)
        assert not durations[[SEND, SEND_BACK]].any()
        (_, row), *_ = model.priced.boundaries
        return int(durations[RESHARD].sum()), int(row.received_bytes[0, 0])

    assert boundary(spread) == (0, 0)
    time, kept = boundary(whole)
    assert time > 0
    assert kept == 4 * 32 * 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {
                "num_microbatches": 2,
                "schedule": "custom",
                "orders": ("rank 0: 0F0 0B0", "rank 1: 0F1 1F0 1B0 1F1 1B1 0B1"),
            },
            "has stage 0 on ranks 0 and 1, but plans price copies of all stages",
        ),
    ],
)
def test_schedules_that_plans_do_not_price_are_refused(
    fields: dict[str, object], message: str
) -> None:
    graph = small_gpt(batch=32)
    plan = replace(pipeline(graph, 2, 8, "1f1b"), **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        simulate_plan(plan, graph, COSTS)


def test_pipeline_keeps_fewer_activations_under_1f1b() -> None:
    graph = small_gpt(batch=32)
    gpipe, one = (
        simulate_plan(pipeline(graph, 2, 8, name), graph, COSTS) for name in ("gpipe", "1f1b")
    )
    assert [m.in_flight for m in gpipe.memory] == [8, 8]
    assert [m.in_flight for m in one.memory] == [2, 1]
    assert one.peak_memory < gpipe.peak_memory


def test_zero_shards_state_and_splits_the_all_reduce() -> None:
    graph = small_gpt()
    by_zero = {
        zero: simulate_plan(
            one_stage(graph, mesh(8), data_parallel(graph, (8,), zero=zero)), graph, COSTS
        ).memory[0]
        for zero in range(4)
    }
    assert by_zero[0].state > by_zero[1].state > by_zero[2].state > by_zero[3].state
    total = 4 * graph.num_parameters
    assert by_zero[0].state == 4 * total
    assert by_zero[3].state == 4 * total // 8


def test_the_whole_timeline_is_inside_the_step_and_no_resource_is_used_twice() -> None:
    graph = small_gpt(batch=32)
    plan = pipeline(graph, 2, 4, "1f1b")
    simulation = simulate_plan(plan, graph, COSTS)
    timeline = simulation.timeline
    assert int(timeline.end.max()) == round(simulation.step_time * 1e9)
    for lane in range(len(timeline.lanes)):
        rows = np.flatnonzero(timeline.lane == lane)
        order = rows[np.argsort(timeline.start[rows], kind="stable")]
        assert (timeline.start[order][1:] >= timeline.end[order][:-1]).all()


def test_tensor_parallel_is_megatrons() -> None:
    """Two all-reduces forward and two backward a layer, heads and hidden units sharded."""
    graph = small_gpt(num_layers=1)
    sharded = tensor_dims(graph, 2)
    kinds = {graph.operator(name).kind: dim for name, dim in sharded.items()}
    assert kinds["attention"] == "head"
    for name, dim in sharded.items():
        assert not graph.operator(name).dim(dim).whole
    plan = one_stage(graph, mesh(2), tensor_parallel(graph, (2,), 0))
    timeline = simulate_plan(plan, graph, COSTS).timeline
    forward = [n for n in timeline.names if "→" in n]
    backward = [n for n in timeline.names if "←" in n]
    # Attention and MLP of the one layer; the embedding's sum before it, the head's logits stay.
    assert len(set(forward)) == 3 or len(set(forward)) == 4
    assert backward


def test_sequence_parallel_turns_all_reduces_into_halves() -> None:
    graph = small_gpt(num_layers=1)
    plain = plan_model(
        one_stage(graph, mesh(2), tensor_parallel(graph, (2,), 0)), graph, COSTS
    ).stages[0]
    split = plan_model(
        one_stage(graph, mesh(2), tensor_parallel(graph, (2,), 0, sequence_parallel=True)),
        graph,
        COSTS,
    ).stages[0]
    kept, less = plain.tensors.held[0], split.tensors.held[0]
    assert less < kept


def test_pinned_operators_are_priced_and_move_over_the_link() -> None:
    graph = mlp([64, 64, 64], batch=32)
    choices = dict(replicated(graph, (2,)))
    linears = [op.name for op in graph.operators if op.kind == "linear"]
    choices[linears[0]] = Choice((Pin(0),))
    choices[linears[1]] = Choice((Pin(1),))
    simulation = simulate_plan(one_stage(graph, mesh(2), choices), graph, COSTS)
    assert any(kind is TaskKind.COMMUNICATION for kind in simulation.timeline.kinds)


def test_a_step_time_comes_with_the_interval_of_its_costs() -> None:
    graph = gpt(num_layers=2, batch=8)
    simulation = simulate_plan(
        TrainingSetup(microbatch=8).plan(graph, CLUSTER.with_devices(1)), graph, default_costs()
    )
    low, high = simulation.interval
    assert 0 < low < simulation.step_time < high
    assert high - low == pytest.approx(2 * simulation.step_time * simulation.relative_error)


def test_memory_over_the_limit_says_which_operators_hold_it() -> None:
    graph = small_gpt()
    small = replace(CLUSTER.device_types[0], memory_gib=1e-4, reserved_gib=0)
    tiny = replace(CLUSTER, device_types=(small,))
    plan = one_stage(graph, mesh(1), replicated(graph, (1,)), cluster=tiny)
    simulation = simulate_plan(plan, graph, COSTS)
    assert not simulation.fits
    memory = simulation.memory[0]
    assert sum(each.total for each in memory.alive) == memory.peak
    assert memory.alive[0].total == max(each.total for each in memory.alive)


def test_a_plan_for_another_model_is_refused() -> None:
    graph, other = small_gpt(), small_gpt(hidden=128)
    plan = one_stage(graph, mesh(1), replicated(graph, (1,)))
    with pytest.raises(ValueError, match=r"was made for model .* search again"):
        simulate_plan(plan, other, COSTS)


def test_configs_that_cannot_be_are_refused_with_both_numbers() -> None:
    graph = small_gpt()
    base = replicated(graph, (8,))
    attention = next(op for op in graph.operators if op.kind == "attention")
    norm = next(op for op in graph.operators if op.kind == "layer_norm")
    for operator, config, message in (
        (attention, (Shard("head"),), r"dim 'head' of size 4 cannot be split 8 ways"),
        (norm, (Shard(factors(norm.weights[0].layout)[0]),), "cannot be split: "),
        (attention, (Shard("nonsense"),), "has no dim 'nonsense'; it has"),
        (attention, (Replicate(), Replicate()), "2 placements for a mesh of 1 axes"),
        (attention, (Pin(8),), r"Pin\(8\) on axis 0, which has size 8"),
    ):
        plan = one_stage(graph, mesh(8), {**base, operator.name: Choice(config)})
        with pytest.raises(ValueError, match=message):
            simulate_plan(plan, graph, COSTS)


def test_blocks_of_equal_choices_are_equal_however_they_are_built() -> None:
    """The last backward does all that an inner one does, and then updates."""
    graph = small_gpt()
    plan = one_stage(graph, mesh(8), data_parallel(graph, (8,), zero=2))
    model = plan_model(plan, graph, COSTS)
    times = block_times(model.stages[0])
    inner, last = times[BACKWARD], times[LAST_BACKWARD]
    assert inner.makespan < last.makespan


def test_activations_of_a_layer_are_the_published_formula() -> None:
    """34·s·b·h bytes a layer in 16 bits (Korthikanti et al. 2022), 2 of them dropout masks.

    Attention keeps no s × s matrix (flash attention), and there is no dropout here.
    """
    sequence, batch, hidden = 32, 16, 64
    kept = []
    for num_layers in (1, 2):
        graph = small_gpt(num_layers=num_layers, sequence=sequence, batch=batch, hidden=hidden)
        plan = one_stage(
            graph, mesh(1), replicated(graph, (1,)), training=Training(precision="bfloat16")
        )
        kept.append(simulate_plan(plan, graph, COSTS).memory[0].activations)
    assert kept[1] - kept[0] == 32 * sequence * batch * hidden


def test_transfers_between_processes_hold_their_cores() -> None:
    """On a CPU nobody computes while a pipeline's tensors travel; on GPUs they travel aside."""
    graph = mlp([64] * 9, batch=32)
    steps = []
    for shares in (False, True):
        link = replace(CLUSTER.intra_node, bandwidth_gb_s=0.01, shares_compute=shares)
        cluster = replace(CLUSTER, intra_node=link)
        plan = replace(pipeline(graph, 2, 8, "1f1b"), cluster=cluster)
        steps.append(simulate_plan(plan, graph, COSTS).step_time)
    assert steps[1] > steps[0]


@pytest.mark.parametrize(
    ("share", "said"), [(0.85, ""), (0.89, ""), (0.95, "It fills 95% of a"), (1.1, "")]
)
def test_a_plan_that_leaves_hardly_any_memory_says_so(share: float, said: str) -> None:
    graph = small_gpt()
    found = simulate_plan(TrainingSetup().plan(graph, CLUSTER), graph, COSTS)
    full = tuple(replace(rank, capacity=round(rank.peak / share)) for rank in found.memory)
    crowded = replace(found, memory=full).crowded
    assert crowded.startswith(said)
    assert bool(crowded) == bool(said)
