"""A plan of a forward pass gives back what the model returns when it evaluates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.instructions import Backward, Norm, Update
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.searcher.space.graph_rewrites import steps
from stratagem.simulator.graph.forward_pass import forward_pass
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.forward_passes import CASES, ForwardCase, drawn_plan, forward_plan
from tests.support.plans import crossed, drawing, gpt_case, sharding, whole

SAMPLE, OUT = DimKind.SAMPLE.value, "out"


def assert_gives_back(case: ForwardCase, plan: Plan) -> None:
    result = execute(plan, case.graph, model_state(case.model), case.batch)
    truth = case.truth()
    assert result.outputs is not None
    assert list(result.outputs) == list(truth)
    for name, expected in truth.items():
        torch.testing.assert_close(result.outputs[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("shapes", "kinds", "zero", "parts"),
    [
        ([(1,)], (None,), 0, 1),
        ([(2,)], (SAMPLE,), 0, 2),
        ([(2,)], (SAMPLE,), 3, 1),
        ([(2,)], (OUT,), 0, 4),
        ([(2, 2)], (SAMPLE, OUT), 0, 2),
        ([(2,)], ("expert",), 0, 2),
        ([(2,), (1,), (2,)], (SAMPLE,), 0, 4),
    ],
    ids=["one", "data", "sharded weights", "tensor", "both", "experts", "pipeline"],
)
def test_ways_to_divide_it(
    name: str, shapes: list[tuple[int, ...]], kinds: tuple[str, ...], zero: int, parts: int
) -> None:
    case = CASES[name]()

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        return sharding(*kinds[: len(shape)], zero=zero)(operator, shape)

    assert_gives_back(case, forward_plan(case.graph, shapes, choose, num_microbatches=parts))


@pytest.mark.parametrize(("seed", "name"), crossed(range(8), CASES, every=3))
def test_any_plan_gives_it_back(name: str, seed: int) -> None:
    case = CASES[name]()
    assert_gives_back(case, drawn_plan(case.graph, seed, drawing))


def test_nothing_runs_backward_and_nothing_is_updated() -> None:
    case = CASES["encoder"]()
    training = Training(clip_norm=1.0)
    plan = forward_plan(case.graph, [(2,)], sharding(SAMPLE), training=training)
    program = lower(plan, case.graph)
    done = [each for rank in program.ranks for each in rank.instructions]
    assert done
    assert not [each for each in done if isinstance(each, Backward | Update | Norm)]


def test_the_last_of_several_batches_is_given_back() -> None:
    case = CASES["layers"]()
    plan = forward_plan(case.graph, [(2,)], sharding(SAMPLE))
    batches = [{"input": torch.randn(12, 10)} for _ in range(3)]
    result = execute(plan, case.graph, model_state(case.model), batches, steps=3)
    assert result.outputs is not None
    with torch.no_grad():
        torch.testing.assert_close(result.outputs["output"], case.model(batches[-1]["input"]))
    assert (result.losses, result.num_steps) == ((), 3)
    assert "3 steps" in repr(result)
    assert len(result.table.rows) == 3


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_parameters_are_held_in_the_precision_of_the_plan(precision: str) -> None:
    case = CASES["layers"]()
    training = Training(precision)
    plan = forward_plan(case.graph, [(2,)], sharding(SAMPLE), training=training)
    result = execute(plan, case.graph, model_state(case.model), case.batch, steps=2)
    assert result.outputs is not None
    dtype = getattr(torch, precision)
    model = copy.deepcopy(case.model).to(dtype)
    expected = model(case.batch["input"].to(dtype)).detach()
    torch.testing.assert_close(result.outputs["output"], expected, rtol=2e-2, atol=2e-2)


def test_a_step_without_a_clock_gives_it_back_too() -> None:
    case = CASES["encoder"]()
    plan = forward_plan(case.graph, [(2,), (2,)], sharding(SAMPLE), num_microbatches=4)
    program = lower(plan, case.graph)

    def run(comm: Communicator) -> dict[str, torch.Tensor]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        for _ in range(2):
            interpreter.issue(case.batch)
        return interpreter.results()

    first, *others = run_local(program.world_size, run)
    assert not any(others)
    for name, expected in case.truth().items():
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [1, 4])
def test_memory_is_what_was_said(name: str, parts: int) -> None:
    case = CASES[name]()
    plan = forward_plan(case.graph, [(2,)], sharding(SAMPLE), num_microbatches=parts)
    result = execute(plan, case.graph, model_state(case.model), case.batch, memory=True)
    said = peak_bytes(lower(plan, case.graph))
    simulated = simulate_plan(plan, case.graph, default_costs()).peak_memory
    assert max(result.peak_bytes) == pytest.approx(max(said), rel=0.1)
    # Ranks keep the inputs of the whole batch, of which a microbatch's are simulated.
    inputs = sum(each.numel() * each.element_size() for each in case.batch.values())
    assert 0.8 * simulated <= max(result.peak_bytes) <= 1.2 * simulated + inputs


def test_what_only_training_has_is_refused() -> None:
    case = CASES["layers"]()
    plan = forward_plan(case.graph, [(1,)], whole)
    with pytest.raises(ValueError, match=r"trains nothing; leave out gradients="):
        execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)


def test_a_module_that_evaluates_is_captured_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    graph = capture(model, (torch.randn(6, 4),), forward=True)
    assert [module.training for module in model.modules()] == modes
    assert [operator.kind for operator in graph.operators[1:]] == [
        "linear",
        "batch_norm",
        "elementwise",
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_forward_pass_of_a_training_step_is_executed(seed: int) -> None:
    case = gpt_case()
    graph = forward_pass(case.graph)
    plan = drawn_plan(graph, seed, drawing)
    batch = {"input_ids": case.batch["input_ids"]}
    result = execute(plan, graph, model_state(case.model), batch)
    seen: list[torch.Tensor] = []
    head = case.model.get_submodule("head")
    hook = head.register_forward_hook(lambda module, given, made: seen.append(made.detach()))
    case.model.eval()(**case.batch)
    hook.remove()
    assert result.outputs is not None
    torch.testing.assert_close(
        result.outputs["head"].flatten(), seen[0].flatten(), rtol=1e-4, atol=1e-5
    )


class Rewritable(nn.Module):
    """Two layers that read the same, and a mean behind a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.tanh(self.one(x)) * self.two(x)
        return self.three(made).mean(1), made


