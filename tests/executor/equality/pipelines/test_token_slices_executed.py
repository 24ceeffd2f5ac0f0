"""Plans that slice tokens, run: they equal one process of torch, and what was predicted."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.models import SmallGPT
from stratagem.executor import execute, lower, model_state
from stratagem.executor.program.instructions import Forward
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.verify import verify
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import TimingKey
from stratagem.profiler.costs.learn_from_runs import learn
from stratagem.profiler.machine.device_clocks import describe_environment
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import REPLICATE, Pin, Placement, Shard, check_config
from stratagem.simulator.graph.token_slices import Slices, token_dims
from stratagem.simulator.kernel_times.cost_model import Direction, RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.token_slice_plan import sliced_plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.pieces_and_fusion import check_pieces
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.executor.programs.test_live import measured_peaks
from tests.simulator.torch_ops.test_dropout import SEED, Dropped
from tests.support.plans import (
    TOLERANCE,
    Case,
    Chooser,
    assert_equal_to_torch,
    assert_runs_like_torch,
    assert_train_alike,
    crossed,
    few,
    make_case,
    make_plan,
    random_plan,
    sharding,
    whole,
)
from tests.support.small_models import SmallLlama

torch.set_num_threads(1)

SGD = Training(optimizer="sgd", learning_rate=0.05)


@cache
def case_of(name: str) -> Case:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, 50, (4, 10)), torch.randint(0, 50, (4, 10))
    labels[0, :3] = -100
    if name == "llama":
        model: torch.nn.Module = SmallLlama(num_layers=2, hidden=24, vocabulary=50)
    else:
        model = SmallGPT(num_layers=2, hidden=24, num_heads=4, vocabulary=50, sequence=10)
    return make_case(model, input_ids=ids, labels=labels)


def sliced(
    case: Case,
    slices: Slices,
    *shapes: tuple[int, ...],
    choose: Chooser = whole,
    parts: int = 2,
    training: Training = SGD,
) -> Plan:
    plan = make_plan(
        case, choose, *(shapes or ((1,), (1,))), num_microbatches=parts, training=training
    )
    return replace(plan, schedule="terapipe", token_slices=slices)


def heads(operator: Operator, shape: tuple[int, ...]) -> Choice:
    """Megatron's tensor parallelism along the first axis, samples along the second."""
    kinds = ("head", "kv_head", "feature", "parameter")
    config: list[Placement] = []
    for axis in range(len(shape)):
        config.append(REPLICATE)
        for dim in operator.dims:
            named = dim.name in kinds or dim.kind.value in kinds
            if dim.kind.value == "sample" if axis else named:
                tried = (*config[:-1], Shard(dim.name), *[REPLICATE] * (len(shape) - axis - 1))
                try:
                    check_config(operator, tried, shape)
                except ValueError:
                    continue
                config[-1] = Shard(dim.name)
                break
    return Choice(tuple(config))


def recomputing(choose: Chooser) -> Chooser:
    return lambda operator, shape: replace(choose(operator, shape), recompute=True)


# -- equality -----------------------------------------------------------------------------------

PLANS: dict[str, tuple[Slices, tuple[tuple[int, ...], ...], Chooser, int]] = {
    "two stages": (2, ((1,), (1,)), whole, 2),
    "four stages, unequal slices": ((4, 3, 2, 1), ((1,),) * 4, whole, 2),
    "one stage": ((1, 9), ((1,),), whole, 1),
    "tensor parallel": ((6, 4), ((2,), (2,)), heads, 1),
    "tensor and data parallel": ((7, 3), ((2, 2), (1,)), heads, 1),
    "zero 2": (2, ((2,), (1,)), sharding("sample", zero=2), 2),
    "zero 3, recomputed": ((6, 4), ((2,), (1,)), recomputing(sharding("sample", zero=3)), 2),
    "recomputed": ((5, 2, 3), ((1,), (1,), (1,)), recomputing(whole), 1),
    "tensor parallel, recomputed": ((6, 4), ((2,), (2,)), recomputing(heads), 2),
}


