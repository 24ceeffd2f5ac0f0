"""PipeDream with weight stashing: plans are priced, proved and run, and equal the published rule.

The truth is one process of torch that keeps a list of all versions of the parameters and applies

    w(t + 1) = w(t) − rate · ∇f(w₁(t − n + 1), …, w_n(t)),

the rule of Narayanan et al. (SOSP 2019, section 3.3), to the microbatches of a step.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.optim.lr_scheduler import OneCycleLR

from examples.models import MLP, SmallGPT
from stratagem.executor import execute, lower, model_state
from stratagem.executor.program.grid import grid
from stratagem.executor.program.instructions import Backward, Forward, Free, Instruction, Stash
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.programs import Program
from stratagem.executor.program.verify import verify
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.running.torch_reference import first_scalar, gradient_errors, reference_of
from stratagem.executor.training.learning_rates import TorchRate
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.flat_graph import flat_graph
from stratagem.simulator.simulation.priced_plan import plan_model
from stratagem.simulator.simulation.simulation import simulate_model, simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from tests.executor.programs.test_live import measured_peaks
from tests.support.plans import (
    TOLERANCE,
    Case,
    Chooser,
    assert_equal_to_torch,
    crossed,
    drawing,
    make_case,
    make_plan,
    megatron,
    optional,
    sharding,
    whole,
)

COSTS = RooflineCosts()
SGD = Training(optimizer="sgd", learning_rate=0.2, weight_decay=0.01)
ADAM = Training(optimizer="adam", learning_rate=0.01)


@pytest.fixture(scope="module")
def gpt() -> Case:
    torch.manual_seed(0)
    model = SmallGPT(num_layers=2, hidden=24, num_heads=4, vocabulary=50, sequence=10, tied=False)
    ids = torch.randint(0, 50, (12, 10))
    return make_case(model, input_ids=ids, labels=ids.roll(-1, 1))


@pytest.fixture(scope="module")
def mlp() -> Case:
    torch.manual_seed(1)
    model = MLP([10, 16, 9, 16, 7])
    return make_case(model, x=torch.randn(24, 10), target=torch.randint(0, 7, (24,)))


def stashing(
    case: Case,
    choose: Chooser,
    *shapes: tuple[int, ...],
    num_microbatches: int = 6,
    training: Training = SGD,
    cuts: tuple[int, ...] | None = None,
) -> Plan:
    return make_plan(
        case,
        choose,
        *shapes,
        num_microbatches=num_microbatches,
        schedule="pipedream",
        training=training,
        cuts=cuts,
    )


# -- the published rule -------------------------------------------------------------------------


class Truth:
    """One process of torch with a list of versions of its parameters.

    Attributes:
        losses: of each step.
        gradients: of the last step, means over its microbatches.
        parameters: after the last step.
        sure: elements of the parameters whose gradients were never only rounding error.
    """

    def __init__(self, case: Case, plan: Plan, steps: int, schedule: Any = None) -> None:
        self.model, self.plan = copy.deepcopy(case.model), plan
        training = plan.training
        self.parameters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}
        given: dict[str, Any] = {"momentum": training.momentum, "dampening": training.dampening}
        self._optimizer = kinds[training.optimizer](
            self.parameters.values(),
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            **(given if training.optimizer == "sgd" else {}),
        )
        self._scheduler = schedule(self._optimizer) if schedule else None
        self._stage = stages_of_parameters(case, plan)
        self.sure = {n: torch.ones_like(p, dtype=torch.bool) for n, p in self.parameters.items()}
        self.losses = [self._step(case.batch) for _ in range(steps)]

    def _step(self, batch: Mapping[str, Tensor]) -> float:
        parts, last = self.plan.num_microbatches, len(self.plan.stages)
        versions = [{n: p.clone() for n, p in self.parameters.items()}]
        self.gradients = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        total = 0.0
        for t in range(parts):
            part = {name: x.chunk(parts)[t] for name, x in batch.items()}
            met = {
                name: versions[max(0, t - last + 1 + self._ahead(stage))][name].requires_grad_()
                for name, stage in self._stage.items()
            }
            loss = first_scalar(functional_call(self.model, met, (), part)) * share(batch, part)
            found = torch.autograd.grad(loss * parts, list(met.values()))
            for name, gradient in zip(met, found, strict=True):
                self.parameters[name].grad = gradient
                self.gradients[name] += gradient / parts
                self.sure[name] &= (gradient.abs() > 1e-5) | (gradient == 0)
            self._optimizer.step()
            versions.append({n: p.detach().clone() for n, p in self.parameters.items()})
            total += float(loss.detach())
        if self._scheduler is not None:
            self._scheduler.step()
        return total

    def _ahead(self, stage: int) -> int:
        """Updates by which a stage's weights are newer than the first one's."""
        return 0 if self.plan.schedule == "pipedream-vertical" else stage

    def check(self, found: Mapping[str, Tensor]) -> None:
        """Parameters are equal to a part in 100,000 of the largest element or update."""
        training = self.plan.training
        for name, parameter in self.parameters.items():
            difference = (found[name] - parameter.detach()).abs()
            if training.optimizer == "adam":  # It divides rounding errors of 0 by themselves.
                difference = torch.where(self.sure[name], difference, 0.0)
            scale = max(float(parameter.detach().abs().max()), training.learning_rate)
            assert float(difference.max()) <= TOLERANCE * scale, name


def share(batch: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> float:
    """The weight of a microbatch's mean loss in that of the batch: by what each counts."""
    name = "labels" if "labels" in batch else "target"
    return float((part[name] >= 0).sum() / (batch[name] >= 0).sum())


