"""Values from files: of a model that no process holds whole, each rank reads its own part."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import stratagem as sg
from stratagem.executor import execute
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.state.parameter_parts import model_state
from stratagem.executor.state.weight_files import WeightFiles, weight_files
from stratagem.simulator.plan.plan import Plan
from tests.support.checkpoint_runs import (
    PLANS,
    batches_of,
    make_plan,
    plan_called,
    sharded,
    small_llama,
    state_of,
)


class Tower(nn.Module):
    """Layers of which the last shares its matrix with the first; a buffer that files leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 12, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((8,), 0.5, device="cpu"), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.last(self.norm(self.first(ids)) * self.scale)
        return nn.functional.cross_entropy(scores, labels)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(12, (8,)), "labels": torch.randint(12, (8,))}


def tower() -> Tower:
    torch.manual_seed(0)
    model = Tower()
    model.norm.num_batches_tracked.fill_(3)
    return model


def without_values() -> Tower:
    with torch.device("meta"):
        return Tower()


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """What ranks of another process call."""
    return without_values(), batch()


def plan_of(model: nn.Module, **training: object) -> Plan:
    graph = sg.capture(model, (), batch())
    asked = sg.Training("float32", learning_rate=0.1, **training)  # type: ignore[arg-type]
    setup = sg.TrainingSetup(microbatch=4, zero=1, training=asked)
    return setup.plan(graph, sg.Cluster.preset("local-cpu", devices_per_node=2))


def saved(path: Path, model: nn.Module, dtype: torch.dtype | None = None) -> Path:
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "last.weight"}
    if dtype is not None:
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    save_file(state, path)
    return path


@pytest.mark.parametrize("name", PLANS)
def test_a_run_begins_with_what_is_in_the_files(name: str, tmp_path: Path) -> None:
    graph = small_llama()
    state, plan = state_of(graph), plan_called(name, graph)
    names = sorted(state)
    half = len(names) // 2
    for k, part in enumerate((names[:half], names[half:])):
        save_file({each: state[each] for each in part}, tmp_path / f"{k}.safetensors")
    places = {
        each: (str(tmp_path / f"{int(k >= half)}.safetensors"), each)
        for k, each in enumerate(names)
    }
    one = execute(plan, graph, state, batches_of(graph), steps=2)
    two = execute(plan, graph, WeightFiles({}, places), batches_of(graph), steps=2)
    assert one.losses == two.losses
    for each in names:
        assert torch.equal(one.parameters[each], two.parameters[each])


