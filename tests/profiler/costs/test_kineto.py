"""Traces of torch.profiler: which operators they hold, for how long, and what they leave open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stratagem as sg
from stratagem.profiler import Environment, MeasuredCosts, TimingCache
from stratagem.profiler.cache.timing_keys import TimingEntry, operator_digest
from stratagem.profiler.imports.torch_profiler import read_kineto
from stratagem.profiler.imports.trace_events import looks_like_trace, read_trace
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import CostSource, Direction, RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator

HERE = Environment("this processor", "2.13")
READ = ("linear", "attention", "layer_norm", "softmax", "matmul", "conv2d", "batch_norm")


class Transformer(nn.Module):
    """Fused projections, strided heads, a product with a transposed tensor, a weight (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.up = nn.Parameter(torch.randn(32, 64))
        self.up_bias = nn.Parameter(torch.randn(64))
        self.rms = nn.RMSNorm(64)
        self.head = nn.Linear(64, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        batch, sequence, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, sequence, 3, 4, 8).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, 32).contiguous() + 1.0)
        scores = torch.softmax(x @ x.transpose(1, 2), -1)
        x = scores @ x
        x = torch.addmm(self.up_bias, x.view(-1, 32), self.up).view(batch, sequence, 64)
        logits = self.head(self.rms(torch.relu(x)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Images(nn.Module):
    """Convolutions, with and without a bias, a stride and groups, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.grouped = nn.Conv2d(16, 16, 1, groups=4)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.first(images))
        x = torch.relu(self.norm(self.grouped(self.second(x))))
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def record(path: Path, model: nn.Module, *arguments: Tensor, steps: int = 3) -> Path:
    """A trace of some training steps on this CPU."""

    def step() -> None:
        model(*arguments).backward()

    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            step()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.fixture(scope="module")
def transformer(tmp_path_factory) -> tuple[OperatorGraph, str]:
    torch.manual_seed(0)
    model, ids = Transformer(), torch.randint(50, (4, 16))
    path = record(tmp_path_factory.mktemp("trace") / "t.json", model, ids, ids)
    return sg.capture(model, (ids, ids)), path.read_text()


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[OperatorGraph, str]:
    torch.manual_seed(0)
    model, x, labels = Images(), torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    path = record(tmp_path_factory.mktemp("trace") / "t.json", model, x, labels)
    return sg.capture(model, (x, labels)), path.read_text()


def found_in(text: str) -> dict[tuple[str, Direction], TimingEntry]:
    entries, _ = read_kineto(text, "x", HERE)
    return {(operator_digest(e.key.operator), e.key.direction): e for e in entries}


def look_ups(tmp_path: Path, graph: OperatorGraph, text: str) -> dict[tuple[str, str], CostSource]:
    """Where the costs of a graph's operators come from once a trace is imported."""
    entries, _ = read_kineto(text, "x", HERE)
    with TimingCache(tmp_path / "timings.sqlite") as cache:
        cache.merge(entries)
        costs = MeasuredCosts(cache, {"cpu": HERE}, RooflineCosts())
    device = sg.Cluster.preset("local-cpu").device_type(0)
    return {
        (operator.name, direction.value): costs.operator_cost(
            operator, operator.sizes, direction, Training(), device
        ).source
        for operator in graph.operators
        for direction in Direction
        if operator.kind in READ
    }


class TestThisCpu:
    def test_a_transformer_is_answered_from_its_trace(self, tmp_path, transformer):
        graph, text = transformer
        found = look_ups(tmp_path, graph, text)
        kinds = {
            operator.kind for operator in graph.operators if (operator.name, "forward") in found
        }
        assert kinds == {"linear", "attention", "layer_norm", "softmax", "matmul"}
        assert set(found.values()) == {CostSource.MEASURED}

    def test_images_are_answered_but_for_the_first_layer(self, tmp_path, images):
        graph, text = images
        found = look_ups(tmp_path, graph, text)
        unanswered = {
            name for (name, _), source in found.items() if source is not CostSource.MEASURED
        }
        first = next(o.name for o in graph.operators if o.kind == "conv2d")
        assert unanswered == {first}
        _, left_out = read_kineto(text, "x", HERE)
        assert left_out["aten::conv2d: a backward pass without some gradients"] == 3

    def test_times_are_those_of_the_recorded_calls(self, transformer):
        _, text = transformer
        calls = [e for e in json.loads(text)["traceEvents"] if e.get("name") == "aten::addmm"]
        durations = sorted(e["dur"] * 1e-6 for e in calls if e["args"]["Input Dims"][0] == [64])
        graph, _ = transformer
        (operator,) = [
            o for o in graph.operators if o.kind == "linear" and o.attributes["transposed"]
        ]
        measured = found_in(text)[operator_digest(operator), Direction.FORWARD].measurement
        assert measured.repeats == len(durations) == 3
        assert measured.median_s == pytest.approx(durations[1])
        assert measured.origin == "torch.profiler"

    def test_what_is_not_read_is_counted(self, transformer):
        _, left_out = read_kineto(transformer[1], "x", HERE)
        assert left_out["aten::relu: no operator that is read"] == 3
        assert left_out["aten::cross_entropy_loss: no operator that is read"] == 3
        assert not any("aten::linear" in reason for reason in left_out)

    def test_it_says_when_it_was_recorded(self, transformer):
        import time

        entries, _ = read_kineto(transformer[1], "x", HERE)
        assert all(0 <= time.time() - entry.timestamp < 3600 for entry in entries)

    def test_inference_has_no_backward_pass(self, tmp_path):
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        with torch.profiler.profile(record_shapes=True) as profiler, torch.no_grad():
            model(x)
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        entries, left_out = read_kineto((tmp_path / "t.json").read_text(), "x", HERE)
        assert entries == []
        assert left_out == {"aten::linear: no backward pass recorded": 1}

    def test_without_shapes_nothing_is_guessed(self, tmp_path):
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        with torch.profiler.profile() as profiler:
            model(x).sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        entries, left_out = read_kineto((tmp_path / "t.json").read_text(), "x", HERE)
        assert entries == []
        assert any("record_shapes=True" in reason for reason in left_out)

    def test_under_autocast_the_inner_call_counts(self, tmp_path):
        model, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
        with torch.profiler.profile(record_shapes=True) as profiler:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(x)
            y.float().sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        entries, _ = read_kineto((tmp_path / "t.json").read_text(), "x", HERE)
        assert {e.key.precision for e in entries} == {"bfloat16"}
        assert {e.key.operator.kind for e in entries} == {"linear"}

    def test_overlapping_elements_are_not_read(self, tmp_path):
        x = torch.randn(1, 8, requires_grad=True)
        with torch.profiler.profile(record_shapes=True) as profiler:
            torch.softmax(x.expand(4, 8), -1).sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        entries, left_out = read_kineto((tmp_path / "t.json").read_text(), "x", HERE)
        assert entries == []
        assert left_out["aten::softmax: a tensor whose elements overlap or repeat"] == 1


def event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    thread = 7 if category == "kernel" else 1
    where = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
    return {**where, "ts": start, "dur": duration, "args": args}


def linear_call(start: float, sequence: int) -> list[dict[str, Any]]:
    """``aten::linear`` of (32, 64) to (32, 16) with its node on the way back, as on CUDA."""
    forward = {"Sequence number": sequence, "Fwd thread id": 0}
    shapes = {
        "Input Dims": [[32, 64], [16, 64], [16]],
        "Input Strides": [[64, 1], [64, 1], [1]],
        "Input type": ["c10::Half"] * 3,
        "Concrete Inputs": ["", "", ""],
    }
    node = {"Sequence number": sequence, "Fwd thread id": 1}
    back = start + 500.0
    return [
        event("cpu_op", "aten::linear", start, 40.0, **forward, **shapes),
        event("cpu_op", "aten::addmm", start + 5.0, 30.0, **forward),
        event("cuda_runtime", "cudaLaunchKernel", start + 10.0, 5.0, correlation=10 * sequence),
        event("kernel", "gemm", start + 100.0, 12.0, correlation=10 * sequence, device=0),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", back, 90.0, **node),
        event("cpu_op", "AddmmBackward0", back + 2.0, 80.0, **node),
        event("cpu_op", "aten::mm", back + 5.0, 20.0),
        event("cuda_runtime", "cudaLaunchKernel", back + 8.0, 5.0, correlation=10 * sequence + 1),
        event("kernel", "gemm", back + 50.0, 20.0, correlation=10 * sequence + 1, device=0),
        event("cpu_op", "aten::mm", back + 30.0, 20.0),
        event("cuda_driver", "cuLaunchKernel", back + 35.0, 5.0, correlation=10 * sequence + 2),
        event("kernel", "gemm", back + 60.0, 15.0, correlation=10 * sequence + 2, device=0),
    ]


def cuda_trace(*calls: list[dict[str, Any]], **given: Any) -> str:
    content = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 1}],
        "traceEvents": [each for call in calls for each in call],
    }
    return json.dumps({**content, **given})


