"""The executor equals one process of torch, for every plan; programs are proved first."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from examples.models import MLP
from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.grid import grid
from stratagem.executor.program.instructions import (
    Backward,
    Bundle,
    Convert,
    Forward,
    Free,
    Instruction,
    Receive,
    Send,
)
from stratagem.executor.program.programs import Program
from stratagem.executor.program.verify import verify
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.simulator.graph.placement import REPLICATE, Pin
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.stage.stage_blocks import PREFETCH
from tests.support.plans import (
    TOLERANCE,
    Case,
    Chooser,
    assert_equal_to_torch,
    assert_trains_like_torch,
    crossed,
    drawing,
    few,
    make_case,
    make_plan,
    megatron,
    random_plan,
    sharding,
    whole,
)

# -- equality -----------------------------------------------------------------------------------

PLANS: dict[str, tuple[Chooser, tuple[int, ...]]] = {
    "one device": (whole, (1,)),
    "data parallel": (sharding("sample"), (2,)),
    "data parallel, uneven": (sharding("sample"), (3,)),
    "tensor parallel": (sharding("parameter"), (2,)),
    "sums everywhere": (sharding("reduction"), (2,)),
    "attributes": (sharding("attribute"), (2,)),
    "data and tensor parallel": (sharding("sample", "parameter"), (2, 2)),
    "three axes": (sharding("sample", "parameter", "reduction"), (2, 2, 2)),
    "megatron with sequence": (megatron, (2,)),
    "megatron with sequence and data": (megatron, (2, 2)),
    "zero 1": (sharding("sample", zero=1), (2,)),
    "zero 2": (sharding("sample", zero=2), (2,)),
    "zero 3": (sharding("sample", zero=3), (2,)),
    "zero 3, two axes": (sharding("sample", "sample", zero=3), (2, 2)),
    "zero 3 and tensor parallel": (sharding("sample", "parameter", zero=3), (2, 2)),
}


@pytest.mark.parametrize(("name", "model"), crossed(PLANS, ["gpt", "mlp", "cnn"], every=2))
def test_loss_and_gradients_equal_torch(
    name: str, model: str, request: pytest.FixtureRequest
) -> None:
    case = request.getfixturevalue(model)
    choose, shape = PLANS[name]
    assert_equal_to_torch(case, make_plan(case, choose, shape))


def test_schedules_that_are_simulated_only_are_refused(mlp: Case) -> None:
    plan = make_plan(mlp, whole, (1,), (1,), num_microbatches=2)
    orders = ("rank 0: 0F0 0B0", "rank 1: 0F1 1F0 1B0 1F1 1B1 0B1")
    twice = replace(plan, schedule="custom", orders=orders)
    with pytest.raises(ValueError, match="which is simulated only; the executor runs a stage"):
        lower(twice, mlp.graph)


def test_a_plans_own_orders_are_run(mlp: Case) -> None:
    plan = make_plan(mlp, whole, (1,), (1,), num_microbatches=2)
    orders = ("rank 0: 0F0 0F1 0B0 0B1", "rank 1: 1F0 1B0 1F1 1B1")
    custom = replace(plan, schedule="custom", orders=orders)
    assert_equal_to_torch(mlp, custom)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("shapes", [((1,), (1,)), ((1,), (2,)), ((2,), (1,), (2,))])
def test_pipelines_equal_torch(
    gpt: Case, schedule: str, num_microbatches: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    plan = make_plan(
        gpt,
        sharding("parameter", zero=1),
        *shapes,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    assert_equal_to_torch(gpt, plan)


@pytest.mark.parametrize(
    ("choose", "shape"),
    [(whole, (2,)), (whole, (2, 2)), (sharding("sample", "parameter"), (2, 2))],
)
def test_what_two_devices_fetch_in_parts_and_share_equals_torch(
    gpt: Case, choose: Chooser, shape: tuple[int, ...]
) -> None:
    """Over a slow network each device of a node fetches a part, and the node joins the parts."""
    plan = make_plan(gpt, choose, shape, shape, num_microbatches=2)
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=plan.num_devices // 2)
    slow = replace(cluster.inter_node, bandwidth_gb_s=1e-3, latency_us=0.0, num_cards=1)
    far = replace(plan, cluster=replace(cluster, inter_node=slow))
    program = lower(far, gpt.graph)
    tasks = [str(instruction) for instruction in program.ranks[-1].instructions]
    near = [str(instruction) for instruction in lower(plan, gpt.graph).ranks[-1].instructions]
    assert sum("⇢" in task for task in tasks) > sum("⇢" in task for task in near)
    verify(program)
    assert_equal_to_torch(gpt, far)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_microbatches_equal_torch_at_every_zero_stage(gpt: Case, zero: int) -> None:
    plan = make_plan(gpt, sharding("sample", zero=zero), (2,), num_microbatches=2)
    assert_equal_to_torch(gpt, plan)


def test_batch_norm_statistics_are_those_of_the_microbatch(cnn: Case) -> None:
    plan = make_plan(cnn, sharding("sample"), (2,), num_microbatches=2)
    assert_equal_to_torch(cnn, plan)


def test_an_operator_pinned_on_one_index_runs_there_only(mlp: Case) -> None:
    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        pinned = Pin(1) if operator.name == "layers.1" else REPLICATE
        return Choice((pinned,))

    plan = make_plan(mlp, choose, (2,))
    ran = [
        {i.operator for i in rank.instructions if isinstance(i, Forward)}
        for rank in lower(plan, mlp.graph).ranks
    ]
    assert "layers.1" not in ran[0]
    assert "layers.1" in ran[1]
    assert_equal_to_torch(mlp, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(12), 2))
@pytest.mark.parametrize("model", ["gpt", "mlp", "cnn"])
def test_random_plans_equal_torch(model: str, seed: int, request: pytest.FixtureRequest) -> None:
    case = request.getfixturevalue(model)
    assert_equal_to_torch(case, random_plan(case, seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(100, 200), 1))
@pytest.mark.parametrize("model", ["gpt", "mlp", "cnn"])
def test_many_random_plans_equal_torch(
    model: str, seed: int, request: pytest.FixtureRequest
) -> None:
    case = request.getfixturevalue(model)
    assert_equal_to_torch(case, random_plan(case, seed))


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_equal_torch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [rng.randrange(3, 12) for _ in range(rng.randrange(2, 5))]
    batch = rng.randrange(3, 9)
    model = MLP(sizes, loss=rng.choice(["mse", "cross_entropy"]))
    target = torch.randint(0, sizes[-1], (batch,))
    if model.loss == "mse":
        target = torch.randn(batch, sizes[-1])
    case = make_case(model, x=torch.randn(batch, sizes[0]), target=target)
    for number in range(3):
        assert_equal_to_torch(case, make_plan(case, drawing(10 * seed + number), (2,)))


@pytest.mark.parametrize(
    ("optimizer", "zero", "shapes"),
    crossed(["sgd", "adam"], [0, 1, 3], [((2,),), ((1,), (2,))], every=2),
)
def test_parameters_after_three_steps_equal_torch_optim(
    gpt: Case, optimizer: str, zero: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    training = Training(optimizer=optimizer, learning_rate=0.01)
    choose = sharding("sample", zero=zero)
    plan = make_plan(gpt, choose, *shapes, num_microbatches=2, training=training)
    assert_trains_like_torch(gpt, plan, warmup=1)


def test_training_does_not_change_the_given_state(mlp: Case) -> None:
    before = {name: tensor.clone() for name, tensor in mlp.model.state_dict().items()}
    execute(make_plan(mlp, whole, (1,)), mlp.graph, model_state(mlp.model), mlp.batch, steps=2)
    for name, tensor in mlp.model.state_dict().items():
        assert torch.equal(tensor, before[name])


# -- programs -----------------------------------------------------------------------------------


def two_stages(case: Case) -> Program:
    return lower(make_plan(case, sharding("sample"), (1,), (2,), num_microbatches=2), case.graph)


def tampered(program: Program, rank: int, body: list[Instruction]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = replace(ranks[rank], instructions=tuple(body))
    return replace(program, ranks=tuple(ranks))


def numbers_of(program: Program, rank: int, *kinds: type) -> Iterator[int]:
    for number, instruction in enumerate(program.ranks[rank].instructions):
        if isinstance(instruction, kinds):
            yield number


def test_every_program_verifies_and_prints(gpt: Case) -> None:
    program = two_stages(gpt)
    verify(program)
    rows = grid(program).splitlines()
    assert [row[:6] for row in rows] == ["rank 0", "rank 1", "rank 2"]
    assert "tokens F0" in rows[0]
    assert "receive" in rows[2]


def test_a_dropped_send_is_found(gpt: Case) -> None:
    program = two_stages(gpt)
    body = list(program.ranks[0].instructions)
    del body[next(numbers_of(program, 0, Send))]
    with pytest.raises(
        ValueError, match=r"rank 1 is at 'receive .*waits for a message from rank 0"
    ):
        verify(tampered(program, 0, body))


def test_a_dropped_receive_is_found(gpt: Case) -> None:
    program = two_stages(gpt)
    body = list(program.ranks[1].instructions)
    last = list(numbers_of(program, 1, Receive))[-1]
    value = body[last].writes
    body = [i for n, i in enumerate(body) if n != last and not {*i.reads, *i.writes} & set(value)]
    with pytest.raises(ValueError, match=r"rank 1|never receives"):
        verify(tampered(program, 1, body))


def test_swapped_collectives_are_found(gpt: Case) -> None:
    program = lower(make_plan(gpt, sharding("sample"), (2,)), gpt.graph)
    body = list(program.ranks[1].instructions)
    syncs = [n for n in numbers_of(program, 1, Convert, Bundle) if body[n].kind.is_communication]
    first, second = syncs[:2]
    late = body[first : first + 2]  # and the free that follows it
    body = [*body[:first], *body[first + 2 : second + 2], *late, *body[second + 2 :]]
    with pytest.raises(ValueError, match=r"rank 0 is at .* sync .* rank 1 is at .* sync"):
        verify(tampered(program, 1, body))


def test_use_after_free_is_found(gpt: Case) -> None:
    program = two_stages(gpt)
    body = list(program.ranks[0].instructions)
    backward = next(numbers_of(program, 0, Backward))
    body.insert(backward, Free((body[backward].reads[0],)))
    with pytest.raises(ValueError, match=r"reads .* after it was freed"):
        verify(tampered(program, 0, body))


def test_a_leak_is_found(gpt: Case) -> None:
    program = two_stages(gpt)
    body = list(program.ranks[0].instructions)
    del body[next(numbers_of(program, 0, Free))]
    with pytest.raises(ValueError, match="never frees"):
        verify(tampered(program, 0, body))


def test_zero_3_keeps_no_gathered_weights(mlp: Case) -> None:
    plan = make_plan(mlp, sharding("sample", zero=3), (2,))
    program = lower(plan, mlp.graph)

    def run(interpreter: Interpreter) -> list[bool]:
        """Whether what forward gathered is gone when the first backward pass begins.

        The last that are gathered are those of the first passes of backward, weight and bias.
        """
        seen: list[StorageWeakRef] = []
        expired: list[bool] = []
        for instruction, action in zip(
            interpreter.mine.instructions, interpreter._actions, strict=True
        ):
            if isinstance(instruction, Backward) and not expired:
                expired = [reference.expired() for reference in seen]
            action()
            if isinstance(instruction, Convert) and instruction.task.endswith("gather"):
                tensor = interpreter._state.memory.values[instruction.writes[0]]
                seen.append(StorageWeakRef(tensor.untyped_storage()))
        return expired[: -2 * PREFETCH]

    def rank(comm: object) -> list[bool]:
        interpreter = Interpreter(program, comm, model_state(mlp.model))  # type: ignore[arg-type]
        interpreter._state.batch = mlp.batch
        with torch.no_grad():
            return run(interpreter)

    for expired in run_local(2, rank):
        assert expired
        assert all(expired)


# -- measuring ----------------------------------------------------------------------------------


def test_the_timeline_has_the_task_names_of_the_simulator(gpt: Case) -> None:
    plan = make_plan(gpt, megatron, (2,))
    result = execute(plan, gpt.graph, model_state(gpt.model), gpt.batch, steps=3)
    names = set(result.timeline.names)
    assert {"blocks.0.qkv forward", "blocks.0.qkv backward", "blocks.0.qkv update"} <= names
    assert "blocks.0.down → blocks.0.add_1" in names
    assert "blocks.0.norm1 sync" in names
    assert result.timeline.label == "measured"
    assert result.timeline.lanes[:2] == ("rank 0 · compute", "rank 0 · communication")
    assert result.timeline.begin_ns >= 0
    assert len(result.losses) == len(result.step_times) == 3
    assert result.timeline.duration == pytest.approx(result.step_time, rel=0.2)


def test_transfers_between_stages_have_the_names_of_the_simulator(gpt: Case) -> None:
    plan = make_plan(gpt, whole, (1,), (1,), num_microbatches=2)
    result = execute(plan, gpt.graph, model_state(gpt.model), gpt.batch)
    names = set(result.timeline.names)
    assert {"stage 0 ⇢ stage 1, microbatch 1", "stage 1 ⇢ stage 0, microbatch 0"} <= names
    assert "tokens ↔ head" in names


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_predicted_and_measured_timelines_have_the_same_tasks(gpt: Case, seed: int) -> None:
    """But for pieces of a conversion that cannot go by themselves: they are priced so."""
    plan = random_plan(gpt, seed)
    predicted = simulate_plan(plan, gpt.graph, RooflineCosts()).timeline.names
    result = execute(plan, gpt.graph, model_state(gpt.model), gpt.batch)
    unpriced = {f"{o.name} source" for o in gpt.graph.operators} | {"loss"}
    ours, theirs = (
        {re.sub(r", piece \d+", "", name) for name in names}
        for names in (predicted, result.timeline.names)
    )
    assert theirs - unpriced == ours


# -- errors -------------------------------------------------------------------------------------


def test_a_batch_of_another_shape_is_refused(mlp: Case) -> None:
    plan = make_plan(mlp, whole, (1,))
    batch = {**mlp.batch, "x": torch.randn(5, 10)}
    with pytest.raises(ValueError, match=r"'x' is \(5, 10\) .* captured with \(6, 10\)"):
        execute(plan, mlp.graph, model_state(mlp.model), batch)
    with pytest.raises(ValueError, match="no input 'target'"):
        execute(plan, mlp.graph, model_state(mlp.model), {"x": mlp.batch["x"]})


def test_a_state_without_a_parameter_is_refused(mlp: Case) -> None:
    state = model_state(mlp.model)
    del state["layers.0.bias"]
    with pytest.raises(ValueError, match=r"no 'layers\.0\.bias'"):
        execute(make_plan(mlp, whole, (1,)), mlp.graph, state, mlp.batch)


# -- processes ----------------------------------------------------------------------------------

MODEL = """
import os
import torch
from examples.models import SmallGPT

