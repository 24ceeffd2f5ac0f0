"""The training loop: batches, learning rates, and what is refused before a step."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.models import MLP
from stratagem.executor import execute, model_state
from stratagem.executor.backends.threads import LocalCommunicator, run_local
from stratagem.executor.optimizers.make_optimizer import make_optimizer
from stratagem.executor.running.execute import check_world, prepare
from stratagem.executor.running.named_functions import make_data, make_rate
from stratagem.executor.training import step_paces
from stratagem.executor.training.batches import Batches, first_batch, units_of
from stratagem.executor.training.learning_rates import RateSchedule
from stratagem.executor.training.step_paces import StepPaces
from stratagem.executor.training.training_loop import RunOptions, check_equal
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture

BATCH = 4
torch.set_num_threads(1)


class Rows(Dataset[dict[str, Tensor]]):
    """Ten rows, so that batches of 4 leave a smaller one at the end."""

    def __init__(self, num_rows: int = 10) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(num_rows, 6, generator=generator)
        self.target = torch.randint(0, 3, (num_rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "target": self.target[row]}


def loader(*, num_rows: int = 10, **options: bool) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(num_rows), BATCH, **{"shuffle": True, "drop_last": True, **options})


@pytest.fixture(scope="module")
def model() -> MLP:
    torch.manual_seed(3)
    return MLP([6, 8, 3])


@pytest.fixture(scope="module")
def graph(model: MLP) -> OperatorGraph:
    return capture(model, kwargs=first_batch(loader()))


def make_plan(graph: OperatorGraph, ways: int = 2, **training: object) -> Plan:
    """Samples over all devices, but where an operator has none."""
    mesh = DeviceMesh((MeshAxis("data", ways),), tuple(range(ways)))
    choices = {
        operator.name: Choice((Shard("sample"),), 1)
        if any(d.name == "sample" and not d.whole for d in operator.dims) and ways > 1
        else Choice((REPLICATE,))
        for operator in graph.operators
    }
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=4),
        training=Training(**training),  # type: ignore[arg-type]
        stages=(Stage(tuple(choices), mesh, choices),),
        seed=5,
    )


# -- against one process of torch ---------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_equals_torchs_own_loop(
    model: MLP, graph: OperatorGraph, optimizer: str, decay: float
) -> None:
    """The same batches, learning rates and weight decay in plain torch give the same losses."""
    own: dict[str, Any] = {"betas": (0.8, 0.95)} if optimizer == "adam" else {}
    training = Training(optimizer=optimizer, learning_rate=0.05, weight_decay=decay, **own)
    plan = replace(make_plan(graph), training=training)
    rate = RateSchedule("cosine", warmup=2, total=7, floor=0.1)
    result = execute(plan, graph, model_state(model), loader(), steps=7, rate=rate)
    truth = MLP([6, 8, 3])
    truth.load_state_dict(model.state_dict())
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=decay),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), weight_decay=decay),
    }
    steps = kinds[optimizer](truth.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(steps, rate)
    batches = Batches(loader(), graph, seed=plan.seed)
    for step, loss in enumerate(result.losses):
        steps.zero_grad()
        expected = truth(**batches.at(step))
        expected.backward()
        steps.step()
        schedule.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4), step
    for name, parameter in truth.named_parameters():
        torch.testing.assert_close(result.parameters[name], parameter.detach(), rtol=0, atol=1e-4)


def test_a_function_of_the_step_is_a_learning_rate(model: MLP, graph: OperatorGraph) -> None:
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.0

    batch = first_batch(loader())
    result = execute(make_plan(graph, 1), graph, model_state(model), batch, steps=3, rate=rate)
    assert seen == [0, 1, 2]
    assert len(set(result.losses)) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(result.parameters[name], parameter.detach())


# -- batches ------------------------------------------------------------------------------------


def drawn(batches: Batches, steps: range) -> list[Tensor]:
    return [batches.at(step)["x"] for step in steps]


def test_every_pass_has_an_order_of_its_own_and_begins_where_it_is_said(
    graph: OperatorGraph,
) -> None:
    whole = Batches(loader(), graph, seed=1)
    rows = drawn(whole, range(7))
    assert whole.position == (3, 1)
    assert not torch.equal(rows[0], rows[2])
    for step, position in enumerate([(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]):
        later = Batches(loader(), graph, seed=1)
        later.seek(position)
        assert all(map(torch.equal, drawn(later, range(step, 7)), rows[step:])), position
    other = drawn(Batches(loader(), graph, seed=2), range(7))
    assert not all(map(torch.equal, other, rows))


def test_random_numbers_outside_are_left_alone(graph: OperatorGraph) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first_batch(loader())
    drawn(Batches(loader(), graph), range(5))
    assert torch.equal(torch.rand(3), expected)


def test_threads_that_draw_at_once_do_not_change_each_others_order(graph: OperatorGraph) -> None:
    """They share torch's random numbers, which a pass over the data takes for its own."""
    seeds = range(4)
    alone = [drawn(Batches(loader(), graph, seed=seed), range(30)) for seed in seeds]
    together = [Batches(loader(), graph, seed=seed) for seed in seeds]
    with ThreadPoolExecutor(len(seeds)) as pool:
        found = list(pool.map(lambda batches: drawn(batches, range(30)), together))
    for mine, wanted in zip(found, alone, strict=True):
        assert all(map(torch.equal, mine, wanted))