def test_rewritten_graphs_give_the_same_back() -> None:
    torch.manual_seed(0)
    model, batch = Rewritable(), {"x": torch.randn(4, 3, 8)}
    case = ForwardCase(model, batch, capture(model, (), batch, forward=True))
    rules = []
    for step in steps(case.graph):
        rewritten = rewrite(case.graph, (step,))
        plan = forward_plan(rewritten.graph, [(2,)], sharding(SAMPLE), num_microbatches=2)
        assert_gives_back(case, replace(plan, substitutions=(step,)))
        rules.append(step.rule)
    assert rules == ["merge", "reduce-first"]


class Returning(nn.Module):
    """A layer, and what is returned of its result."""

    def __init__(self, returned: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(4, 4), returned

    def forward(self, x: Tensor) -> object:
        return self.returned(self.layer(x))


class Ends(NamedTuple):
    first: object
    rest: object


def test_fields_of_named_tuples_are_called_as_they_are() -> None:
    model = Returning(lambda y: {"ends": Ends(y, [y * 2])})
    graph = capture(model, (torch.randn(4, 4),), forward=True)
    assert [output.name for output in graph.outputs] == ["ends.first", "ends.rest.0"]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda y: {"a.b": y, "a": {"b": y * 2}}, "two tensors .* are called 'a.b'"),
        (lambda y: {1: y, "1": y * 2}, "two tensors .* are called '1'"),
        (lambda y: {"a\nb": y}, r"no name may have control characters"),
    ],
    ids=["keys with dots", "keys of two types", "control characters"],
)
def test_results_that_no_name_tells_apart_are_refused(
    returned: Callable[[Tensor], object], said: str
) -> None:
    """The second of two with one name was left out, and a check of the plan passed without it."""
    with pytest.raises(ValueError, match=said):
        capture(Returning(returned), (torch.randn(4, 4),), forward=True)