def gpt():
    model = SmallGPT(num_layers=2, hidden=24, num_heads=4, vocabulary=50, sequence=10)
    ids = torch.randint(0, 50, (4, 10))
    return model, {"input_ids": ids, "labels": ids}

def broken():
    if os.environ["RANK"] == "1":
        raise KeyError("a story")
    return gpt()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "launched_model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
    return tmp_path


def launched(
    case: Case,
    folder: Path,
    plan: Plan,
    model: str = "gpt",
    *,
    steps: int = 1,
    warmup: int = 0,
    timeout: float = 600.0,
) -> ExecutionResult:
    path = folder / "plan.json"
    plan.save(path)
    request = RunRequest(
        plan=path, model=f"launched_model:{model}", steps=steps, warmup=warmup, check=True
    )
    return launch(request, timeout=timeout, folder=folder)


PROCESSES: dict[str, tuple[Chooser, tuple[tuple[int, ...], ...]]] = {
    "drawn": (drawing(3), ((2,), (1,))),
    "zero 2": (sharding("sample", zero=2), ((1,), (2,))),
    "drawn otherwise": (drawing(4), ((2,), (1,))),
    "and otherwise": (drawing(5), ((2,), (1,))),
}


@pytest.mark.slow
@pytest.mark.parametrize("zero", few([2, 1], 1))
def test_processes_publish_buckets_by_one_collective_each(
    gpt: Case, folder: Path, zero: int
) -> None:
    """What is updated reaches every process: the steps behind the first are those without."""
    alone = make_plan(gpt, sharding("sample", zero=zero), (2,), num_microbatches=2)
    plans = [replace(alone, bucket_bytes=least) for least in (0, 10**9)]
    programs = [lower(plan, gpt.graph) for plan in plans]
    published = [
        len([n for n in numbers_of(p, 0, Convert, Bundle) if is_publish(p, n)]) for p in programs
    ]
    assert published[1] == 1 < published[0]
    results = [launched(gpt, folder, plan, steps=3) for plan in plans]
    for result in results:
        assert result.verdict is not None
        assert 0 < result.verdict.max_error < TOLERANCE
    losses = [result.losses for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
    assert len({round(loss, 6) for loss in losses[0]}) == 3


def is_publish(program: Program, number: int) -> bool:
    """Whether an instruction of rank 0 brings updated parameters to those who use them."""
    instruction = program.ranks[0].instructions[number]
    return isinstance(instruction, Convert | Bundle) and instruction.task.endswith(" publish")


@pytest.mark.slow
@pytest.mark.parametrize("name", few(PROCESSES, 1))
def test_processes_equal_torch(gpt: Case, folder: Path, name: str) -> None:
    choose, shapes = PROCESSES[name]
    plan = make_plan(gpt, choose, *shapes, num_microbatches=2)
    report = launched(gpt, folder, plan, steps=2, warmup=1)
    assert report.verdict is not None
    assert report.verdict.agrees
    assert 0 < report.verdict.max_error < TOLERANCE
    assert len(report.verdict.errors) == 1 + len(list(gpt.model.parameters()))
    assert len(report.losses) == 2
    assert {lane[:6] for lane in report.timeline.lanes} == {"rank 0", "rank 1", "rank 2"}


@pytest.mark.long  # In a few words also in `runs/test_faults.py`.
def test_the_error_of_a_rank_is_shown(gpt: Case, folder: Path) -> None:
    plan = make_plan(gpt, sharding("sample"), (2,))
    with pytest.raises(RuntimeError, match="rank 1 ended with KeyError: 'a story'"):
        launched(gpt, folder, plan, "broken")


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_stopped(gpt: Case, folder: Path) -> None:
    plan = make_plan(gpt, sharding("sample"), (2,))
    with pytest.raises(TimeoutError, match=r"longer than 0.1 s"):
        launched(gpt, folder, plan, timeout=0.1)
