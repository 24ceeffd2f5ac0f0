"""Plans of two opposite pipelines: what they may be, what they cost, and that they equal torch."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.instructions import Bundle, Convert
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.verify import verify
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.exports import FORMATS, export
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.methods.simple_strategies import baseline_plans, pipeline_plans
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.drawing.pictures import picture_of
from stratagem.simulator.graph.placement import Pin
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.executor.equality.test_executor import MODEL
from tests.executor.equality.test_models_executed import case_of
from tests.executor.equality.test_options_executed import changed
from tests.executor.programs.test_live import measured_peaks
from tests.executor.programs.test_postings import check as check_postings
from tests.simulator.plans.test_chimera_costs import mlp_graph, plain_pipeline
from tests.simulator.torch_ops.test_dropout import case as dropping
from tests.support import cell_plans as cells
from tests.support.plans import (
    TOLERANCE,
    Case,
    Chooser,
    assert_runs_like_torch,
    assert_same_gradients,
    assert_train_alike,
    assert_trains_like_torch,
    crossed,
    few,
    make_case,
    make_plan,
    megatron,
    sharding,
    unpinned,
    whole,
)

assert dropping  # A fixture.
ONE, TWO = (1,), (2,)


def opposite(case: Case, choose: Chooser, *shapes: tuple[int, ...], **fields: object) -> Plan:
    """Two pipelines over stages of these shapes, by default of two microbatches."""
    given = {"num_microbatches": 2, "schedule": "chimera", **fields}
    return make_plan(case, choose, *shapes, **given)  # type: ignore[arg-type]


# -- what a plan may say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "shapes", "message"),
    [
        ({}, (ONE, ONE, ONE), "3 stages is odd.* choose 4 stages"),
        (
            {"num_microbatches": 1},
            (ONE, ONE),
            "1 microbatch passes in one.* choose 2 microbatches",
        ),
        ({}, (ONE, TWO), r"stage 0 has a mesh of shape \(1,\) and stage 1.* of shape \(2,\)"),
        ({"crews": 2}, (ONE,) * 4, "places 4 stages on 4 ranks, not on 2"),
    ],
)
def test_stages_that_cannot_have_two_homes_are_refused(
    fields: dict[str, object], shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        opposite(case_of("gpt"), whole, *shapes, **fields)


def test_pins_and_updates_inside_a_sync_are_refused() -> None:
    case = case_of("gpt")

    def pinned(operator: object, shape: tuple[int, ...]) -> Choice:
        return Choice((Pin(1),))

    with pytest.raises(ValueError, match="pins operator 'tokens' to a part of its mesh"):
        opposite(case, pinned, TWO, TWO)
    plan = opposite(case, sharding("sample"), TWO, TWO)
    first = plan.stages[0]
    choices = {**first.choices, "tokens": replace(first.choices["tokens"], fused=True)}
    plan = replace(plan, stages=(replace(first, choices=choices), plan.stages[1]))
    for refuses in (lower, lambda p, graph: simulate_plan(p, graph, default_costs())):
        with pytest.raises(ValueError, match="fuses the update of operator 'tokens' with"):
            refuses(plan, case.graph)


def test_running_statistics_are_refused() -> None:
    case = case_of("resnet")
    plan = opposite(case, whole, ONE, ONE)
    with pytest.raises(ValueError, match=r"keeps running statistics \('.*running_mean'\)"):
        lower(plan, case.graph)


def test_a_stage_lives_on_the_mesh_of_its_mirror_image() -> None:
    plan = opposite(case_of("gpt"), whole, ONE, ONE, ONE, ONE)
    assert [[mesh.devices for mesh in plan.homes(s)] for s in range(4)] == [
        [(0,), (3,)],
        [(1,), (2,)],
        [(2,), (1,)],
        [(3,), (0,)],
    ]
    assert Plan.from_json(plan.to_json()) == plan


def test_orders_of_ones_own_may_have_two_homes_and_split_backwards() -> None:
    """Two homes were known by the name of the one schedule that had them."""
    case = case_of("gpt")
    orders = (
        "rank 0: 0F0 0F2 1F1 1I1 1F3 1W1 1B3 0I0 0B2 0W0",
        "rank 1: 0F1 0F3 1F0 1I0 1F2 1W0 1B2 0I1 0B3 0W1",
    )
    both = opposite(case, sharding("sample"), TWO, TWO, num_microbatches=4)
    plan = replace(both, schedule="custom", orders=orders)
    assert plan.is_mirrored
    assert "those of its mirror image" in " ".join(
        describe(simulate_plan(plan, case.graph, default_costs()), case.graph).split()
    )
    assert_runs_like_torch(case, plan)
    fewer = (
        "rank 0: 0F0 0F2 0F3 1F1 1B1 0B0 0B2 0B3",
        "rank 1: 0F1 1F0 1F2 1F3 1B0 1B2 1B3 0B1",
    )
    with pytest.raises(ValueError, match="sends 3 of 4 microbatches in one direction and 1 in"):
        replace(plan, orders=fewer)


# -- where else it is known --------------------------------------------------------------------


def test_it_is_a_method_to_compare_with() -> None:
    graph, cluster = mlp_graph(), cells.CLUSTER
    situation = Situation(graph, cluster, Training(), cells.COSTS)
    found = baseline_plans(situation, methods={"Chimera": METHODS["Chimera"]})
    best = found["Chimera"]
    assert best.plan.is_mirrored
    plans = pipeline_plans(situation, "chimera", "Chimera")
    assert {len(plan.stages) for plan in plans} == {2, 4, 8}
    assert best.step_time == min(situation.simulate(plan).step_time for plan in plans)


@pytest.mark.slow
def test_a_search_starts_from_such_a_plan_and_changes_none() -> None:
    graph = mlp_graph()
    plan = plain_pipeline(2, 2)
    found = search(
        graph,
        plan.cluster,
        costs=cells.COSTS,
        start=plan,
        budget=Budget(evaluations=0, skeletons=1, bounded=0),
        baselines=(),
    )
    begun = simulate_plan(plan, graph, cells.COSTS)
    assert found.simulation.step_time <= begun.step_time or found.simulation.fits > begun.fits


def test_words_pictures_and_exports_know_it() -> None:
    case = case_of("gpt")
    plan = opposite(case, sharding("sample"), TWO, TWO)
    told = " ".join(describe(simulate_plan(plan, case.graph, default_costs()), case.graph).split())
    assert "in a Chimera pipeline of 2 stages, each on its own devices and on those of its" in told
    assert "device 3: stage 0, 1" in picture_of(plan)
    for target in FORMATS:
        made = export(plan, case.graph, target)
        assert not made.nearest.is_mirrored
        if len(made.nearest.stages) == 2:
            assert "The plan has the schedule 'chimera', this '1f1b'." in made.missing


# -- what it computes ---------------------------------------------------------------------------

EQUAL: dict[str, tuple[Chooser, tuple[tuple[int, ...], ...], int]] = {
    "two devices": (whole, (ONE, ONE), 2),
    "more microbatches than stages": (whole, (ONE, ONE), 4),
    "four devices": (whole, (ONE,) * 4, 4),
    "data parallel": (sharding("sample"), (TWO, TWO), 2),
    "zero 2": (sharding("sample", zero=2), (TWO, TWO), 4),
    "zero 3": (sharding("sample", zero=3), (TWO,) * 4, 2),
    "tensor and sequence on eight": (megatron, (TWO,) * 4, 4),
    "unequal pairs": (megatron, (ONE, TWO, TWO, ONE), 2),
}


@pytest.mark.parametrize("name", crossed(EQUAL, every=2))
def test_two_pipelines_train_like_torch(name: str) -> None:
    choose, shapes, parts = EQUAL[name]
    case = case_of("gpt")
    plan = opposite(case, choose, *shapes, num_microbatches=parts)
    verify(lower(plan, case.graph))
    assert_runs_like_torch(case, plan)


def random_plan(case: Case, seed: int) -> Plan:
    """Two or four stages cut anywhere, meshes in pairs of one shape, random choices."""
    rng = random.Random(seed)
    half = [rng.choice([ONE, TWO]) for _ in range(rng.choice([1, 2]))]
    if len(half) == 1:
        half = [rng.choice([TWO, (3,), (2, 2)])]
    shapes = (*half, *half[::-1])
    count = sum(not o.is_source for o in case.graph.operators)
    cuts = tuple(sorted(rng.sample(range(1, count), len(shapes) - 1)))
    plan = opposite(
        case,
        unpinned(seed),
        *shapes,
        cuts=cuts,
        num_microbatches=rng.choice([2, 4]) if case.graph.batch % 4 == 0 else 2,
        training=Training(optimizer=("sgd", "adam")[seed % 2], learning_rate=0.01),
    )
    buckets = rng.choice([0, 500, 10**9])
    return replace(plan, inputs_first=rng.random() < 0.3, bucket_bytes=buckets)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(2), 1))
@pytest.mark.parametrize("model", ["gpt", "lstm"])
def test_random_plans_train_like_torch(model: str, seed: int) -> None:
    case = case_of(model)
    plan = random_plan(case, seed)
    assert_runs_like_torch(case, plan)
    check_postings(lower(plan, case.graph))


@pytest.mark.parametrize(
    ("model", "seed"), [("gpt", 59), ("gpt", 87), ("lstm", 28), ("llama", 42), ("llama", 54)]
)
def test_both_directions_over_two_axes_have_one_order_of_messages(model: str, seed: int) -> None:
    """Their replay does not end where a conversion along both axes may be left half done."""
    case = case_of(model)
    plan = random_plan(case, seed)
    assert plan.stages[0].mesh.shape == (2, 2)
    check_postings(lower(plan, case.graph))


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(100, 130), 3))
@pytest.mark.parametrize("model", ["gpt", "lstm", "llama", "experts"])
def test_all_random_plans_have_one_order_of_messages(model: str, seed: int) -> None:
    case = case_of(model)
    check_postings(lower(random_plan(case, seed), case.graph))


@pytest.mark.parametrize("model", ["llama", "experts"])
def test_other_models_train_like_torch(model: str) -> None:
    case = case_of(model)
    training = Training(optimizer="sgd", learning_rate=0.01)
    plan = opposite(case, sharding("sample"), TWO, TWO, training=training)
    assert_runs_like_torch(case, plan)


def test_a_tie_may_join_any_stages() -> None:
    """Tokens are embedded in stage 0 and scored in stage 2, whose mirror image is stage 1."""
    case = case_of("gpt")
    names = [op.name for op in case.graph.operators if not op.is_source]
    cuts = (names.index("blocks.0.up"), names.index("blocks.1.add"), names.index("head") + 1)
    plan = opposite(case, sharding("parameter", zero=1), *(TWO,) * 4, cuts=cuts)
    assert (plan.stage_of["tokens"], plan.stage_of["head"]) == (0, 2)
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize(
    "fields", [{"recompute": True}, {"regather": True}, {"recompute": True, "zero": 3}]
)
def test_options_of_choices_train_like_torch(fields: dict[str, object]) -> None:
    case = case_of("gpt")
    plan = changed(opposite(case, megatron, TWO, TWO), **fields)
    assert_trains_like_torch(case, plan)


@pytest.mark.parametrize("bucket_bytes", [4000, 10**9])
def test_buckets_are_summed_over_both_homes_together(bucket_bytes: int) -> None:
    case = case_of("gpt")
    plan = opposite(case, sharding("sample"), TWO, TWO)
    bucketed = replace(plan, bucket_bytes=bucket_bytes, inputs_first=True)
    assert_trains_like_torch(case, bucketed)

    def sums(each: Plan) -> int:
        found = lower(each, case.graph).ranks[0].instructions
        return sum(
            isinstance(i, Bundle | Convert) and i.task.endswith("sync of both homes")
            for i in found
        )

    assert sums(bucketed) < sums(plan)


def test_gradients_are_clipped_by_the_norm_of_all() -> None:
    """What both homes have counts once."""
    case = case_of("gpt")
    training = Training(optimizer="sgd", learning_rate=0.1, clip_norm=0.05)
    plan = opposite(case, sharding("sample", zero=1), TWO, TWO, training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    truth = make_plan(case, whole, ONE, training=training)
    alone = execute(truth, case.graph, model_state(case.model), case.batch, gradients=True)
    assert_same_gradients(result, alone)


def test_dropout_drops_the_same(dropping: Case) -> None:
    training = Training(optimizer="sgd", learning_rate=0.05)
    plan = opposite(dropping, sharding("sample"), TWO, TWO, training=training)
    plan = changed(replace(plan, seed=3), recompute=True)
    one = replace(make_plan(dropping, whole, ONE, training=training), seed=3)
    assert_train_alike(dropping, plan, one)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_both_homes_stay_equal(precision: str) -> None:
    """Bit for bit: they add the same two numbers and take the same step."""
    case = case_of("gpt")
    training = Training(precision)
    plan = opposite(case, sharding("sample", zero=1), TWO, TWO, training=training)
    program = lower(plan, case.graph)

    def run(comm: Communicator) -> dict[str, torch.Tensor]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        for _ in range(3):
            interpreter.step(case.batch)
        return {value: each.tensor.clone() for value, each in interpreter.states.items()}

    ranks = run_local(plan.num_devices, run)
    for ours, theirs in ((0, 2), (1, 3)):
        assert ranks[ours].keys() == ranks[theirs].keys()
        for name, value in ranks[ours].items():
            assert torch.equal(value, ranks[theirs][name]), name


@pytest.mark.parametrize("name", ["four devices", "data parallel"])
def test_peaks_are_those_of_the_storages(name: str) -> None:
    choose, shapes, parts = EQUAL[name]
    case = case_of("gpt")
    training = Training(optimizer="sgd")
    plan = opposite(case, choose, *shapes, num_microbatches=parts, training=training)
    told = peak_bytes(lower(plan, case.graph))
    for ours, theirs in zip(told, measured_peaks(plan, case), strict=True):
        assert ours == pytest.approx(theirs, rel=0.1)


def test_what_is_measured_has_the_names_of_what_is_predicted() -> None:
    case = case_of("gpt")
    for choose, zero in ((sharding("sample", zero=1), 1), (megatron, 0)):
        plan = opposite(case, choose, TWO, TWO)
        predicted = simulate_plan(plan, case.graph, default_costs()).timeline
        measured = execute(plan, case.graph, model_state(case.model), case.batch).timeline
        assert set(predicted.names) <= set(measured.names)
        more = zip(measured.names, measured.kinds, strict=True)
        assert {kind for name, kind in more if name not in predicted.names} == {TaskKind.OTHER}
        assert ("head update" in predicted.names) is False
        assert any(name.endswith(" publish") for name in predicted.names) == (zero == 1)


@pytest.mark.slow
def test_processes_equal_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launched_model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]), prepend=os.pathsep)
    case = launched_case()
    plan = opposite(case, sharding("parameter"), ONE, ONE, num_microbatches=4)
    plan.save(tmp_path / "plan.json")
    model = "launched_model:gpt"
    request = RunRequest(plan=tmp_path / "plan.json", model=model, check=True, steps=2)
    report = launch(request, folder=tmp_path)
    assert report.verdict is not None
    assert 0 < report.verdict.max_error < TOLERANCE
    assert len(report.losses) == 2


def launched_case() -> Case:
    namespace: dict[str, object] = {}
    exec(MODEL, namespace)
    torch.manual_seed(0)
    model, batch = namespace["gpt"]()  # type: ignore[operator]
    return make_case(model, **batch)


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_go_on_under_another_plan_and_back(tmp_path: Path) -> None:
    case = case_of("gpt")
    state = model_state(case.model)
    training = Training(optimizer="adam", learning_rate=0.01)
    one = make_plan(case, whole, ONE, training=training)
    two = opposite(case, sharding("sample", zero=2), TWO, TWO, training=training)
    truth = execute(one, case.graph, state, case.batch, steps=6)
    execute(two, case.graph, state, case.batch, steps=2, checkpoint=tmp_path / "up")
    files = {path.name for path in (tmp_path / "up").glob("*/*.safetensors")}
    assert files == {f"rank-{rank:05d}.safetensors" for rank in range(4)}
    saved = sum(path.stat().st_size for path in (tmp_path / "up").glob("*/*.safetensors"))
    execute(
        one,
        case.graph,
        state,
        case.batch,
        steps=4,
        resume=tmp_path / "up",
        checkpoint=tmp_path / "a",
    )
    whole_size = sum(path.stat().st_size for path in (tmp_path / "a").glob("*/*.safetensors"))
    assert saved < 1.2 * whole_size
    rest = execute(two, case.graph, state, case.batch, steps=6, resume=tmp_path / "a")
    assert rest.losses == pytest.approx(truth.losses[4:], rel=1e-4)


@pytest.mark.slow
def test_a_run_that_goes_on_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    case = case_of("gpt")
    state = model_state(case.model)
    plan = opposite(case, sharding("sample", zero=1), TWO, TWO)
    straight = execute(plan, case.graph, state, case.batch, steps=4)
    execute(plan, case.graph, state, case.batch, steps=2, checkpoint=tmp_path)
    rest = execute(plan, case.graph, state, case.batch, steps=4, resume=tmp_path)
    assert rest.losses == straight.losses[2:]
    for name, tensor in straight.parameters.items():
        assert torch.equal(tensor, rest.parameters[name]), name