@pytest.mark.parametrize(("name", "model"), crossed(PLANS, ["gpt", "llama"], every=2))
def test_slices_train_like_torch(model: str, name: str) -> None:
    slices, shapes, choose, parts = PLANS[name]
    case = case_of(model)
    plan = sliced(case, slices, *shapes, choose=choose, parts=parts)
    program = lower(plan, case.graph)
    verify(program)
    assert_runs_like_torch(case, plan)


def drawn(case: Case, seed: int) -> Plan:
    """A random plan of at most six ranks, its positions whole and its tokens sliced."""
    rng = random.Random(seed)
    plan = random_plan(case, seed)
    while plan.num_ranks < len(plan.stages) or plan.num_devices > 6:
        plan = random_plan(case, rng.randrange(1000))
    dims = dict(zip(case.graph.names, token_dims(case.graph), strict=True))

    def unsharded(name: str, choice: Choice, shape: tuple[int, ...]) -> Choice:
        config = tuple(
            REPLICATE if isinstance(p, Shard) and p.dim in dims[name].all else p
            for p in choice.config
        )
        # Pieces cut samples or positions; all slices have an even number of them.
        chunks = rng.choice([1, 2])
        try:
            check_pieces(case.graph.operator(name), config, shape, chunks)
        except ValueError:
            chunks = 1
        return replace(choice, config=config, chunks=chunks)

    stages = tuple(
        replace(s, choices={n: unsharded(n, c, s.mesh.shape) for n, c in s.choices.items()})
        for s in plan.stages
    )
    slices = rng.choice([(4, 6), (2, 4, 4), (8, 2)])
    return replace(
        plan, stages=stages, schedule="terapipe", num_microbatches=1, token_slices=slices
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(4), 2))
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_random_plans_equal_torch(model: str, seed: int) -> None:
    case = case_of(model)
    assert_equal_to_torch(case, drawn(case, seed))


def test_pinned_operators_and_their_prefixes_run_in_one_place() -> None:
    case = case_of("gpt")
    pins = {"blocks.0.attention": 1, "blocks.1.attention": 0, "blocks.1.qkv": 1}

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        pin = pins.get(operator.name)
        return Choice((REPLICATE if pin is None else Pin(pin),))

    assert_equal_to_torch(case, sliced(case, (6, 4), (2,), choose=choose))


def test_orders_of_ones_own_are_run() -> None:
    """Backward of a microbatch before forward of the next; a backward in two parts."""
    case = case_of("gpt")
    plan = sliced(case, (6, 4))
    orders = (
        "rank 0: 0F0 0F0.1 0F1 0I0.1 0W0.1 0B0 0F1.1 0B1.1 0B1",
        "rank 1: 1F0 1F0.1 1B0.1 1I0 1W0 1F1 1F1.1 1B1.1 1B1",
    )
    plan = replace(plan, schedule="custom", orders=orders)
    verify(lower(plan, case.graph))
    assert_equal_to_torch(case, plan)
    simulation = simulate_plan(plan, case.graph, RooflineCosts())
    for rank, memory in enumerate(simulation.memory):
        assert simulation.memory_timeline(rank).peak == memory.peak


# -- dropout ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dropped() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (4, 6))
    return make_case(Dropped(), input_ids=ids, labels=ids.roll(-1, 1))