class OneByOne(Mapping[str, Tensor]):
    """Tensors that are made when asked for, and the most elements of them alive at once."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state, self._alive, self.most = state, 0, 0

    def __getitem__(self, name: str) -> Tensor:
        made = self._state[name].clone()
        count = made.numel()
        self._alive += count
        self.most = max(self.most, self._alive)
        weakref.finalize(made.untyped_storage(), self._gone, count)
        return made

    def _gone(self, count: int) -> None:
        self._alive -= count

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@pytest.mark.parametrize("rules", [(), ("merge",)])
def test_a_rank_holds_one_whole_parameter_at_a_time(rules: tuple[str, ...]) -> None:
    """Its parts are copies; of merged parameters, those that one is made of are there with it."""
    graph = small_llama()
    state = state_of(graph)
    program = prepare(make_plan(graph, sharded("sample", zero=3), 2, rules=rules), graph)
    given = [OneByOne(state) for _ in range(2)]

    def run(comm: Communicator) -> int:
        Interpreter(program, comm, given[comm.rank])
        return given[comm.rank].most

    largest = max(each.numel() for each in state.values())
    everything = sum(each.numel() for each in state.values())
    for most in run_local(2, run, timeout=60):
        assert largest <= most <= (4 if rules else 2) * largest < everything


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_model_without_values_trains_as_the_one_that_was_saved(
    backend: str, tmp_path: Path
) -> None:
    model = tower()
    plan, file = plan_of(model), saved(tmp_path / "model.safetensors", model)
    truth = sg.execute(plan, model, batch(), steps=3, progress=False)
    empty = without_values()
    found = sg.execute(
        plan,
        empty,
        batch(),
        steps=3,
        weights=file,
        backend=backend,  # type: ignore[arg-type]
        progress=False,
    )
    assert found.losses == pytest.approx(truth.losses, rel=1e-6)
    assert found.parameters.keys() == truth.parameters.keys()
    for name, tensor in truth.parameters.items():
        assert torch.allclose(found.parameters[name], tensor, rtol=1e-5, atol=1e-6), name
    assert all(each.is_meta for each in empty.parameters())


def test_ranks_that_build_it_themselves_read_their_parts(tmp_path: Path) -> None:
    """And a check gives the one device that it compares with the same values."""
    model = tower()
    plan, file = plan_of(model), saved(tmp_path / "model.safetensors", model)
    plan.save(tmp_path / "plan.json")
    truth = sg.execute(plan, model, batch(), steps=2, progress=False)
    request = RunRequest(
        plan=tmp_path / "plan.json",
        model="tests.executor.checkpoints.test_weight_files:build",
        weights=file,
        steps=2,
        check=True,
        backend="gloo",
        checkpoint=tmp_path / "checkpoints",
    )
    result = launch(request, folder=Path(__file__).parents[3])
    assert result.losses == pytest.approx(truth.losses, rel=1e-6)
    assert result.verdict is not None
    assert result.verdict.agrees
    left = sg.load_checkpoint(tmp_path / "checkpoints")
    assert torch.allclose(left["first.weight"], truth.parameters["first.weight"], atol=1e-6)
    with pytest.raises(ValueError, match=r"has no parameters.*load a checkpoint"):
        _ = result.parameters


def test_parameters_are_left_apart_where_nobody_asks_for_them(tmp_path: Path) -> None:
    model = tower()
    plan = plan_of(model, average="exponential")
    folder = tmp_path / "checkpoints"
    result = sg.execute(
        plan, model, batch(), steps=1, parameters=False, checkpoint=folder, progress=False
    )
    for whole in ("parameters", "averages"):
        with pytest.raises(ValueError, match="checkpoint"):
            getattr(result, whole)
    assert sg.load_checkpoint(folder, averages=True).keys() >= {"first.weight"}


def test_numbers_of_fewer_bits_become_the_models_own(tmp_path: Path) -> None:
    model = tower()
    file = saved(tmp_path / "model.safetensors", model, torch.bfloat16)
    rounded = tower()
    rounded.load_state_dict(
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    )
    plan = plan_of(model)
    truth = sg.execute(plan, rounded, batch(), steps=2, progress=False)
    found = sg.execute(plan, without_values(), batch(), steps=2, weights=file, progress=False)
    assert found.losses == truth.losses
    assert found.parameters["first.weight"].dtype == torch.float32


def test_numbers_of_eight_bits_are_taken_or_refused_by_their_format(tmp_path: Path) -> None:
    model = tower()
    matrix = model.norm.weight.detach().to(torch.float8_e4m3fn)
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "last.weight"}
    save_file({**state, "norm.weight": matrix}, tmp_path / "model.safetensors")
    found = sg.execute(plan_of(model), tower(), batch(), weights=tmp_path, progress=False)
    truth = sg.execute(plan_of(model), model, batch(), progress=False)
    assert found.losses == truth.losses  # A norm begins with ones.


def test_numbers_of_more_bits_are_not_rounded_in_silence(tmp_path: Path) -> None:
    model = tower()
    file = saved(tmp_path / "model.safetensors", model, torch.float64)
    with pytest.raises(ValueError, match=r"'first.weight' is .* torch.float64 .* float32"):
        sg.execute(plan_of(model), without_values(), batch(), weights=file, progress=False)


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_a_model_without_values_needs_files(backend: str) -> None:
    with pytest.raises(ValueError, match=r"'first.weight' .* no values.*weights="):
        sg.execute(
            plan_of(tower()),
            without_values(),
            batch(),
            backend=backend,  # type: ignore[arg-type]
            progress=False,
        )


def test_a_buffer_that_no_file_has_needs_values(tmp_path: Path) -> None:
    file = saved(tmp_path / "model.safetensors", tower())
    empty = without_values()
    empty.scale = torch.empty(8, device="meta")
    with pytest.raises(ValueError, match="'scale' of the model has no values"):
        sg.execute(plan_of(tower()), empty, batch(), weights=file, progress=False)


def lacks_a_tensor(folder: Path) -> None:
    saved(folder / "model.safetensors", tower())
    state = load_file(folder / "model.safetensors")
    del state["norm.bias"]
    save_file(state, folder / "model.safetensors")


def has_another_prefix(folder: Path) -> None:
    saved(folder / "model.safetensors", tower())
    state = load_file(folder / "model.safetensors")
    save_file({f"model.{k}": v for k, v in state.items()}, folder / "model.safetensors")


def has_one_twice(folder: Path) -> None:
    saved(folder / "a.safetensors", tower())
    save_file({"norm.bias": torch.zeros(8)}, folder / "b.safetensors")


def is_cut_off(folder: Path) -> None:
    file = saved(folder / "model.safetensors", tower())
    file.write_bytes(file.read_bytes()[:200])


def is_empty(folder: Path) -> None:
    pass


def lost_a_file(folder: Path) -> None:
    saved(folder / "model-00001-of-00002.safetensors", tower())
    told = {"weight_map": {"rest.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))


def has_another_shape(folder: Path) -> None:
    saved(folder / "model.safetensors", tower())
    state = load_file(folder / "model.safetensors")
    save_file({**state, "norm.bias": torch.zeros(7)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (lacks_a_tensor, "lacks 'norm.bias'; give the weights of this model"),
        (
            has_another_prefix,
            "lacks 'norm.running_mean'.* and has 'model.first.weight'.* and 3 more",
        ),
        (has_one_twice, "'norm.bias' is in .*a.safetensors and in .*b.safetensors"),
        (is_cut_off, "model.safetensors is no file of safetensors, or damaged"),
        (is_empty, "has no file that ends in .safetensors"),
        (lost_a_file, "lacks 'model-00002-of-00002.safetensors', which"),
        (has_another_shape, r"'norm.bias' is \(7,\) .* \(8,\)"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    broken: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    broken(tmp_path)
    with pytest.raises(ValueError, match=told):
        sg.execute(plan_of(tower()), tower(), batch(), weights=tmp_path, progress=False)


def test_files_are_looked_at_before_ranks_begin(tmp_path: Path) -> None:
    plan_of(tower()).save(tmp_path / "plan.json")
    here = "tests.executor.checkpoints.test_weight_files:build"
    for path in (tmp_path / "lost.safetensors", tmp_path / "plan.json"):
        request = RunRequest(plan=tmp_path / "plan.json", model=here, weights=path)
        with pytest.raises(ValueError, match=rf"{path.name} is no file of safetensors"):
            launch(request)


def build_with_unused() -> tuple[nn.Module, dict[str, Tensor]]:
    """With a buffer that forward does not read, such as rotary frequencies before scaling."""
    empty = without_values()
    empty.register_buffer("unused", torch.empty(8, device="meta"), persistent=False)
    return empty, batch()


@pytest.mark.slow
def test_ranks_compare_what_has_values(tmp_path: Path) -> None:
    """What nothing reads may have none: ranks failed as they compared their models."""
    plan_of(tower()).save(tmp_path / "plan.json")
    request = RunRequest(
        plan=tmp_path / "plan.json",
        model="tests.executor.checkpoints.test_weight_files:build_with_unused",
        weights=saved(tmp_path / "model.safetensors", tower()),
        backend="gloo",
    )
    assert len(launch(request, folder=Path(__file__).parents[3]).losses) == 1


def test_one_of_the_names_of_a_shared_parameter_is_enough(tmp_path: Path) -> None:
    model = tower()
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "first.weight"}
    save_file(state, tmp_path / "model.safetensors")
    found = weight_files(without_values(), tmp_path)
    assert torch.equal(found["first.weight"], model.first.weight)
    assert set(found) == set(model_state(model))


def test_a_shared_parameter_has_the_same_numbers_by_each_name(tmp_path: Path) -> None:
    model = tower()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(weight_files(model, tmp_path)["first.weight"], model.first.weight)
    state["last.weight"][3, 2] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"other numbers for 'first.weight' than for 'last"):
        weight_files(without_values(), tmp_path)
