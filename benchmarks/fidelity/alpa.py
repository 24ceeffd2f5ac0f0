"""Alpa's OSDI'22 artifact on V100 nodes: GPT, GShard MoE and Wide-ResNet.

The file names methods, not plans. What a method may choose from is known, and its authors took the
best of it, so a row is predicted by the best plan that the method can express. What all its plans
have in common stands in the artifact's scripts (alpa-projects/alpa, ``benchmark/alpa``:
``exp_inter_only.py``, ``exp_intra_only.py`` and the ``benchmark_*_one_case_*.py`` that they run).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.fidelity.runs import LeftOutError, Model, Row, Run, device_named, whole
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import GIB, DeviceType
from stratagem.simulator.kernel_times.training import Training

COLUMNS = frozenset({"method", "tflops_per_gpu", "latency_s_mean", "param_B", "experts"})
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 96)
TENSOR = (1, 2, 4, 8)
SOLVED = ("auto", "intra_only")
OTHERS = ("megatron", "deepspeed")
"""Systems that Alpa is compared with."""
ONE_DEVICE_MICROBATCHES = {"gpt": 64, "moe": 32, "wresnet": 48}
"""How many microbatches a step of ``intra_only`` has on one device."""


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
    device = device_named(row["gpu"])
    if family == "wresnet":
        device = untuned(device)
    yield Run(
        row=number,
        label=f"{family} {row['model']} on {gpus}, {method}",
        group=(f"{family} {row['model']}", gpus),
        model=model,
        cluster=Cluster.preset("p3.16xlarge").with_devices(gpus, device=device),
        setups=tuple(
            _setups(
                family,
                method,
                gpus,
                whole(row, "gbs"),
                whole(row, "layers"),
                whole(row, "experts") if family == "moe" else 1,
            )
        ),
        seconds=None if failed else _seconds(row),
        peak_bytes=peak * GIB if peak > 0 and not failed else None,
        ran=not failed,
    )


def untuned(device: DeviceType) -> DeviceType:
    """The device under an XLA that takes cuDNN's default convolutions.

    Alpa's benchmark turns XLA's search for the fastest one off for Wide-ResNets, so that none
    saves multiplications.
    """
    products = {
        precision: replace(each, winograd=1.0, winograd_backward=1.0)
        for precision, each in device.products.items()
    }
    return replace(device, name=f"{device.name}, convolutions not tuned", products=products)


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
    family: str, method: str, gpus: int, batch: int, layers: int, experts: int
) -> Iterator[TrainingSetup]:
    """All that a method chooses from."""
    training, recompute = _training(family, method), _recompute(family, method)
    for tensor, pipeline, zero, microbatch in product(
        TENSOR, (1, 2, 4, 8, 16, 32, 64), (0, 2, 3), MICROBATCHES
    ):
        data, rest = divmod(gpus, tensor * pipeline)
        if rest or not data or not _may(method, tensor, pipeline, data, zero):
            continue
        parts, left = divmod(batch, microbatch * data)
        if left or (family != "wresnet" and layers % pipeline) or (zero and data == 1):
            continue
        if not _tried(family, method, gpus, parts):
            continue
        yield TrainingSetup(
            microbatch=microbatch,
            tensor=tensor,
            pipeline=pipeline,
            training=training,
            zero=zero,
            recompute=recompute,
            expert=next(n for n in range(min(data, experts), 0, -1) if data % n == 0),
            overlap_gradients=method not in OTHERS,
            partition="time" if family == "wresnet" else "layers",
        )


def _training(family: str, method: str) -> Training:
    """Alpa trains GPTs with AdamW, mixtures with Adafactor and Wide-ResNets with SGD.

    Adafactor's moments are a row and a column of each matrix (Shazeer and Stern 2018), so it keeps
    next to nothing beside the master copy, as SGD. Where all of a step is one program, XLA fuses
    the loss; between the programs of a pipeline what it keeps is written out.
    """
    return Training(
        precision="float32" if family == "wresnet" else "float16",
        optimizer="adam" if family == "gpt" or method in OTHERS else "sgd",
        fused_elementwise=True,
        fused_loss=method == "intra_only",
        eager_loss=method != "intra_only",
    )


def _recompute(family: str, method: str) -> str:
    """The benchmark of ``intra_only`` has no rematerialisation for Wide-ResNets."""
    return "none" if family == "wresnet" and method == "intra_only" else "full"


def _tried(family: str, method: str, gpus: int, parts: int) -> bool:
    """Whether the authors ran a method with so many microbatches a step."""
    if method == "intra_only":
        return parts == ONE_DEVICE_MICROBATCHES[family]
    if method == "inter_only":
        return parts >= (128 if family == "gpt" and gpus >= 16 else 64)
    return True


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
