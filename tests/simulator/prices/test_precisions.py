"""A precision is a record: memory, links, copies and prices follow from the formats it says."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.precision import (
    FORMATS,
    PRECISIONS,
    STORED,
    Precision,
    precision_named,
)
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import Direction, RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.memory_traffic import num_kernels, rounded_bytes
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

ROOT = Path(__file__).resolve().parents[3]
OWN = Precision("own", products="bfloat16")
GRAPH = gpt(num_layers=2, hidden=256, num_heads=4, vocabulary=512, sequence=64, batch=8)


def planned(training: Training) -> Plan:
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    return TrainingSetup(microbatch=1, tensor=2, zero=1, training=training).plan(GRAPH, cluster)


def simulated(training: Training) -> Simulation:
    return simulate_plan(planned(training), GRAPH, default_costs())


def communicated(simulation: Simulation) -> list[int]:
    """How long each communication of a step takes, in ns."""
    timeline = simulation.timeline
    lengths = (timeline.end - timeline.start).tolist()
    named = zip(timeline.names, timeline.kinds, lengths, strict=True)
    return [length for _, kind, length in sorted(named, key=str) if kind.is_communication]


@pytest.mark.parametrize(
    ("name", "parameter", "gradient", "optimizer", "scales"),
    [
        # Bytes of one parameter; Adam has two states of 4, and a master of 4 below float32.
        ("float32", 4, 4, 8, False),
        ("bfloat16", 2, 2, 12, False),
        ("float16", 2, 2, 12, True),
        ("mixed bfloat16", 2, 4, 12, False),
        ("mixed float16", 2, 4, 12, True),
    ],
)
def test_bytes_follow_from_the_formats(
    name: str, parameter: int, gradient: int, optimizer: int, scales: bool
) -> None:
    training = Training(name)
    found = (training.parameter_bytes, training.gradient_bytes, training.optimizer_bytes)
    assert found == (parameter, gradient, optimizer)
    assert training.bytes_of("float32") == parameter
    assert training.bytes_of("int64") == 8
    assert training.scales_loss is scales


@pytest.mark.parametrize("storage", [name for name in STORED if name != "float32"])
def test_a_mixed_preset_is_its_storage_with_gradients_in_float32(storage: str) -> None:
    mixed, said = Training(f"mixed {storage}"), Training(storage, gradient_precision="float32")
    assert mixed.unlike(said) == ""
    assert simulated(mixed).step_time == simulated(said).step_time
    assert simulated(mixed).peak_memory == simulated(said).peak_memory


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_record_is_priced_as_the_preset_that_says_the_same(name: str) -> None:
    preset = PRECISIONS[name]
    mine = simulated(Training(replace(preset, name="mine")))
    assert mine.step_time == simulated(Training(name)).step_time
    assert mine.peak_memory == simulated(Training(name)).peak_memory


def test_every_format_that_is_stored_is_a_preset_of_its_own() -> None:
    """Exports and references say a plan by what it stores."""
    for name in STORED:
        assert precision_named(name) == Precision(name, storage=name)


def test_a_plan_with_a_record_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = planned(Training(OWN))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.training.formats.products == "bfloat16"


def test_rounded_products_run_on_other_units_and_keep_what_they_multiplied() -> None:
    plain, own = simulated(Training()), simulated(Training(OWN))
    assert own.step_time < plain.step_time
    assert own.peak_memory > plain.peak_memory
    assert communicated(own) == communicated(plain) != []
    layer = mlp([8, 16], batch=4).operator("layers.0")
    # 4 · 8 inputs and 16 · 8 weights in float32; the bias is added, not multiplied.
    assert rounded_bytes(layer, layer.sizes, Training(OWN)) == 4 * (4 * 8 + 16 * 8)
    assert rounded_bytes(layer, layer.sizes, Training()) == 0
    launched = [num_kernels(layer, Training(given)) for given in ("float32", OWN)]
    assert launched == [1, 3]


def test_rounding_is_priced_by_the_bytes_that_it_moves() -> None:
    """On a roofline without launches, a product that memory bounds: reads 4, writes 2 a scalar."""
    a100 = DeviceType.preset("A100-80GB")
    fast = dict.fromkeys(a100.matmul_tflops, 1e9)
    device = replace(a100, launch_us=0.0, matmul_tflops=fast)
    layer = mlp([4096, 4096], batch=1).operator("layers.0")
    plain, own = (
        RooflineCosts().operator_cost(
            layer, layer.sizes, Direction.FORWARD, Training(given), device
        )
        for given in ("float32", OWN)
    )
    rate = device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency
    assert (own.seconds - plain.seconds) * rate == pytest.approx(6 * (4096 + 4096**2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: Training("float99"), "no precision 'float99'"),
        (lambda: Training("bfloat16", gradient_precision="int8"), "no gradient_precision 'int8'"),
        (lambda: Precision(""), "a precision has no name: give it one"),
        (lambda: Precision("own", storage="float64"), "no storage of a precision in 'float64'"),
        (lambda: Precision("own", gradients="half"), "no gradients of a precision in 'half'"),
        (lambda: Precision("own", products="int4"), "no products of a precision in 'int4'"),
        (
            lambda: Precision("own", storage="float16", products="float32"),
            "'own' has products in float32 of what is stored in float16: .* store that in float32",
        ),
        (
            lambda: Precision("float16", storage="bfloat16"),
            "'float16' is a preset with storage float16, .* storage bfloat16, .* another name",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        given()  # type: ignore[operator]


PACKAGES = ("simulator", "search", "profiler", "executor", "src/stratagem", "benchmarks")
HELD = FORMATS.keys() | PRECISIONS.keys()


@pytest.mark.slow
def test_nobody_compares_the_name_of_a_precision_or_of_its_formats() -> None:
    """A precision was known to 22 modules by its name."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith("simulator/torch_ops/"):
                continue
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Compare):
                    sides = [
                        each for one in (node.left, *node.comparators) for each in ast.walk(one)
                    ]
                    if any(
                        isinstance(each, ast.Constant) and each.value in HELD for each in sides
                    ):
                        found.append(f"{name}:{node.lineno}")
    assert found == []
