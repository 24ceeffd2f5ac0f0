"""The NCCL backend, with NCCL played by threads: what it issues ends, and equals one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.models import MLP
from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.nccl import NcclCommunicator, join_nccl
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.communication.end_to_end import end_to_end
from stratagem.executor.cuda.nccl_calls import rounds
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.instructions import Backward, Convert, Forward, Receive, Send
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.results.measured_timeline import timeline
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import RunOptions, train
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.stage.stage_blocks import PREFETCH
from stratagem.simulator.timeline.timeline import lane_name
from tests.executor.equality.pipelines.test_chimera import random_plan as opposite_plan
from tests.executor.equality.test_models_executed import case_of
from tests.support.cuda.fake_nccl import FakeCommunicator, StuckError, run_fake
from tests.support.cuda.kernel_places import issued
from tests.support.plans import (
    TOLERANCE,
    Case,
    backward_of,
    few,
    gradients_of,
    make_case,
    make_plan,
    megatron,
    random_plan,
    sharding,
)
from tests.support.workers.communicator_calls import operations

torch.set_num_threads(1)


def run_plan(case: Case, plan: Plan, *, steps: int = 1) -> ExecutionResult:
    program, state = lower(plan, case.graph), model_state(case.model)
    batches = Batches(case.batch, case.graph, buffers=state)

    def run(comm: Communicator) -> ExecutionResult:
        options = RunOptions(steps=steps, gradients=True)
        return train(Interpreter(program, comm, state), batches, options, place=Place())

    return run_fake(program.world_size, run)[0]


def assert_equals_torch(case: Case, plan: Plan) -> None:
    result = run_plan(case, plan)
    model = copy.deepcopy(case.model)
    loss = backward_of(model, case.batch, plan.num_microbatches if case.by_microbatch else 1)
    assert result.losses[0] == pytest.approx(loss, rel=TOLERANCE)
    assert result.gradients is not None
    truths = gradients_of(model)
    errors = gradient_errors(result.gradients, truths)
    assert errors.keys() == truths.keys()
    assert max(errors.values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "cnn"])
@pytest.mark.parametrize("seed", few(range(4), 1))
def test_random_plans_equal_torch(model: str, seed: int, request: pytest.FixtureRequest) -> None:
    case = request.getfixturevalue(model)
    assert_equals_torch(case, random_plan(case, seed))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_pipelines_equal_torch(gpt: Case, schedule: str) -> None:
    plan = make_plan(gpt, megatron, (2,), (1,), (2,), num_microbatches=4, schedule=schedule)
    assert_equals_torch(gpt, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan_of", "seed"),
    [("lstm", random_plan, 249), ("gpt", random_plan, 434), ("lstm", opposite_plan, 28)],
)
def test_traffic_both_ways_over_two_axes_equals_torch(
    model: str, plan_of: Callable[[Case, int], Plan], seed: int
) -> None:
    case = case_of(model)
    plan = plan_of(case, seed)
    assert max(len(stage.mesh.shape) for stage in plan.stages) == 2
    assert_equals_torch(case, plan)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_uneven_shards_and_zero_equal_torch(mlp: Case, zero: int) -> None:
    assert_equals_torch(mlp, make_plan(mlp, sharding("sample", zero=zero), (3,)))


def test_steps_in_bfloat16_are_those_of_the_local_backend(mlp: Case) -> None:
    plan = make_plan(
        mlp, sharding("sample", zero=1), (2,), (1,), training=Training(precision="bfloat16")
    )
    ours = run_plan(mlp, plan, steps=3)
    theirs = execute(plan, mlp.graph, model_state(mlp.model), mlp.batch, steps=3)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name], parameter)


def test_the_timeline_has_a_row_for_every_task(gpt: Case) -> None:
    plan = make_plan(gpt, sharding("sample"), (2,), (2,), num_microbatches=2)
    ours = run_plan(gpt, plan).timeline
    local = execute(plan, gpt.graph, model_state(gpt.model), gpt.batch).timeline
    assert set(ours.names) == set(local.names)
    assert ours.lanes == local.lanes
    assert ours.start.min() >= 0
    assert ours.duration > 0


def test_messages_of_one_task_may_end_before_those_in_front_of_them() -> None:
    """They were posted early, and their task ends with the last of them."""
    case = case_of("lstm")
    program = lower(opposite_plan(case, 28), case.graph)
    spans = {
        rank.rank: [
            (n, 10_000 - n) if isinstance(each, Receive) else (n, n + 1)
            for n, each in enumerate(rank.instructions)
        ]
        for rank in program.ranks
    }
    found = timeline(program, spans)
    for rank in program.ranks:
        first = next(n for n, each in enumerate(rank.instructions) if isinstance(each, Receive))
        lane = found.lanes.index(lane_name(f"rank {rank.rank}", "communication"))
        assert found.end[found.lane == lane].max() == 10_000 - first


# -- what goes on beside compute ----------------------------------------------------------------


def calls_of(case: Case, plan: Plan) -> dict[str, Counter[str]]:
    """How often rank 0 calls NCCL for what, on the compute stream and on others."""
    program, state = lower(plan, case.graph), model_state(case.model)

    def rank(comm: NcclCommunicator) -> None:
        Interpreter(program, comm, state).step(case.batch)

    found = {"compute": Counter[str](), "aside": Counter[str]()}
    for entry in issued(program.world_size, rank)[0]:
        found["compute" if entry.stream == 1 else "aside"].update(entry.calls)
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_are_gathered_and_published_beside_compute(gpt: Case, zero: int) -> None:
    """As the simulator has it: what computes waits for a gather only where it needs it."""
    calls = calls_of(gpt, make_plan(gpt, sharding("sample", zero=zero), (2,)))
    assert calls["compute"].keys() == {"allReduce"}  # The loss, and the barriers.
    assert calls["aside"].keys() == {"allGather", "reduceScatter"}
    trained = sum(each.trainable for each in gpt.graph.parameters)
    assert calls["aside"]["allGather"] >= trained


def test_gradients_of_inputs_that_come_first_go_while_those_of_weights_are_made(
    gpt: Case,
) -> None:
    plan = make_plan(gpt, megatron, (2,))
    whole, first = (
        calls_of(gpt, replace(plan, inputs_first=inputs_first)) for inputs_first in (False, True)
    )
    moved = whole["compute"]["reduceScatter"] - first["compute"]["reduceScatter"]
    assert moved == first["aside"]["reduceScatter"] - whole["aside"]["reduceScatter"] > 0
    assert_equals_torch(gpt, replace(plan, inputs_first=True))


def test_a_weight_is_gathered_while_the_operator_before_its_own_runs(mlp: Case) -> None:
    """Behind the pass that is `PREFETCH` before, in forward and in backward, and no sooner."""
    program = lower(make_plan(mlp, sharding("sample", zero=3), (2,)), mlp.graph)
    weighs = {each.name for each in mlp.graph.operators if each.weights}
    begun: dict[str, int] = {}
    passes = 0
    for each in program.ranks[0].instructions:
        if isinstance(each, Convert) and each.task.endswith(" gather"):
            begun[each.writes[0]] = passes
        elif isinstance(each, Forward | Backward) and each.operator in weighs:
            anew = each.anew if isinstance(each, Backward) else ()
            read = each.weights if isinstance(each, Forward) else [one.value for one in anew]
            first = len(weighs) * isinstance(each, Backward)
            for value in read:
                assert begun[str(value)] == max(first, passes - PREFETCH + 1)
            passes += 1
    assert passes == 2 * len(weighs)
    assert len(begun) == 4 * len(weighs)


def test_what_is_gathered_in_rows_is_not_copied(mlp: Case, monkeypatch: Any) -> None:
    """The pieces of a gather lie one behind the other, which is how a row of elements lies."""
    copies = []

    def watched(chunks: Sequence[Tensor]) -> Tensor:
        made = end_to_end(chunks)
        copies.append(made.data_ptr() != chunks[0].data_ptr())
        return made

    monkeypatch.setattr("stratagem.executor.resharding.conversions.end_to_end", watched)
    case = make_case(MLP([8, 6, 4]), x=torch.randn(6, 8), target=torch.randint(0, 4, (6,)))
    run_plan(case, make_plan(case, sharding("sample", zero=3), (2,)))
    assert copies
    assert not any(copies)


# -- operations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_collective_is_that_of_the_local_backend(dtype: torch.dtype) -> None:
    def rank(comm: Communicator) -> dict[str, Any]:
        comm.prepare([(0, 1, 2), (2, 0)])
        found = operations(comm, (0, 1, 2), dtype)
        if comm.rank in (0, 2):
            found |= {f"{k} of two": v for k, v in operations(comm, (2, 0), dtype).items()}
        pending = comm.start_reduce_scatter([torch.ones(1 + i) for i in range(3)], (0, 1, 2))
        found["uneven, later"] = pending.finish()
        comm.barrier()
        return {**found, "sent": dict(comm.sent)}

    for ours, theirs in zip(run_fake(3, rank), run_local(3, rank), strict=True):
        assert ours.keys() == theirs.keys()
        for name, result in theirs.items():
            assert same(ours[name], result), name


@pytest.mark.parametrize("lengths", [(4, 4, 3), (5, 5, 5), (2, 1, 0)])
@pytest.mark.parametrize("group", [(0, 1, 2), (2, 0, 1)])
def test_ranges_of_nearly_equal_length_go_as_one_size(
    group: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    """As ZeRO cuts a row: the last is shorter, or empty, and nothing of a filling is seen."""

    def rank(comm: Communicator) -> dict[str, Any]:
        comm.prepare([group])
        place = group.index(comm.rank)
        row = torch.arange(float(sum(lengths))) + 100 * comm.rank
        chunks = row.split(list(lengths))
        shapes = [(length,) for length in lengths]
        pending = comm.start_reduce_scatter(chunks, group)
        return {
            "gathered": comm.all_gather(chunks[place], shapes, group),
            "summed": comm.reduce_scatter(chunks, group),
            "summed later": pending.finish(),
            "sent": dict(comm.sent),
        }

    found = run_fake(3, rank)
    for ours, theirs in zip(found, run_local(3, rank), strict=True):
        for name, result in theirs.items():
            assert same(ours[name], result), name
    everything = torch.arange(float(sum(lengths)))
    whole = torch.cat([found[member]["summed"] for member in group])
    assert torch.equal(whole, 3 * everything + 300)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_chunks_that_lie_one_behind_the_other_are_not_copied() -> None:
    flat = torch.arange(12.0)
    views = flat[2:].split([4, 1, 5])
    assert end_to_end(views).data_ptr() == flat[2:].data_ptr()
    assert torch.equal(end_to_end(views), flat[2:])
    swapped = [views[1], views[0]]
    strided = [flat.view(3, 4)[:, :2], flat[4:6]]
    apart = [flat[:2], flat.clone()[2:4]]
    for chunks in (swapped, strided, apart):
        made = end_to_end(chunks)
        assert torch.equal(made, torch.cat([chunk.reshape(-1) for chunk in chunks]))
        assert made.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()


def test_a_reduce_scatter_of_a_bucket_sends_from_where_it_was_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chunks of all gradients are laid out once, in the order in which members get them.

    The weights are cut along their columns, of which they have more than rows.
    """
    torch.manual_seed(4)
    case = make_case(MLP([8, 6, 4]), x=torch.randn(6, 8), target=torch.randint(0, 4, (6,)))
    plan = make_plan(case, sharding("sample", zero=2), (2,))
    copied = []

    def watched(chunks: Sequence[Tensor]) -> Tensor:
        made = end_to_end(chunks)
        copied.append(made.data_ptr() != chunks[0].data_ptr())
        return made

    monkeypatch.setattr("stratagem.executor.cuda.nccl_calls.end_to_end", watched)
    assert_equals_torch(case, replace(plan, bucket_bytes=10**6))
    assert copied == [False] * 2


