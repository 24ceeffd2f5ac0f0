"""Every option and schedule of a plan runs, equals one device, and does what it is for."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from examples.models import MLP
from stratagem.executor import execute, lower, model_state
from stratagem.executor.program.instructions import (
    Backward,
    BackwardPart,
    Bundle,
    Convert,
    Forward,
)
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.verify import verify
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import (
    TOLERANCE,
    Case,
    assert_equal_to_torch,
    assert_trains_like_torch,
    make_plan,
    megatron,
    random_plan,
    sharding,
    whole,
)

BOTH = (Bundle, Convert)


def changed(plan: Plan, **fields: object) -> Plan:
    """Every choice but those of sources with other fields."""

    def choice(name: str, old: Choice) -> Choice:
        return old if old.config == () else replace(old, **fields)

    stages = tuple(
        replace(stage, choices={n: choice(n, c) for n, c in stage.choices.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def instructions(plan: Plan, case: Case, kind: type | tuple[type, ...]) -> list[object]:
    program = lower(plan, case.graph)
    verify(program)
    return [each for each in program.ranks[0].instructions if isinstance(each, kind)]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "gpipe"])
def test_schedules_train_like_torch(schedule: str) -> None:
    case = case_of("gpt")
    crews = 2 if schedule == "interleaved" else None
    shapes = [(2,), (1,)] * (2 if crews else 1)
    plan = make_plan(
        case, sharding("sample"), *shapes, num_microbatches=2, schedule=schedule, crews=crews
    )
    assert_trains_like_torch(case, plan)


def test_zero_bubbles_make_gradients_of_weights_later() -> None:
    case = case_of("gpt")
    plan = make_plan(case, whole, (1,), (1,), num_microbatches=2, schedule="zb-h1")
    parts = [each.part for each in instructions(plan, case, Backward)]
    assert parts.count(BackwardPart.INPUTS) == parts.count(BackwardPart.WEIGHTS) > 0


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_what_is_recomputed_is_not_held(model: str) -> None:
    case = case_of(model)
    plan = make_plan(case, sharding("sample"), (2,))
    again = changed(plan, recompute=True)
    assert any(each.again for each in instructions(again, case, Forward))
    assert_equal_to_torch(case, again)
    program, before = lower(again, case.graph), lower(plan, case.graph)
    assert max(peak_bytes(program)) < max(peak_bytes(before))


def test_regathering_keeps_the_shards_of_sequences() -> None:
    case = case_of("gpt")
    plan = make_plan(case, megatron, (2,))
    again = changed(plan, regather=True)
    names = [each.task for each in instructions(again, case, Convert)]
    assert any(name.endswith(" again") for name in names)
    assert_equal_to_torch(case, again)


@pytest.mark.parametrize("bucket_bytes", [4000, 10**9])
def test_buckets_reduce_gradients_together(bucket_bytes: int) -> None:
    case = case_of("gpt")
    plan = make_plan(case, sharding("sample"), (2,))
    bucketed = replace(plan, bucket_bytes=bucket_bytes)
    assert_trains_like_torch(case, bucketed)
    counts = [
        sum(each.kind is TaskKind.GRADIENT_SYNC for each in instructions(p, case, BOTH))
        for p in (plan, bucketed)
    ]
    assert counts[1] < counts[0]
    if bucket_bytes == 10**9:
        assert counts[1] == 1


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [4000, 10**9])
def test_buckets_are_published_together(zero: int, bucket_bytes: int) -> None:
    """One all-gather for each bucket that one reduce-scatter has brought together."""
    case = case_of("gpt")
    plan = replace(changed(make_plan(case, sharding("sample"), (2,)), zero=zero), bucket_bytes=0)
    bucketed = replace(plan, bucket_bytes=bucket_bytes)
    assert_trains_like_torch(case, bucketed)
    for steps in ("sync", "publish"):
        alone, together = (
            [each for each in instructions(p, case, BOTH) if each.task.endswith(f" {steps}")]
            for p in (plan, bucketed)
        )
        assert parts_of(together) == parts_of(alone)
        # Gradients that all devices make alike are cut, which takes no collective.
        collectives = [each for each in together if each.meetings]
        assert len(collectives) == num_buckets(case, bucket_bytes) < len(alone)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_are_gathered_together(recompute: bool) -> None:
    """Under ZeRO 3 one all-gather a layer and pass, begun behind the last layer but one."""
    case = case_of("gpt")
    plan = make_plan(case, sharding("sample"), (2,))
    plan = replace(changed(plan, zero=3, recompute=recompute), bucket_bytes=0)
    bucketed = replace(plan, bucket_bytes=10**9)
    assert_trains_like_torch(case, bucketed)
    alone, together = (
        [each for each in instructions(p, case, BOTH) if each.task.endswith(" gather")]
        for p in (plan, bucketed)
    )
    assert parts_of(together) == parts_of(alone)
    graph = case.graph
    owned = {graph.index[graph.owners[p.name]] for p in graph.parameters}
    units = {graph.segments[i] for i in owned}
    tied = sum(graph.owners[w.parameter] != op.name for op in graph.operators for w in op.weights)
    assert len(together) == 2 * (len(units) + tied) < len(alone)
    program = lower(bucketed, graph)
    order = [
        graph.segments[graph.index[each.operator]]
        if isinstance(each, Forward)
        else -graph.segments[graph.index[each.task.removesuffix(" gather")]]
        for each in program.ranks[0].instructions
        if (isinstance(each, Forward) and not each.again and graph.index[each.operator] in owned)
        or (isinstance(each, Bundle | Convert) and each.task.endswith(" gather"))
    ]
    in_turn = sorted(units)
    begun = [order.index(-unit) for unit in in_turn]
    ran = [max(k for k, each in enumerate(order) if each == unit) for unit in in_turn]
    for number in range(2, len(units)):
        assert ran[number - 2] < begun[number] < ran[number - 1]


def parts_of(conversions: Iterable[Bundle | Convert]) -> Counter[str]:
    """How many tensors each operator has on the way."""
    return Counter(
        part.task
        for each in conversions
        for part in (each.parts if isinstance(each, Bundle) else (each,))
    )


def num_buckets(case: Case, least: int) -> int:
    """Counted by hand: whole gradients in float32, against the order of the operators."""
    shapes = {parameter.name: parameter.shape for parameter in case.graph.parameters}
    count, filled = 0, least
    seen: set[str] = set()
    owners = case.graph.owners
    for operator in reversed(case.graph.operators):
        own = [w.parameter for w in operator.weights if owners[w.parameter] == operator.name]
        nbytes = 4 * sum(math.prod(shapes[name]) for name in own)
        seen.update(own)
        if not nbytes:
            continue
        if filled >= least:
            count, filled = count + 1, 0
        filled += nbytes
    assert seen == set(shapes)
    return count


def test_pieces_are_converted_one_by_one() -> None:
    """Sums of a row-parallel layer go piece by piece, forward; the gathers of its rows back."""
    case = case_of("gpt")
    plan = make_plan(case, megatron, (2,))
    stage = plan.stages[0]
    choices = {
        name: replace(choice, chunks=2) if name.endswith((".up", ".down")) else choice
        for name, choice in stage.choices.items()
    }
    cut = replace(plan, stages=(replace(stage, choices=choices),))
    assert_trains_like_torch(case, cut)
    runs = [each.task for each in instructions(cut, case, Forward)]
    assert "blocks.0.down forward, piece 2" in runs
    converted = {each.task for each in instructions(cut, case, Convert) if each.later}
    assert {"blocks.0.down → blocks.0.add_1", "blocks.0.down → blocks.0.add_1, piece 2"} <= (
        converted
    )
    predicted = set(simulate_plan(cut, case.graph, default_costs()).timeline.names)
    result = execute(cut, case.graph, model_state(case.model), case.batch)
    assert "blocks.0.down → blocks.0.add_1, piece 2" in predicted & set(result.timeline.names)


def test_fused_operators_run_one_after_the_other() -> None:
    case = case_of("gpt")
    plan = make_plan(case, sharding("sample"), (2,))
    stage = plan.stages[0]
    choices = {
        name: replace(c, fused=bool(case.graph.operator(name).weights))
        for name, c in stage.choices.items()
    }
    assert_trains_like_torch(case, replace(plan, stages=(replace(stage, choices=choices),)))


@pytest.mark.parametrize("longest", [0.05, 1e6])
@pytest.mark.parametrize("name", ["zero 3", "pipeline", "pinned"])
def test_gradients_are_clipped_by_the_norm_of_all(name: str, longest: float) -> None:
    case = case_of("gpt")
    training = Training(optimizer="sgd", learning_rate=0.1, clip_norm=longest)
    plan = {
        "zero 3": make_plan(case, sharding("sample", zero=3), (3,), training=training),
        "pipeline": make_plan(case, megatron, (2,), (1,), num_microbatches=2, training=training),
        "pinned": replace(random_plan(case, 7), training=training),
    }[name]
    result = execute(
        plan, case.graph, model_state(case.model), case.batch, gradients=True, timeout=60
    )
    model = copy.deepcopy(case.model)
    model(**case.batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), longest)
    assert (float(norm) > longest) == (longest < 1)
    assert result.gradients is not None
    truths = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert max(gradient_errors(result.gradients, truths).values()) < TOLERANCE


def test_gradients_in_float64_are_clipped_in_float64() -> None:
    """The norm was asked for in float32, to which torch does not narrow a float64 gradient."""
    torch.manual_seed(0)
    model = MLP([5, 6, 4]).double()
    batch = {"x": torch.randn(8, 5).double(), "target": torch.randint(4, (8,))}
    case = Case(model, batch, capture(model, (), batch))
    training = Training(optimizer="sgd", learning_rate=0.1, clip_norm=0.01)
    plan = make_plan(case, sharding("sample", zero=2), (2,), num_microbatches=2, training=training)
    result = execute(plan, case.graph, model_state(model), batch, gradients=True, timeout=60)
    model(**batch).backward()
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)) > 0.01
    assert result.gradients is not None
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert float((result.gradients[name] - parameter.grad).abs().max()) < 1e-12, name


def test_pieces_that_were_converted_alone_come_back_from_the_whole() -> None:
    """Gradients were wrong: a note of a piece was read with the strides of the whole."""
    case = case_of("gpt")
    plan = make_plan(case, sharding("parameter"), (4,))
    stage = plan.stages[0]
    choices = {
        name: replace(choice, regather=True, chunks=3 if name.endswith(".out") else 1)
        for name, choice in stage.choices.items()
    }
    assert_equal_to_torch(case, replace(plan, stages=(replace(stage, choices=choices),)))
    for seed in (1014, 1025):
        assert_equal_to_torch(case, random_plan(case, seed))


def test_gradients_of_one_parameter_are_not_one_bundle() -> None:
    """Two uses of a tied weight with nothing to share were taken for one bucket."""
    case = case_of("lstm")
    assert_equal_to_torch(case, random_plan(case, 1019))