def test_ranks_of_one_process_draw_each_batch_once(graph: OperatorGraph) -> None:
    batches = Batches(loader(), graph)

    def run(comm):  # type: ignore[no-untyped-def]
        found = []
        for step in range(4):
            found.append(batches.at(step)["x"])
            comm.barrier()
        return found

    first, second = run_local(2, run)
    assert all(map(torch.equal, first, second))
    assert batches.position == (1, 2)


def test_what_the_speed_is_counted_in(graph: OperatorGraph) -> None:
    assert units_of(graph) == ("samples", 4)
    tokens = gpt(num_layers=1, hidden=8, num_heads=2, sequence=16, batch=4)
    assert units_of(tokens) == ("tokens", 64)


def test_progress_says_loss_and_speed(model: MLP, graph: OperatorGraph) -> None:
    told: list[tuple[str, float, str]] = []
    execute(
        make_plan(graph),
        graph,
        model_state(model),
        loader(),
        steps=3,
        show=lambda what, fraction, remark: told.append((what, fraction, remark)),
    )
    what, fraction, remark = told[-1]
    assert (what, fraction) == ("training", 1.0)
    assert remark.startswith("step 3 of 3, loss ")
    assert remark.endswith("samples/s")


# -- refusals -----------------------------------------------------------------------------------


class Odd:
    """Batches that are right until one is not."""

    def __init__(self, odd: object, after: int) -> None:
        self.odd, self.after = odd, after

    def __iter__(self) -> Iterator[object]:
        for _ in range(self.after):
            yield first_batch(loader())
        yield self.odd


GOOD = first_batch(loader())


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({**GOOD, "x": torch.randn(3, 6)}, r"'x' is \(3, 6\) torch.float32.* with \(4, 6\)"),
        ({**GOOD, "x": torch.randn(4, 6).double()}, r"torch.float64.* \(4, 6\) float32"),
        ({"x": GOOD["x"]}, "no input 'target'; it has x"),
        ({**GOOD, "target": [0, 1, 2, 0]}, "'target' is a list; it must be a tensor"),
        ([GOOD["x"], GOOD["target"]], "is a list; each must be a dict"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    model: MLP, graph: OperatorGraph, odd: object, words: str, after: int
) -> None:
    """Before the first step, and before its own."""
    shown: list[str] = []
    with pytest.raises(ValueError, match=rf"the batch of step {after}.*{words}"):
        execute(
            make_plan(graph),
            graph,
            model_state(model),
            Odd(odd, after),  # type: ignore[arg-type]
            steps=5,
            show=lambda what, fraction, remark: shown.append(remark),
        )
    assert not any("step 3 of" in remark for remark in shown)