def stages_of_parameters(case: Case, plan: Plan) -> dict[str, int]:
    """The stage of each parameter of a model."""
    trained = dict(case.model.named_parameters())
    return {
        weight.parameter: plan.stage_of[operator.name]
        for operator in case.graph.operators
        for weight in operator.weights
        if weight.parameter in trained
    }


def assert_trains_as_published(
    case: Case, plan: Plan, steps: int = 3, schedule: Any = None
) -> None:
    """Losses, mean gradients of the last step and parameters are those of the published rule."""
    verify(lower(plan, case.graph))
    rate = TorchRate(schedule) if schedule else None
    result = execute(
        plan,
        case.graph,
        model_state(case.model),
        case.batch,
        steps=steps,
        gradients=True,
        rate=rate,
    )
    truth = Truth(case, plan, steps, schedule)
    assert result.losses == pytest.approx(truth.losses, rel=TOLERANCE)
    assert result.gradients is not None
    errors = gradient_errors(result.gradients, truth.gradients)
    assert max(errors.values()) < TOLERANCE, errors
    truth.check(result.parameters)


# -- equality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_training_is_the_published_rule(mlp: Case, num_stages: int, training: Training) -> None:
    assert_trains_as_published(mlp, stashing(mlp, whole, *[(1,)] * num_stages, training=training))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_scheduler_moves_momentum_step_by_step(mlp: Case, optimizer: str) -> None:
    """All microbatches of a step are updated by the momentum or the betas of that step."""

    def schedule(each: torch.optim.Optimizer) -> Any:
        return OneCycleLR(each, max_lr=0.05, total_steps=8, base_momentum=0.2)

    training = replace(SGD, momentum=0.8, dampening=0.3) if optimizer == "sgd" else ADAM
    plan = stashing(mlp, whole, (1,), (1,), (1,), training=training)
    assert_trains_as_published(mlp, plan, steps=4, schedule=schedule)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_transformer_trains_by_the_published_rule(gpt: Case, num_stages: int) -> None:
    assert_trains_as_published(gpt, stashing(gpt, whole, *[(1,)] * num_stages, training=ADAM))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_vertical_sync_takes_one_version_on_all_stages(mlp: Case, num_stages: int) -> None:
    plan = stashing(mlp, whole, *[(1,)] * num_stages)
    assert_trains_as_published(mlp, replace(plan, schedule="pipedream-vertical"))


@pytest.mark.slow
def test_vertical_sync_of_sharded_stages_is_the_published_rule(gpt: Case) -> None:
    plan = stashing(gpt, sharding("sample", zero=1), (2,), (1,), (2,))
    vertical = replace(plan, schedule="pipedream-vertical")
    assert_trains_as_published(gpt, vertical, steps=2)
    predicted = simulate_plan(vertical, gpt.graph, COSTS)
    assert predicted.timeline.names.count("head stash") == 4
    measured = measured_peaks(vertical, gpt)
    for memory, stage in zip(predicted.memory, plan.stages, strict=True):
        assert memory.peak == pytest.approx(measured[stage.mesh.devices[0]], rel=0.1)