def plain_linear() -> Operator:
    (operator, *_) = [o for o in mlp([64, 16], batch=32).operators if o.kind == "linear"]
    return operator


class TestCuda:
    def test_kernels_are_found_by_their_correlation(self):
        entries, left_out = read_kineto(
            cuda_trace(linear_call(0.0, 1)), "x", Environment("", "2.11+cu128", driver="570.86")
        )
        found = {e.key.direction: e for e in entries}
        assert not left_out
        assert found[Direction.FORWARD].measurement.median_s == pytest.approx(12e-6)
        # Two kernels of 20 and 15 µs, the second begun while the first ran: 25 µs together.
        assert found[Direction.BACKWARD].measurement.median_s == pytest.approx(25e-6)
        where = found[Direction.FORWARD].key.environment
        assert where == Environment("NVIDIA H200", "2.11+cu128", driver="570.86")

    def test_they_have_the_key_of_the_graphs_operator(self):
        entries, _ = read_kineto(cuda_trace(linear_call(0.0, 1)), "x", Environment("", "2.11"))
        assert {operator_digest(e.key.operator) for e in entries} == {
            operator_digest(plain_linear())
        }
        assert {e.key.precision for e in entries} == {"float16"}

    def test_kernels_without_a_launch_are_not_replaced_by_host_times(self):
        call = [e for e in linear_call(0.0, 1) if not e["cat"].startswith("cuda_")]
        entries, left_out = read_kineto(cuda_trace(call), "x", Environment("", "2.11"))
        assert entries == []
        assert left_out == {"aten::linear: no kernels recorded": 1}

    def test_equal_calls_are_one_entry(self):
        text = cuda_trace(*(linear_call(1000.0 * i, i) for i in range(1, 6)))
        entries, _ = read_kineto(text, "x", Environment("", "2.11"))
        assert [e.measurement.repeats for e in entries] == [5, 5]

    def test_two_forward_threads_are_told_apart_by_arrows(self):
        one, other = linear_call(0.0, 1), linear_call(1000.0, 1)
        for each in other:
            if "correlation" in each["args"]:
                each["args"]["correlation"] += 1000
            if each["cat"] in ("cpu_op", "cuda_runtime") and "Backward0" not in each["name"]:
                each["tid"] = 2 if each["ts"] < 1500.0 else 1
            if each["args"].get("Fwd thread id") == 1:
                each["args"]["Fwd thread id"] = 2
        text = cuda_trace(one, other)
        entries, left_out = read_kineto(text, "x", Environment("", "2.11"))
        assert entries == []
        assert left_out["aten::linear: no backward pass recorded"] == 2

        def arrow(number: int, thread: int, start: float) -> list[dict[str, Any]]:
            ends = (("s", thread, start), ("f", 1, start + 502.0))
            return [
                {"ph": ph, "cat": "fwdbwd", "id": number, "pid": 1, "tid": tid, "ts": ts}
                for ph, tid, ts in ends
            ]

        arrows = arrow(1, 1, 0.0), arrow(2, 2, 1000.0)
        entries, left_out = read_kineto(cuda_trace(one, other, *arrows), "x", Environment("", "2"))
        assert [e.measurement.repeats for e in entries] == [2, 2]

    def test_several_kinds_of_devices(self):
        call = linear_call(0.0, 1)
        call[3]["args"]["device"] = 1
        devices = [{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA A40"}]
        with pytest.raises(ValueError, match="x has kernels of several kinds of devices"):
            read_trace(cuda_trace(call, deviceProperties=devices), "x")


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "x is no JSON"),
            ("[]", "x has no field traceEvents"),
            ('{"traceEvents": []}', "x has no operators"),
            (
                '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm"}]}',
                r"x, traceEvents\[0\] \(aten::mm\): .*needs name, pid, tid, ts and dur",
            ),
        ],
    )
    def test_a_broken_trace(self, text, message):
        with pytest.raises(ValueError, match=message):
            read_kineto(text, "x", HERE)

    @pytest.mark.parametrize(
        ("environment", "missing"),
        [(Environment("", "2.11"), "device"), (Environment("a", ""), "torch")],
    )
    def test_a_trace_does_not_say_where_it_was_recorded(self, transformer, environment, missing):
        with pytest.raises(ValueError, match=f"x does not say its {missing}; give --{missing}"):
            read_kineto(transformer[1], "x", environment)

    def test_a_device_that_the_trace_contradicts(self):
        with pytest.raises(ValueError, match="recorded on 'NVIDIA H200', not on 'NVIDIA A40'"):
            read_kineto(cuda_trace(linear_call(0.0, 1)), "x", Environment("NVIDIA A40", "2.11"))

    def test_it_is_recognised(self, transformer):
        assert looks_like_trace(transformer[1])
        assert not looks_like_trace('{"format": "stratagem timings"}')
