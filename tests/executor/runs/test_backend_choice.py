"""Which backend and GPU a rank takes: what was asked for, or an error that says what to do."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from typer.testing import CliRunner

import stratagem as sg
from stratagem.cli.app import app
from stratagem.executor import model_state
from stratagem.executor.backends.nccl import join_nccl
from stratagem.executor.cuda.cupy_kernels import check_gpu
from stratagem.executor.cuda.own_gpu import claim, own_gpu
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.checking import judge
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.running.world import default_backend
from stratagem.executor.training.training_loop import RunOptions
from stratagem.face import diagnosis
from stratagem.runs import process_ranks
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import Environment, Provenance

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.nn.functional.mse_loss(self.layer(x), x)

def build():
    return Net(), {"x": torch.ones(8, 16)}
"""
CPUS = sg.Cluster.preset("local-cpu")
LAUNCHING = sys.modules["stratagem.executor.running.launch"]
RANK = ("LOCAL_RANK", "SLURM_LOCALID", "LOCAL_WORLD_SIZE")


def fake_cupy(
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: str = "14.0.1",
    cuda: int = 12090,
    nccl: bool = True,
    compiles: bool = True,
) -> list[str]:
    """CuPy as far as it is asked what it is; the kernels that it was asked to compile."""
    compiled: list[str] = []

    def raw_module(code: str, options: tuple[str, ...]) -> Any:
        if not compiles:
            raise RuntimeError("libnvrtc.so.12 is not there\nand more lines")
        return SimpleNamespace(get_function=compiled.append)

    library = SimpleNamespace(available=nccl, get_version=lambda: 22703)
    made = SimpleNamespace(
        __version__=version,
        RawModule=raw_module,
        cuda=SimpleNamespace(
            nccl=library, runtime=SimpleNamespace(runtimeGetVersion=lambda: cuda)
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", library)
    return compiled


def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.executor.cuda.cupy_kernels.has_cupy", lambda: False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many GPUs torch sees, built for CUDA 12; no variable of a rank is set."""

    def seen(count: int, **variables: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        card = SimpleNamespace(name="NVIDIA H200", total_memory=2**37)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
        for name in RANK:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return seen


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return {"input": torch.randn(8, 8), "targets": torch.randint(8, (8,))}


@pytest.fixture(scope="module")
def graph(model: nn.Module, batch: dict[str, Tensor]) -> sg.OperatorGraph:
    loss = nn.functional.cross_entropy
    return sg.capture(model, (batch["input"],), loss=loss, targets=batch["targets"])


@pytest.fixture(scope="module")
def plan(graph: sg.OperatorGraph) -> Plan:
    cluster = sg.Cluster.preset("dgx-h100", num_nodes=1, devices_per_node=2)
    return sg.TrainingSetup(microbatch=4, training=sg.Training()).plan(graph, cluster)


def on_cpus(plan: Plan) -> Plan:
    return replace(plan, cluster=CPUS)


class TestDefault:
    @pytest.mark.parametrize(
        ("count", "variables", "expected"),
        [
            (0, {"LOCAL_WORLD_SIZE": 8}, "gloo"),
            (2, {"LOCAL_WORLD_SIZE": 2}, "nccl"),
            (8, {}, "nccl"),
            (1, {"LOCAL_WORLD_SIZE": 8, "LOCAL_RANK": 3}, "nccl"),
        ],
    )
    def test_it_is_nccl_where_there_are_gpus(
        self, gpus: Any, monkeypatch: Any, count: int, variables: Any, expected: str
    ) -> None:
        gpus(count, **variables)
        fake_cupy(monkeypatch)
        assert default_backend() == expected

    def test_gpus_without_cupy_are_no_reason_to_train_on_cpus(
        self, gpus: Any, monkeypatch: Any
    ) -> None:
        gpus(8)
        without_cupy(monkeypatch)
        with pytest.raises(RuntimeError, match=r"CuPy is not installed; pip install 'stratagem"):
            default_backend()

    def test_more_ranks_than_gpus_are_refused(self, gpus: Any, monkeypatch: Any) -> None:
        gpus(2, LOCAL_WORLD_SIZE=3)
        fake_cupy(monkeypatch)
        with pytest.raises(RuntimeError, match=r"3 ranks .* need a GPU each, and torch sees 2"):
            default_backend()

    def test_a_plan_of_cpus_runs_on_them(self, gpus: Any, monkeypatch: Any, plan: Plan) -> None:
        gpus(8)
        without_cupy(monkeypatch)
        assert default_backend(on_cpus(plan)) == "gloo"
        with pytest.raises(RuntimeError, match="CuPy is not installed"):
            default_backend(plan)

    def test_a_launch_says_it_before_any_rank_starts(
        self, gpus: Any, monkeypatch: Any, plan: Plan, tmp_path: Path
    ) -> None:
        plan.save(tmp_path / "plan.json")
        started: list[Any] = []
        monkeypatch.setattr(LAUNCHING, "run_ranks", lambda *a, **k: started.append(a))
        gpus(1)
        fake_cupy(monkeypatch)
        with pytest.raises(RuntimeError, match="2 ranks need a GPU each, and torch sees 1"):
            launch(RunRequest(plan=tmp_path / "plan.json", model="nowhere:model"))
        without_cupy(monkeypatch)
        shown = CliRunner().invoke(app, ["run", str(tmp_path / "plan.json"), "nowhere:model"])
        assert shown.exit_code == 2
        assert "pip install 'stratagem[gpu]'" in shown.output
        assert not started

    @pytest.mark.slow
    def test_gloo_that_is_asked_for_is_taken(
        self, gpus: Any, monkeypatch: Any, plan: Plan, tmp_path: Path
    ) -> None:
        plan.save(tmp_path / "plan.json")
        gpus(8)
        without_cupy(monkeypatch)
        started: list[RunRequest] = []

        def stop(arguments: list[str], *more: Any, **options: Any) -> None:
            started.append(RunRequest.of_flags(arguments[1:]))
            raise RuntimeError("enough")

        monkeypatch.setattr(LAUNCHING, "run_ranks", stop)
        asked = RunRequest(plan=tmp_path / "plan.json", model="nowhere:model", backend="gloo")
        with pytest.raises(RuntimeError, match="enough"):
            launch(asked)
        assert started[0].backend == "gloo"

    def test_an_unknown_backend_is_named(self, plan: Plan, tmp_path: Path) -> None:
        plan.save(tmp_path / "plan.json")
        arguments = ["run", str(tmp_path / "plan.json"), "nowhere:model", "--backend", "ncll"]
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 2
        assert "did you mean 'nccl'" in shown.output

    def test_execute_says_it_too(
        self, gpus: Any, monkeypatch: Any, plan: Plan, model: Any, batch: Any, graph: Any
    ) -> None:
        gpus(1)
        fake_cupy(monkeypatch)
        with pytest.raises(RuntimeError, match="2 ranks need a GPU each, and torch sees 1"):
            sg.execute(plan, model, batch, graph=graph, backend="nccl")


class TestCupy:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"version": "13.6.0"}, "CuPy 13.6.0 is installed, and 14 or newer is needed"),
            ({"cuda": 11080}, "CuPy 14.0.1 is for CUDA 11, but torch for CUDA 12"),
            ({"nccl": False}, "CuPy 14.0.1 finds no NCCL"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, gpus: Any, monkeypatch: Any, given: Any, words: str
    ) -> None:
        gpus(2)
        fake_cupy(monkeypatch, **given)
        with pytest.raises(RuntimeError, match=words):
            join_nccl()
        rows = {row[0]: row for row in diagnosis.doctor().rows}
        assert rows["CuPy"][1] == "broken"
        assert words in str(rows["CuPy"][2])
        assert "stratagem[gpu" in str(rows["CuPy"][3])

    def test_what_fits_is_not(self, gpus: Any, monkeypatch: Any) -> None:
        gpus(2)
        fake_cupy(monkeypatch)
        check_gpu("a test")

    def test_the_doctor_compiles_the_kernels(self, gpus: Any, monkeypatch: Any) -> None:
        gpus(1)
        compiled = fake_cupy(monkeypatch)
        found = diagnosis.doctor()
        rows = {row[0]: row for row in found.rows}
        assert rows["CuPy"][1:3] == ("good", "14.0.1, CUDA 12.9")
        assert rows["NCCL"][1:3] == ("good", "2.27.3, through CuPy")
        assert rows["kernels"][1] == "good"
        assert "adam" in compiled
        assert "run here" in found.note
        fake_cupy(monkeypatch, compiles=False)
        found = diagnosis.doctor()
        rows = {row[0]: row for row in found.rows}
        assert rows["kernels"][1] == "broken"
        assert "libnvrtc.so.12 is not there" in str(rows["kernels"][2])
        assert "not run on them" in found.note


class TestOwnGpu:
    @pytest.mark.parametrize(
        ("count", "variables", "expected"),
        [
            (8, {"LOCAL_RANK": 3}, 3),
            (8, {"SLURM_LOCALID": 5}, 5),
            (8, {"LOCAL_RANK": 2, "SLURM_LOCALID": 5}, 2),
            (1, {"LOCAL_RANK": 3}, 0),
            (1, {"SLURM_LOCALID": 7}, 0),
            (1, {}, 0),
        ],
    )
    def test_a_rank_takes_its_own(
        self, gpus: Any, count: int, variables: Any, expected: int
    ) -> None:
        gpus(count, **variables)
        assert own_gpu() == expected

    def test_a_rank_that_nothing_tells_apart_is_refused(self, gpus: Any) -> None:
        """It would be GPU 0 for every rank."""
        gpus(8)
        with pytest.raises(ValueError, match="8 GPUs, and neither LOCAL_RANK nor SLURM_LOCALID"):
            own_gpu()

    def test_a_rank_without_a_gpu_is_refused(self, gpus: Any) -> None:
        gpus(2, LOCAL_RANK=2)
        with pytest.raises(RuntimeError, match=r"local rank 2 has no GPU .* this machine has 2"):
            own_gpu()

    def test_a_number_that_is_none_is_named(self, gpus: Any, monkeypatch: Any) -> None:
        gpus(2)
        monkeypatch.setenv("LOCAL_RANK", "first")
        with pytest.raises(ValueError, match="LOCAL_RANK is 'first'; it must be a number"):
            own_gpu()

    def test_two_ranks_with_one_gpu_are_told_apart_by_its_number(self, monkeypatch: Any) -> None:
        """Two tasks that see one device each may see the same one."""
        cards = {0: SimpleNamespace(name="NVIDIA H200", uuid="GPU-1"), 1: None}
        cards[1] = SimpleNamespace(name="NVIDIA H200", uuid="GPU-2")
        monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
        store = HashStore()
        claim(store, "world 0", 0)
        claim(store, "world 0", 1)
        claim(store, "world 1", 0)
        with pytest.raises(ValueError, match="two ranks have the same GPU, NVIDIA H200 GPU-1"):
            claim(store, "world 0", 0)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU and cannot be saved before it is brought back."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.cpu:
            return args[0].as_subclass(Tensor).clone()
        return super().__torch_function__(function, types, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("saved where it is")


class TestModelOnGpu:
    def test_its_state_is_brought_to_the_cpu(self) -> None:
        layer = nn.Linear(3, 2)
        given = nn.Module()
        given.register_buffer("weight", layer.weight.detach().as_subclass(OnGpu))
        state = model_state(given)
        assert type(state["weight"]) is Tensor
        assert torch.equal(state["weight"], layer.weight)

    def test_processes_get_and_give_tensors_of_the_cpu(
        self, monkeypatch: Any, plan: Plan, batch: Any, graph: Any, model: nn.Module
    ) -> None:
        """Every tensor that crosses is read to the CPU, wherever it was saved."""
        places: list[Any] = []
        real = torch.load

        def load(*arguments: Any, **options: Any) -> Any:
            places.append(options.get("map_location"))
            return real(*arguments, **options)

        monkeypatch.setattr(torch, "load", load)

        def run_here(arguments: list[str], *more: Any, **options: Any) -> None:
            monkeypatch.setattr(sys, "argv", ["ranks", arguments[1]])
            monkeypatch.setenv("RANK", "0")
            whole = process_ranks.run_plan
            monkeypatch.setattr(
                process_ranks, "run_plan", lambda *a, **k: whole(*a, **{**k, "backend": "local"})
            )
            process_ranks.main()

        monkeypatch.setattr(process_ranks, "run_ranks", run_here)
        threads = torch.get_num_threads()
        found = process_ranks.run_processes(plan, graph, model_state(model), batch, RunOptions())
        torch.set_num_threads(threads)
        assert places == ["cpu", "cpu"]
        assert found.backend == "local"

    def test_one_process_is_compared_with_on_the_cpu(self, batch: Any) -> None:
        moved: list[str] = []

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def cpu(self) -> nn.Module:
                moved.append("model")
                return self

            def forward(self, x: Tensor) -> Tensor:
                assert not isinstance(x, OnGpu)
                return self.layer(x).square().mean()

        net = Net()
        graph = sg.capture(net, kwargs={"x": batch["input"]})
        plan = sg.TrainingSetup(training=sg.Training()).plan(graph, CPUS)
        found = sg.execute(plan, net, {"x": batch["input"]}, graph=graph, gradients=True)
        there = {"x": batch["input"].as_subclass(OnGpu)}
        assert judge(net, there, found, plan, graph).agrees
        assert "model" in moved

    def test_training_it_on_cpus_is_said(
        self, plan: Plan, batch: Any, graph: Any, model: nn.Module
    ) -> None:
        class OnCuda(nn.Parameter):
            is_cuda = True

        given = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        given.load_state_dict(model.state_dict())
        given[0].weight.__class__ = OnCuda
        with pytest.warns(UserWarning, match="the model is on a GPU, but backend 'local' trains"):
            found = sg.execute(plan, given, batch, graph=graph)
        assert found.losses == sg.execute(plan, model, batch, graph=graph).losses


class TestResult:
    def test_the_backend_and_the_device_stand_in_every_result(
        self, plan: Plan, model: nn.Module, batch: Any, graph: Any
    ) -> None:
        found = sg.execute(plan, model, batch, graph=graph)
        where = found.provenance
        assert (found.backend, where.precision) == ("local", "float32")
        assert where.environment.torch == torch.__version__
        assert where.python == ".".join(map(str, sys.version_info[:3]))
        assert where.stratagem == sg.__version__
        assert where.devices == (where.environment.device,) * 2
        assert "is for H100-80GB, but runs on CPUs" in where.elsewhere(plan)
        assert where.elsewhere(on_cpus(plan)) == ""

    def test_another_model_of_gpu_is_said(self, plan: Plan) -> None:
        def ran(*devices: str) -> str:
            where = Environment(devices[0], "2.13")
            return Provenance("nccl", "bfloat16", where, devices, "0", "3").elsewhere(plan)

        assert ran("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3") == ""
        assert "is for H100-80GB, but runs on NVIDIA H200" in ran("NVIDIA H200", "NVIDIA H200")

    @pytest.mark.slow
    def test_a_run_says_where_it_was(self, plan: Plan, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        (tmp_path / "backend_model.py").write_text(MODEL)
        made: dict[str, Any] = {}
        exec(MODEL, made)
        net, inputs = made["build"]()
        setup = sg.TrainingSetup(microbatch=4, training=sg.Training())
        setup.plan(sg.capture(net, kwargs=inputs), plan.cluster).save("plan.json")
        arguments = ["run", "plan.json", "backend_model:build", "--backend", "gloo"]
        shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*arguments, "--out", "run.json"])
        assert shown.exit_code == 0, shown.output
        assert "; gloo on 2 × " in shown.output
        assert "is for H100-80GB, but runs on CPUs" in shown.output
        report = ExecutionResult.load("run.json")
        assert report.provenance is not None
        assert report.provenance.backend == "gloo"
        assert report.provenance.environment.load == 1
