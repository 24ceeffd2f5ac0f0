"""Alpa's OSDI'22 artifact on V100 nodes: GPT, GShard MoE and Wide-ResNet.

The file names methods, not plans. What a method may choose from is known, and its authors took the
best of it, so a row is predicted by the best plan that the method can express.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from benchmarks.fidelity.runs import LeftOutError, Model, Row, Run, device_named, whole
from stratagem.search.setup import TrainingSetup
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.training import Training

COLUMNS = frozenset({"method", "tflops_per_gpu", "latency_s_mean", "param_B", "experts"})
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 96)
TENSOR = (1, 2, 4, 8)
SOLVED = ("auto", "intra_only")


def alpa(number: int, row: Row) -> Iterator[Run]:
    """A method at its best on one model and number of devices."""
    if row["exp"] != "e2e":
        raise LeftOutError("the shape of the model is not given")
    model, family = _model(row), row["family"]
    gpus, method = whole(row, "gpus"), row["method"].removeprefix("parax.")
    if gpus > 1 and method in SOLVED:
        raise LeftOutError("the plan was found by a solver and is not told")
    failed = row["failed"] == "1"
    peak = float(row["peak_mem_GB"] or 0)
    yield Run(
        row=number,
        label=f"{family} {row['model']} on {gpus}, {method}",
        group=(f"{family} {row['model']}", gpus),
        model=model,
        cluster=Cluster.preset("p3.16xlarge").with_devices(gpus, device=device_named(row["gpu"])),
        setups=tuple(_setups(family, method, gpus, whole(row, "gbs"), whole(row, "layers"))),
        seconds=None if failed else _seconds(row),
        peak_bytes=peak * 1e9 if peak > 0 and not failed else None,
        ran=not failed,
    )


def _model(row: Row) -> Model:
    batch, layers = whole(row, "gbs"), whole(row, "layers")
    if row["family"] == "wresnet":
        return Model.of(
            "wide_resnet",
            depth=layers,
            base_channels=whole(row, "base_channels"),
            width_factor=whole(row, "width_factor"),
            batch=batch,
        )
    sizes: dict[str, int | bool | float | str] = {
        "num_layers": layers,
        "hidden": whole(row, "hidden"),
        "num_heads": whole(row, "heads"),
        "sequence": whole(row, "seq"),
        "vocabulary": whole(row, "vocab"),
        "batch": batch,
        "attention": "unfused",
    }
    if row["family"] == "moe":
        return Model.of("moe", experts=whole(row, "experts"), dispatch="einsum", **sizes)
    return Model.of("gpt", **sizes)


def _setups(
    family: str, method: str, gpus: int, batch: int, layers: int
) -> Iterator[TrainingSetup]:
    """All that a method chooses from."""
    precision = "float32" if family == "wresnet" else "float16"
    training = Training(precision=precision, fused_elementwise=True)
    for tensor, pipeline, zero, microbatch in product(
        TENSOR, (1, 2, 4, 8, 16, 32, 64), (0, 2, 3), MICROBATCHES
    ):
        data, rest = divmod(gpus, tensor * pipeline)
        if rest or not data or not _may(method, tensor, pipeline, data, zero):
            continue
        if batch % (microbatch * data) or (family != "wresnet" and layers % pipeline):
            continue
        yield TrainingSetup(
            microbatch=microbatch,
            tensor=tensor,
            pipeline=pipeline,
            training=training,
            zero=zero,
            recompute="none" if family == "wresnet" else "full",
            expert_parallel=family == "moe",
            overlap_gradients=method not in ("megatron", "deepspeed"),
            partition="time" if family == "wresnet" else "layers",
        )


def _may(method: str, tensor: int, pipeline: int, data: int, zero: int) -> bool:
    """Whether a method has plans with these degrees."""
    match method:
        case "megatron":
            return zero == 0
        case "deepspeed":
            return pipeline == 1 and zero in (0, 2)
        case "intra_only":
            return pipeline == 1
        case "inter_only":
            return tensor == data == 1 and zero == 0
        case "ppdp":
            return tensor == 1 and zero == 0
        case "auto":
            return True
    raise LeftOutError(f"method {method} is not known")


def _seconds(row: Row) -> float:
    """Of a step; where only TFLOP/s are told, by the authors' count of a GPT's operations."""
    if row["latency_s_mean"]:
        return float(row["latency_s_mean"])
    rate = float(row["tflops_per_gpu"]) * 1e12 * whole(row, "gpus")
    if row["family"] != "gpt":
        raise LeftOutError("TFLOP/s only, and how operations were counted is not told")
    s, h, layers, b = (whole(row, name) for name in ("seq", "hidden", "layers", "gbs"))
    blocks = 96 * b * s * layers * h * h * (1 + s / (6 * h))
    return (blocks + 6 * b * s * h * whole(row, "vocab")) / rate