def test_messages_arrive_in_the_order_of_sends_whatever_their_tags() -> None:
    def rank(comm: NcclCommunicator) -> list[float]:
        comm.open([(0, 1)])
        if comm.rank == 0:
            for tag in (5, 3):
                comm.send(torch.full((2,), float(tag)), 1, tag)
            return []
        comm.post([(2,)], torch.float32, 0, 5)
        comm.post([(2,)], torch.float32, 0, 3)
        return [float(comm.recv((2,), torch.float32, 0, tag)[0]) for tag in (3, 5)]

    assert run_fake(2, rank)[1] == [3.0, 5.0]


def test_receives_that_are_not_posted_in_time_hang(gpt: Case, monkeypatch: Any) -> None:
    """The stand-in is as strict as it says: a pipeline with late receives does not end."""
    monkeypatch.setattr("tests.support.cuda.fake_nccl.PATIENCE", 1.0)

    def rank(comm: NcclCommunicator) -> None:
        comm.open([(0, 1), (1, 0)])
        comm.send(torch.ones(1), 1 - comm.rank, 1)
        comm.post([(1,)], torch.float32, 1 - comm.rank, 1)

    with pytest.raises(StuckError):
        run_fake(2, rank)


def test_nccl_is_asked_what_went_wrong_with_what_it_was_given(monkeypatch: Any) -> None:
    """Of every communicator, since each knows of its own operations only, until all have ended."""
    faulty: dict[int, str] = {}

    def check(comm: FakeCommunicator) -> None:
        assert comm.size, "NCCL is asked about a communicator that is gone"
        if comm.size == faulty.get(comm.rank, 0):
            raise RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error")

    monkeypatch.setattr(FakeCommunicator, "check_async_error", check)

    def rank(comm: NcclCommunicator) -> tuple[str, NcclCommunicator]:
        comm.prepare([(0, 1, 2)])
        comm.open([(0, 1)])
        assert comm.fault() == ""
        comm.barrier()
        faulty[0] = 2  # Only the channel joins two ranks, in which rank 0 of the world is 0 too.
        comm.barrier()
        found = comm.fault()
        comm.barrier()
        faulty.clear()
        comm.barrier()
        return found, comm

    found = run_fake(3, rank)
    assert [told for told, _ in found] == [
        "RuntimeError: NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
        "",
        "",
    ]
    assert [comm.fault() for _, comm in found] == [""] * 3