CHOICES: dict[str, tuple[Chooser, tuple[tuple[int, ...], ...]]] = {
    "replicated first stage": (sharding("sample"), ((2,), (1,))),
    "replicated last stages": (sharding("sample"), ((1,), (2,), (2,))),
    "tensor parallel": (megatron, ((2,), (2,))),
    "zero 1": (sharding("sample", zero=1), ((2,), (2,))),
    "zero 2": (sharding("sample", zero=2), ((2,), (1,))),
    "sums": (sharding("reduction"), ((2,), (1,), (1,))),
}


@pytest.mark.parametrize("name", crossed(CHOICES, every=2))
def test_sharded_stages_train_by_the_published_rule(gpt: Case, name: str) -> None:
    choose, shapes = CHOICES[name]
    assert_trains_as_published(gpt, stashing(gpt, choose, *shapes), steps=2)


@pytest.mark.parametrize("fields", [{"recompute": True}, {"regather": True}, {"chunks": 2}])
def test_options_train_by_the_published_rule(gpt: Case, fields: dict[str, int]) -> None:
    plan = stashing(gpt, megatron, (2,), (1,), (1,))
    names = {"chunks": ("up", "down")}.get(next(iter(fields)), ("",))
    stages = tuple(
        replace(
            stage,
            choices={
                n: replace(c, **fields)
                if n.endswith(names) and not gpt.graph.operator(n).is_source
                else c
                for n, c in stage.choices.items()
            },
        )
        for stage in plan.stages
    )
    made = replace(plan, stages=stages, inputs_first=True, bucket_bytes=5_000)
    assert_trains_as_published(gpt, made, steps=2)


@pytest.mark.parametrize("seed", crossed(range(4), every=2))
def test_random_plans_train_by_the_published_rule(gpt: Case, seed: int) -> None:
    """Pins, uneven shards, pieces, recomputing and ZeRO on two to four stages."""
    rng = random.Random(seed)
    shapes = rng.choice([((2,), (1,)), ((1,), (3,)), ((2,), (2,), (1,)), ((1,), (1,), (2,), (1,))])
    drawn = optional(drawing(seed), seed)

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        choice = drawn(operator, shape)
        return replace(choice, zero=min(choice.zero, 2))

    names = [o.name for o in gpt.graph.operators if not o.is_source]
    cuts = tuple(sorted(rng.sample(range(1, len(names)), len(shapes) - 1)))
    plan = stashing(gpt, choose, *shapes, num_microbatches=4, cuts=cuts)
    assert_trains_as_published(gpt, replace(plan, bucket_bytes=rng.choice([0, 500])), steps=2)


def test_microbatches_that_count_different_numbers_of_labels_are_weighed_so(gpt: Case) -> None:
    labels = gpt.batch["labels"].clone()
    labels[0, :8] = -100
    case = Case(gpt.model, {**gpt.batch, "labels": labels}, gpt.graph)
    assert_trains_as_published(case, stashing(case, whole, (1,), (1,)), steps=2)


def test_one_microbatch_a_step_is_ordinary_training(mlp: Case) -> None:
    assert_equal_to_torch(mlp, stashing(mlp, whole, (1,), (1,), num_microbatches=1))


def test_weights_tied_within_a_stage_are_one_version() -> None:
    """Embedding and head share the last of two stages; the first only has the positions."""
    torch.manual_seed(3)
    model = SmallGPT(num_layers=1, hidden=16, num_heads=2, vocabulary=20, sequence=6)
    ids = torch.randint(0, 20, (6, 6))
    case = make_case(model, input_ids=ids, labels=ids)
    plan = stashing(case, whole, (1,), (1,))
    first = next(n for n in plan.stages[0].operators if n.endswith("positions"))
    rest = [n for s in plan.stages for n in s.operators if n != first]
    sources = {o.name for o in case.graph.operators if o.is_source}
    ahead = (*(n for n in rest if n in sources), first)
    choices = {n: c for s in plan.stages for n, c in s.choices.items()}
    stages = tuple(
        replace(stage, operators=names, choices={n: choices[n] for n in names})
        for stage, names in zip(
            plan.stages, (ahead, tuple(n for n in rest if n not in sources)), strict=True
        )
    )
    assert_trains_as_published(case, replace(plan, stages=stages), steps=2)


# -- processes and checkpoints ------------------------------------------------------------------