@pytest.mark.parametrize("slices", [3, (1, 5), (4, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_slices_drop_the_same(dropped: Case, slices: Slices, recompute: bool) -> None:
    """Of embeddings, probabilities and features; whole tokens' features in Dropout1d."""
    choose = recomputing(whole) if recompute else whole
    plan = replace(sliced(dropped, slices, choose=choose), seed=SEED)
    one = replace(make_plan(dropped, whole, (1,), training=SGD), seed=SEED)
    assert_train_alike(dropped, plan, one)


# -- what was predicted -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two stages", "tensor parallel", "recomputed"])
def test_measured_tasks_are_those_predicted(name: str) -> None:
    case = case_of("llama")
    slices, shapes, choose, parts = PLANS[name]
    plan = sliced(case, slices, *shapes, choose=choose, parts=parts)
    predicted = set(simulate_plan(plan, case.graph, RooflineCosts()).timeline.names)
    result = execute(plan, case.graph, model_state(case.model), case.batch)
    unpriced = {f"{o.name} source" for o in case.graph.operators} | {"loss"}
    assert set(result.timeline.names) - unpriced == predicted


@pytest.mark.parametrize(
    ("name", "model"),
    crossed(["two stages", "one stage", "recomputed"], ["gpt", "llama"], every=2),
)
def test_peaks_are_those_of_the_storages(model: str, name: str) -> None:
    case = case_of(model)
    slices, shapes, choose, parts = PLANS[name]
    plan = sliced(case, slices, *shapes, choose=choose, parts=parts)
    told = peak_bytes(lower(plan, case.graph))
    measured = measured_peaks(plan, case)
    for ours, theirs in zip(told, measured, strict=True):
        # What is told counts tensors that views free early until their last reader.
        assert 0.95 * theirs <= ours <= 1.15 * theirs, (told, measured)


def test_keys_are_read_as_they_were_made() -> None:
    """A prefix reads what the slices before it made; nothing is converted or sent twice."""
    case = case_of("gpt")
    program = lower(sliced(case, (4, 4, 2), (1,), parts=2), case.graph)
    found = [
        instruction
        for instruction in program.ranks[0].instructions
        if isinstance(instruction, Forward)
        and instruction.operator == "blocks.0.attention.keys"
        and not instruction.again
    ]
    assert [[operand.value for operand in each.inputs] for each in found] == [
        [f"blocks.0.qkv m{m}" for m in (own, *range(own - own % 3, own))] for own in range(6)
    ]


@pytest.mark.parametrize("slices", [(6, 4), (5, 3, 2)])
def test_a_run_teaches_what_each_slice_took(slices: tuple[int, ...], tmp_path: Path) -> None:
    """Slice k takes k + 1 µs forward, and k + 11 µs backward, where the last one comes first."""
    case, plan, count = case_of("gpt"), sliced(case_of("gpt"), slices), len(slices)
    run = execute(plan, case.graph, model_state(case.model), case.batch).timeline
    seen: Counter[tuple[int, str]] = Counter()
    end = run.end.copy()
    for row in np.argsort(run.start, kind="stable").tolist():
        key = int(run.lane[row]), run.names[row]
        turn = seen[key] % count
        seen[key] += 1
        if run.kinds[row] is TaskKind.FORWARD:
            end[row] = run.start[row] + 1000 * (turn + 1)
        if run.kinds[row] is TaskKind.BACKWARD:
            end[row] = run.start[row] + 1000 * (count - turn + 10)
    environment = describe_environment(load=1)
    parts = sliced_plan(plan, case.graph.microbatch(2)).slices
    with TimingCache(tmp_path / "timings.sqlite") as timings:
        kept = learn(replace(run, end=end), case.graph, plan, timings, environment)
        for name in ("blocks.0.up", "blocks.1.qkv", "blocks.0.attention", "head"):
            for k, part in enumerate(parts):
                for direction, least in ((Direction.FORWARD, 1), (Direction.BACKWARD, 11)):
                    local = part.graph.operator(name)
                    key = TimingKey(environment, local, "float32", direction)
                    found = timings.get(key)
                    assert found is not None
                    assert found.median_s == pytest.approx((k + least) * 1e-6)
                    assert found.repeats == 2
    assert kept > 8 * count


# -- processes ----------------------------------------------------------------------------------

MODEL = """
import torch
from tests.support.small_models import SmallLlama

def llama():
    ids = torch.randint(0, 50, (4, 10))
    return SmallLlama(num_layers=2, hidden=24, vocabulary=50), {"input_ids": ids, "labels": ids}
"""


@pytest.mark.slow
def test_processes_equal_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sliced_model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]), prepend=os.pathsep)
    case = case_of("llama")
    sliced(case, (5, 3, 2), (1,), (2,), choose=heads).save(tmp_path / "plan.json")
    model = "sliced_model:llama"
    request = RunRequest(plan=tmp_path / "plan.json", model=model, check=True, steps=2)
    report = launch(request, folder=tmp_path)
    assert report.verdict is not None
    assert 0 < report.verdict.max_error < TOLERANCE
    assert len(report.verdict.errors) == 1 + len(list(case.model.parameters()))