# -- refusals -----------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused() -> None:
    def rank(comm: NcclCommunicator) -> None:
        pair = (comm.rank, (comm.rank + 1) % 3)
        with pytest.raises(ValueError, match=r"group \(\d, \d\) was not prepared; pass it to"):
            comm.all_reduce(torch.ones(1), pair)
        with pytest.raises(ValueError, match=r"group \(0, 7\) is not made of ranks below 3"):
            comm.prepare([(0, 7)])
        with pytest.raises(ValueError, match=r"no channel from rank \d to rank 7; open\(\) it"):
            comm.send(torch.ones(1), 7, 1)
        with pytest.raises(RuntimeError, match=r"with tag 4, but has posted no such receive"):
            comm.recv((1,), torch.float32, 0, 4)
        with pytest.raises(ValueError, match=r"does not add up torch.bool; it does torch.float64"):
            comm.all_reduce(torch.ones(1, dtype=torch.bool), (0, 1, 2))

    run_fake(3, rank)


def test_without_cuda_the_backend_says_what_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="backend 'nccl' needs a CUDA device, and torch"):
        join_nccl()


def test_without_cupy_the_backend_names_the_install(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("stratagem.executor.cuda.cupy_kernels.has_cupy", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs CuPy.*pip install 'stratagem\[gpu\]'"):
        join_nccl()


def test_disjoint_groups_are_split_together() -> None:
    groups = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]
    made = rounds(groups)
    assert sorted(group for together in made for group in together) == sorted(groups)
    assert len(made) == 3
    for together in made:
        ranks = [rank for group in together for rank in group]
        assert len(ranks) == len(set(ranks))


def test_labels_leave_tag_0_to_messages_inside_conversions(gpt: Case) -> None:
    program = lower(make_plan(gpt, megatron, (1,), (1,), num_microbatches=2), gpt.graph)
    labels = {
        i.label
        for each in program.ranks
        for i in each.instructions
        if isinstance(i, Send | Receive)
    }
    assert set(program.tags) == labels
    assert sorted(program.tags.values()) == list(range(1, len(labels) + 1))