MODEL = """
import torch
from examples.models import MLP

def build():
    return MLP([10, 16, 9, 7]), {"x": torch.randn(8, 10), "target": torch.randint(0, 7, (8,))}
"""


@pytest.mark.slow
def test_processes_train_by_the_published_rule_and_checkpoints_need_no_older_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stashing_model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]), prepend=os.pathsep)
    torch.manual_seed(0)
    model = MLP([10, 16, 9, 7])
    case = make_case(model, x=torch.randn(8, 10), target=torch.randint(0, 7, (8,)))
    plan = stashing(case, sharding("sample"), (1,), (2,), num_microbatches=4, training=ADAM)
    plan.save(tmp_path / "plan.json")
    request = RunRequest(
        plan=tmp_path / "plan.json",
        model="stashing_model:build",
        steps=2,
        checkpoint=tmp_path / "checkpoints",
    )
    report = launch(request, folder=tmp_path)
    truth = Truth(case, plan, 3)
    assert report.losses == pytest.approx(truth.losses[:2], rel=TOLERANCE)
    resumed = execute(
        plan, case.graph, model_state(model), case.batch, steps=3, resume=request.checkpoint
    )
    assert resumed.losses == pytest.approx(truth.losses[2:], rel=TOLERANCE)
    truth.check(resumed.parameters)
    with pytest.raises(ValueError, match="compare the plan under 1f1b"):
        reference_of(plan, case.graph)


# -- programs -----------------------------------------------------------------------------------


def test_the_grid_shows_updates_and_stashes(mlp: Case) -> None:
    plan = stashing(mlp, whole, (1,), (1,), num_microbatches=3)
    first = grid(lower(plan, mlp.graph)).splitlines()[0].split()
    order = [word for word in pairwise(first) if word[0] == "layers.0"]
    assert [what for _, what in order] == (
        ["F0", "F1", "B0", "stash", "update", "F2", "B1", "stash", "update", "B2", "update"]
    )


def test_older_weights_live_from_the_update_to_their_last_reader(mlp: Case) -> None:
    """On stage s of n there are n − s versions at most, the newest included."""
    plan = stashing(mlp, whole, (1,), (1,), (1,), (1,), num_microbatches=8)
    for each in lower(plan, mlp.graph).ranks:
        alive: set[str] = set()
        most = 0
        for instruction in each.instructions:
            if isinstance(instruction, Stash):
                alive.update(copy for _, copy in instruction.copies if ".weight" in copy)
            if isinstance(instruction, Free):
                alive.difference_update(instruction.values)
            most = max(most, max((len(v) for v in by_parameter(alive).values()), default=0))
        assert not alive
        assert most == len(plan.stages) - 1 - each.rank


