"""The torch-free models have the sizes that the literature gives them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stratagem.simulator.graph import models
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.operators.kinds.operator_kinds import KINDS

SMALL = {"num_layers": 2, "hidden": 24, "num_heads": 3, "vocabulary": 50, "sequence": 16}


def matmul_flops(graph: OperatorGraph) -> float:
    return sum(KINDS[o.kind].flops(o, o.sizes) for o in graph.operators if KINDS[o.kind].product)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: models.gpt(), 124_439_808),
        (lambda: models.gpt(num_layers=48, hidden=1600, num_heads=25), 1_557_611_200),
        (lambda: models.resnet(18, batch=2), 11_689_512),
        (lambda: models.resnet(34, batch=2), 21_797_672),
        (lambda: models.resnet(50, batch=2), 25_557_032),
        (lambda: models.resnet(101, batch=2), 44_549_160),
        (lambda: models.resnet(152, batch=2), 60_192_808),
        (lambda: models.inception_v3(batch=2), 23_834_568),
        (lambda: models.inception_v3(batch=2, auxiliary=True), 27_161_264),
        (lambda: models.nmt(sequence=3), 99_651_584),
        (lambda: models.mlp([784, 512, 10], batch=3), 784 * 512 + 512 + 5120 + 10),
    ],
)
def test_number_of_parameters(build: Callable[[], OperatorGraph], expected: int) -> None:
    assert build().num_parameters == expected


def test_a_wide_resnet_of_factor_1_is_a_resnet() -> None:
    plain = models.resnet(101, batch=2, classes=10)
    wide = models.wide_resnet(101, base_channels=64, width_factor=1, batch=2, classes=10)
    assert wide.fingerprint == plain.fingerprint
    assert wide.name == "wide_resnet101"


def test_wide_resnets_that_alpa_measured() -> None:
    folder = os.environ.get("STRATAGEM_DATA")
    if not folder:
        pytest.skip("STRATAGEM_DATA does not name the folder of measured training runs")
    with (Path(folder) / "measured" / "alpa_osdi22_v100.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["base_channels"]]
    counted = [row for row in rows if float(row["param_B"]) > 0]
    assert len(counted) > 5
    for row in counted:
        graph = models.wide_resnet(
            int(float(row["layers"])),
            base_channels=int(float(row["base_channels"])),
            width_factor=int(float(row["width_factor"])),
            batch=1,
        )
        assert graph.num_parameters / 1e9 == pytest.approx(float(row["param_B"]), rel=0.001)


def test_flops() -> None:
    # per image: He et al. count 1.8 and 3.8 billion multiply-adds without the classifier's
    assert matmul_flops(models.resnet(18, batch=2)) / 4 == pytest.approx(1.81e9, rel=0.01)
    assert matmul_flops(models.resnet(50, batch=2)) / 4 == pytest.approx(4.09e9, rel=0.01)
    graph = models.gpt(batch=2)
    dense = 2 * 12 * 12 * 768**2 + 2 * 768 * 50257
    assert matmul_flops(graph) == 2 * 1024 * (dense + 12 * 0.5 * 4 * 1024 * 768)


@pytest.mark.parametrize(
    ("build", "billions"),
    [
        # Narayanan et al. 2021, table 1 (39.1); Brown et al. 2020 with Megatron's vocabulary
        (lambda: models.gpt(num_layers=48, hidden=8192, num_heads=64, vocabulary=51200), 39.1),
        (
            lambda: models.gpt(
                num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048
            ),
            174.6,
        ),
        # Zheng et al. 2022, tables 7 and 8
        (lambda: models.moe(num_layers=32, hidden=2048, experts=64), 70.4),
        (lambda: models.wide_resnet(50, base_channels=320, width_factor=32, batch=2), 13.3),
    ],
)
def test_parameters_of_large_models(build: Callable[[], OperatorGraph], billions: float) -> None:
    assert build().num_parameters / 1e9 == pytest.approx(billions, abs=0.05)


def test_inception_does_what_its_authors_count() -> None:
    # Szegedy et al. 2016: 5 billion multiply-adds; torchvision counts 5.71 with all layers
    assert matmul_flops(models.inception_v3(batch=1)) / 2 == pytest.approx(5.71e9, rel=0.005)


def test_steps_of_an_lstm_share_the_weights_of_their_layer() -> None:
    graph = models.nmt(num_layers=2, hidden=8, vocabulary=24, sequence=5, batch=4)
    users = [o.name for o in graph.operators for w in o.weights if "0.recurrent" in w.parameter]
    steps = {f"encoder.0.step{i}.recurrent" for i in range(1, 5)}
    assert set(users) == steps | {f"decoder.0.step{i}.recurrent" for i in range(5)}
    # 2 hidden · 4 hidden multiply-adds a step, but that the first state of the encoder is zero
    cells = [o for o in graph.operators if o.name.startswith(("encoder.", "decoder."))]
    products = [o for o in cells if o.kind == "linear"]
    flops = sum(KINDS[o.kind].flops(o, o.sizes) for o in products)
    assert flops == 2 * 4 * (4 * 5 * 8 * 8 * 4 + (4 * 5 - 2) * 8 * 8 * 4)


@pytest.mark.parametrize("build", [models.gpt, models.bert])
def test_layers_are_repeated_blocks(build: Callable[..., OperatorGraph]) -> None:
    graph = build(**{**SMALL, "num_layers": 5}, batch=4)
    (block,) = repeated_blocks(graph)
    assert (block.length, block.count) == (10, 5)


def test_gpt_without_tied_head_has_one_more_table() -> None:
    tied, untied = (models.gpt(**SMALL, batch=2, tied=tied) for tied in (True, False))
    assert untied.num_parameters - tied.num_parameters == 50 * 24
    assert sum(w.parameter == "wte.weight" for o in tied.operators for w in o.weights) == 2


def test_every_batch_dim_counts_samples() -> None:
    graph = models.resnet(18, batch=6, image=32, classes=10)
    for operator in graph.microbatch(3).operators:
        assert operator.sizes.get("sample", 2) == 2


@pytest.mark.parametrize(
    ("message", "build"),
    [
        ("gpt: hidden is 0", lambda: models.gpt(hidden=0)),
        ("gpt: hidden 100 is not a multiple of num_heads 12", lambda: models.gpt(hidden=100)),
        ("bert: batch is -1", lambda: models.bert(batch=-1)),
        ("resnet: no depth 19; there are 18, 34", lambda: models.resnet(19, batch=2)),
        ("resnet: image is 0", lambda: models.resnet(18, batch=2, image=0)),
        (r"mlp: sizes\[1\] is 0", lambda: models.mlp([3, 0], batch=2)),
        ("wide_resnet: no depth 18; there are 50, 101", lambda: models.wide_resnet(18, batch=2)),
        (
            "wide_resnet: width_factor is 0",
            lambda: models.wide_resnet(50, width_factor=0, batch=2),
        ),
        ("inception_v3: classes is 0", lambda: models.inception_v3(batch=2, classes=0)),
        ("a window of 3 .* larger than an image", lambda: models.inception_v3(batch=2, image=20)),
        ("nmt: sequence is 0", lambda: models.nmt(sequence=0)),
        ("padded_vocabulary: multiple is 0", lambda: models.padded_vocabulary(50257, 0)),
        ("mlp: 1 sizes", lambda: models.mlp([3], batch=2)),
    ],
)
def test_impossible_sizes_are_refused(message: str, build: Callable[[], OperatorGraph]) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_models_need_no_torch() -> None:
    rooms = ("models", "operator_graph", "building.graph_builder")
    code = "import sys; " + "".join(f"import stratagem.simulator.graph.{r}; " for r in rooms)
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
