"""The published tables of Megatron-LM on Selene: SC'21 Table 1, and Table 5 of 2205.05198."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.fidelity.runs import LeftOutError, Model, Row, Run, device_named, whole
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.training import Training

SEQUENCE_PARALLEL = frozenset({"recompute", "sequence_parallel", "interleave", "iter_s"})
WEAK_SCALING = frozenset({"iter_s_derived", "scheme", "tflops_gpu_hw"})
MICROBATCHES = (1, 2, 4, 8, 16)


def gpt_of(row: Row, *, vocabulary: int | None = None) -> Model:
    """A GPT as Megatron-LM trains it: dropout, fused softmax, tied embeddings."""
    return Model.of(
        "gpt",
        num_layers=whole(row, "layers"),
        hidden=whole(row, "hidden"),
        num_heads=whole(row, "heads"),
        sequence=whole(row, "seq"),
        vocabulary=vocabulary or whole(row, "vocab"),
        batch=whole(row, "gbs"),
        attention="unfused",
        dropout=0.1,
    )


def selene(num_devices: int, gpu: str) -> Cluster:
    """DGX A100 with eight 200 Gb/s cards a node."""
    return Cluster.preset("dgx-a100-superpod").with_devices(num_devices, device=device_named(gpu))


def training(precision: str) -> Training:
    """Mixed precision with Megatron's fused elementwise kernels, and its loss in float32."""
    return Training(precision=precision, fused_elementwise=True, eager_loss=True)


def with_passes(precision: str, *, fused_accumulation: bool) -> Training:
    """The same with what Megatron-LM's optimizer does to gradients, and who adds them up."""
    return replace(
        training(precision),
        fused_accumulation=fused_accumulation,
        fused_update=False,
        clip_norm=1.0,
    )


def sequence_parallel(number: int, row: Row) -> Iterator[Run]:
    """Table 5: full recompute against selective recompute with sequence parallelism.

    Megatron-LM of 2022 hides conversions behind gradients of weights, whose products add them up.
    """
    setup = TrainingSetup(
        microbatch=whole(row, "mbs"),
        tensor=whole(row, "tp"),
        pipeline=whole(row, "pp"),
        virtual_stages=whole(row, "interleave"),
        training=with_passes("float16", fused_accumulation=True),
        recompute=row["recompute"].split("(")[0],
        sequence_parallel=row["sequence_parallel"] == "1",
        overlap_gradients=False,
        inputs_first=True,
    )
    gpus = whole(row, "gpus")
    yield Run(
        row=number,
        label=f"{row['model']}, {row['recompute']}",
        group=(row["model"], gpus),
        model=gpt_of(row),
        cluster=selene(gpus, row["gpu"]),
        setups=(setup,),
        seconds=float(row["iter_s"]),
        ran=True,
    )


def weak_scaling(number: int, row: Row) -> Iterator[Run]:
    """SC'21 Table 1: full recompute; microbatch and virtual stages were tuned, not told."""
    gpus, pipeline, gbs = whole(row, "gpus"), whole(row, "pp"), whole(row, "gbs")
    layers, data = whole(row, "layers"), whole(row, "dp")
    setups = []
    for microbatch, rounds in product(MICROBATCHES, (1, 2, 3, 4) if pipeline > 1 else (1,)):
        parts, rest = divmod(gbs, microbatch * data)
        if rest or layers % (pipeline * rounds) or (rounds > 1 and parts % pipeline):
            continue
        setups.append(
            TrainingSetup(
                microbatch=microbatch,
                tensor=whole(row, "tp"),
                pipeline=pipeline,
                virtual_stages=rounds,
                training=with_passes("float16", fused_accumulation=False),
                recompute="full",
                overlap_gradients=False,
            )
        )
    if not setups:
        raise LeftOutError("no microbatch divides the batch")
    yield Run(
        row=number,
        label=f"{row['params_b']}B on {gpus}",
        group=(f"{row['params_b']}B", gpus),
        model=gpt_of(row),
        cluster=selene(gpus, row["gpu"]),
        setups=tuple(setups),
        seconds=float(row["iter_s_derived"]),
        ran=True,
    )