def by_parameter(values: set[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for value in values:
        found.setdefault(value.split()[0], set()).add(value)
    return found


def test_a_backward_pass_before_its_weights_are_kept_is_found_out(mlp: Case) -> None:
    program = lower(stashing(mlp, whole, (1,), (1,)), mlp.graph)
    without = edited(program, lambda i: None if isinstance(i, Stash) else i)
    with pytest.raises(ValueError, match=r"after 0 updates' before it is made"):
        verify(without)


def test_older_weights_that_are_never_freed_are_found_out(mlp: Case) -> None:
    def keep(instruction: Instruction) -> Instruction | None:
        if isinstance(instruction, Free):
            return Free(tuple(v for v in instruction.values if "updates" not in v))
        return instruction

    program = lower(stashing(mlp, whole, (1,), (1,)), mlp.graph)
    with pytest.raises(ValueError, match=r"never frees .* updates'"):
        verify(edited(program, keep))


def edited(program: Program, change) -> Program:  # type: ignore[no-untyped-def]
    ranks = tuple(
        replace(
            each, instructions=tuple(i for i in map(change, each.instructions) if i is not None)
        )
        for each in program.ranks
    )
    return replace(program, ranks=ranks)


def test_tapes_keep_no_weights_that_are_to_be_copied(mlp: Case) -> None:
    plan = stashing(mlp, whole, (1,), (1,), num_microbatches=4)
    body = lower(plan, mlp.graph).ranks[0].instructions
    passes = [i for i in body if isinstance(i, Forward | Backward) and i.operator == "layers.0"]
    forward = {i.microbatch: i.gathered for i in passes if isinstance(i, Forward)}
    backward = {i.microbatch: i.anew for i in passes if isinstance(i, Backward)}
    assert forward == {0: (), 1: (0, 1), 2: (0, 1), 3: (0, 1)}
    assert {m: len(anew) for m, anew in backward.items()} == {0: 0, 1: 2, 2: 2, 3: 2}


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((1,), (1,), (1,)), ((2,), (1,))])
def test_peaks_are_those_of_the_storages(gpt: Case, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Within a tenth on stages that keep older weights."""
    plan = stashing(gpt, sharding("sample"), *shapes)
    told = peak_bytes(lower(plan, gpt.graph))
    predicted = [memory.peak for memory in simulate_plan(plan, gpt.graph, COSTS).memory]
    measured = measured_peaks(plan, gpt)
    last = len(plan.stages) - 1
    for stage in range(last):
        rank = plan.stages[stage].mesh.devices[0]
        assert told[rank] == pytest.approx(measured[rank], rel=0.1)
        assert predicted[stage] == pytest.approx(measured[rank], rel=0.1)
    assert measured[-1] <= told[-1] < 1.15 * measured[-1]


def test_older_versions_are_in_the_predicted_memory(mlp: Case) -> None:
    plan = stashing(mlp, whole, (1,), (1,), (1,), (1,), num_microbatches=8)
    simulation = simulate_plan(plan, mlp.graph, COSTS)
    for stage, memory in enumerate(simulation.memory):
        of = {use: sum(a.total for a in memory.alive if a.use is use) for use in Purpose}
        older = len(plan.stages) - 1 - stage
        assert of[Purpose.STASHED] == older * of[Purpose.PARAMETERS]
        assert memory.peak == simulation.memory_timeline(stage).peak
    two = simulate_plan(replace(plan, num_microbatches=2), mlp.graph, COSTS).memory[0]
    assert sum(a.total for a in two.alive if a.use is Purpose.STASHED) == sum(
        a.total for a in two.alive if a.use is Purpose.PARAMETERS
    )


# -- time ---------------------------------------------------------------------------------------


def test_two_levels_are_the_flat_graph(gpt: Case) -> None:
    plan = stashing(gpt, sharding("sample", zero=1), (2,), (2,), (1,), num_microbatches=6)
    model = plan_model(plan, gpt.graph, COSTS)
    flat = simulate(flat_graph(model).graph)
    assert flat.makespan == round(simulate_model(model).step_time * 1e9)


def test_predicted_and_measured_timelines_have_the_same_tasks(gpt: Case) -> None:
    plan = stashing(gpt, sharding("sample", zero=1), (2,), (1,), (2,))
    predicted = simulate_plan(plan, gpt.graph, COSTS).timeline.names
    result = execute(plan, gpt.graph, model_state(gpt.model), gpt.batch)
    unpriced = {f"{o.name} source" for o in gpt.graph.operators} | {"loss"}
    assert set(result.timeline.names) - unpriced == set(predicted)
    counts = [
        [names.count(f"{n} {what}") for n in ("tokens", "blocks.0.up", "head")]
        for names, what in ((predicted, "update"), (predicted, "stash"))
    ]
    assert counts == [[6, 6, 6], [4, 5, 0]]


# -- what is refused ----------------------------------------------------------------------------


def test_what_one_update_a_step_could_give_is_refused(gpt: Case, mlp: Case) -> None:
    clipped = stashing(mlp, whole, (1,), (1,), training=replace(SGD, clip_norm=1.0))
    sharded = stashing(mlp, sharding("sample", zero=3), (2,), (1,))
    halves = stashing(mlp, whole, (1,), (1,), training=replace(SGD, precision="float16"))
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (6, 10))
    tied = make_case(SmallGPT(num_layers=1, vocabulary=50, sequence=10), input_ids=ids, labels=ids)
    for case, plan, message in (
        (mlp, clipped, "the norm of all gradients is known, but clip_norm is 1"),
        (mlp, halves, "whether any gradient overflows"),
        (mlp, sharded, "operator 'layers.0' has ZeRO stage 3, under which no device keeps"),
        (tied, stashing(tied, whole, (1,), (1,)), r"'tokens' of stage 0 and 'head' of stage 1"),
    ):
        with pytest.raises(ValueError, match=message):
            lower(plan, case.graph)
        with pytest.raises(ValueError, match=message):
            simulate_plan(plan, case.graph, COSTS)