def test_an_error_says_where_its_rank_was(
    model: MLP, graph: OperatorGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step it is an instruction of the rank's program."""
    calls: list[int] = []
    original = LocalCommunicator.all_reduce

    def failing(self, tensor, group, op="sum"):  # type: ignore[no-untyped-def]
        calls.append(self.rank)
        if calls.count(1) > 4 and self.rank == 1:
            raise RuntimeError("the cable is loose")
        return original(self, tensor, group, op)

    monkeypatch.setattr(LocalCommunicator, "all_reduce", failing)
    with pytest.raises(RuntimeError, match="the cable is loose") as caught:
        execute(make_plan(graph), graph, model_state(model), GOOD, steps=9)
    (note,) = [note for note in caught.value.__notes__ if "was at" in note]
    assert re.fullmatch(r"rank 1 was at step \d, instruction \d+ '.+'", note)


def test_a_smaller_last_batch_says_what_to_do(model: MLP, graph: OperatorGraph) -> None:
    with pytest.raises(ValueError, match=r"step 2.*\(2, 6\).*drop_last=True"):
        execute(make_plan(graph), graph, model_state(model), loader(drop_last=False), steps=4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no batch in pass 1"),
        ((GOOD for _ in range(2)), "no batch in pass 2 .* gone through again"),
    ],
)
def test_data_that_ends_for_good_is_refused(
    model: MLP, graph: OperatorGraph, data: object, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        execute(make_plan(graph), graph, model_state(model), data, steps=4)  # type: ignore[arg-type]


def test_an_iterator_is_not_captured() -> None:
    with pytest.raises(ValueError, match="the first batch would be lost"):
        first_batch(iter([GOOD]))
    with pytest.raises(ValueError, match="gives no batch"):
        first_batch([])


def test_a_plan_of_another_model_or_world_is_refused(model: MLP, graph: OperatorGraph) -> None:
    plan = make_plan(graph)
    other = MLP([6, 9, 3])
    with pytest.raises(ValueError, match=r"plan 'test' was made for model 'MLP' \(fingerprint"):
        execute(plan, capture(other, kwargs=GOOD), model_state(other), GOOD)
    with pytest.raises(ValueError, match=r"uses 2 devices, but this world has 3 .*per-node 2 -m"):
        check_world(prepare(plan, graph), 3)


def test_ranks_with_different_tensors_are_refused() -> None:
    """The same values in another order differ too, which is what shuffling does."""

    def run(comm):  # type: ignore[no-untyped-def]
        rows = torch.arange(6.0)
        check_equal({"same": rows, "x": rows}, comm, "batches", "why")
        mine = rows if comm.rank == 0 else rows.flip(0)
        check_equal({"same": rows, "x": mine}, comm, "batches", "why")

    with pytest.raises(ValueError, match="ranks have different batches: 'x' differs; why"):
        run_local(2, run)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "at least 1 step"),
        ({"warmup": -1}, "warmup=-1"),
        ({"every": 5}, "no folder for checkpoints"),
    ],
)
def test_options_that_say_nothing_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunOptions(**fields)  # type: ignore[arg-type]


# -- learning rates and optimizers --------------------------------------------------------------


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total", "floor"), [(0, 10, 0.0), (4, 9, 0.2)])
def test_schedules_are_their_formulas(shape: str, warmup: int, total: int, floor: float) -> None:
    rate = RateSchedule(shape, warmup, total, floor)  # type: ignore[arg-type]
    for step in range(2 * total):
        if step < warmup:
            assert rate(step) == pytest.approx((step + 1) / warmup)
            continue
        x = min(1.0, (step - warmup) / (total - warmup))
        down = {"constant": 1.0, "linear": 1 - x, "cosine": 0.5 + 0.5 * math.cos(math.pi * x)}
        expected = 1.0 if shape == "constant" else floor + (1 - floor) * down[shape]
        assert rate(step) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shape": "cosin"}, "no learning-rate schedule 'cosin'; there are constant"),
        ({"shape": "cosine"}, "falls until step 0"),
        ({"shape": "linear", "warmup": 8, "total": 8}, "its warm-up takes 8"),
        ({"floor": 1.5}, "floor=1.5"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_broken_schedules_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RateSchedule(**fields)  # type: ignore[arg-type]


def test_what_a_command_line_names() -> None:
    assert make_rate("cosine", 2, 10) == RateSchedule("cosine", 2, 10)
    assert make_rate("math:sqrt", 0, 10)(4) == 2.0
    for arguments, words in (
        (("cosin", 0, 10), "there are constant, linear, cosine and module:function"),
        (
            ("math:sqr", 0, 10),
            "--rate: no function of module 'math' called 'sqr' .did you mean 'sqrt'",
        ),
        (("math:sqrt", 3, 10), "let it warm up itself"),
    ):
        with pytest.raises(ValueError, match=words):
            make_rate(*arguments)
    with pytest.raises(ValueError, match="returned a float; it must return an iterable"):
        make_data("time:time", 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_optimizer_goes_on_from_its_state(optimizer: str) -> None:
    training = Training(optimizer=optimizer, learning_rate=0.1)
    gradients = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    whole, parameter = make_optimizer(training), torch.ones(3)
    for gradient in gradients:
        whole("p", parameter, gradient)
    first, again = make_optimizer(training), torch.ones(3)
    for gradient in gradients[:2]:
        first("p", again, gradient)
    second = make_optimizer(training)
    saved = {name: state.clone() for name, state in first.state("p").tensors.items()}
    second.state("p").load(saved, first.state("p").updates)
    for gradient in gradients[2:]:
        second("p", again, gradient)
    assert torch.equal(parameter, again)
    assert second.state("p").updates == whole.state("p").updates == 5


def test_training_refuses_what_no_optimizer_does() -> None:
    with pytest.raises(ValueError, match=r"betas are \(0.9, 1.0\)"):
        Training(betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"weight_decay is -0\.1"):
        Training(weight_decay=-0.1)


def test_a_step_is_between_two_looks_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look every quarter of a second: steps of a tenth share what was seen around them."""
    moment, looks = [0.0], iter([4e-5, 6e-5, 5e-5, 7e-5])
    comm = types.SimpleNamespace(device=torch.device("cpu"), backend="gloo")
    kernel = types.SimpleNamespace(seconds=lambda: next(looks))
    monkeypatch.setattr(step_paces, "ReferenceKernel", lambda device: kernel)
    clock = types.SimpleNamespace(monotonic=lambda: moment[0])
    monkeypatch.setattr(step_paces, "time", clock)
    pace = StepPaces(comm)
    for _ in range(7):
        pace.look()
        moment[0] += 0.1
    assert pace.of_steps() == [50_000] * 3 + [55_000] * 3 + [60_000]


def test_ranks_that_are_threads_look_at_no_cores() -> None:
    comm = types.SimpleNamespace(device=torch.device("cpu"), backend="local")
    pace = StepPaces(comm)
    pace.look()
    assert pace.of_steps() == []


def test_paces_of_all_ranks_come_together_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has one of every rank: which core was slow in it says who waited for whom."""
    kernel = types.SimpleNamespace(seconds=lambda: 4e-5)
    monkeypatch.setattr(step_paces, "ReferenceKernel", lambda device: kernel)

    def run(comm: LocalCommunicator) -> tuple[tuple[float, ...], ...]:
        comm.backend = "gloo"
        paces = StepPaces(comm)
        monkeypatch.setattr(paces, "of_steps", lambda: [40_000 + comm.rank, 50_000 + comm.rank])
        return paces.of_all(comm)

    first, second = run_local(2, run)
    assert np.array(first) == pytest.approx(np.array([[4e-5, 4.0001e-5], [5e-5, 5.0001e-5]]))
    assert np.array(second) == pytest.approx(np.array([[4.0001e-5], [5.0001e-5]]))
