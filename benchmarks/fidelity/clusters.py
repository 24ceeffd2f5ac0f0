"""GPT sets of two other A100 clusters: vTrain's and BigScience's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.fidelity.megatron import gpt_of, training
from benchmarks.fidelity.runs import LeftOutError, Row, Run, device_named, whole
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Cluster

VTRAIN = frozenset({"params_b", "iter_ms", "nmb", "dup", "source_row"})
BIGSCIENCE = frozenset({"shape_consistent", "Mem", "zero", "iter_s"})
VTRAIN_VOCABULARY = 51200
BIGSCIENCE_VOCABULARY = 250880


def vtrain(number: int, row: Row) -> Iterator[Run]:
    """Megatron-DeepSpeed, fp16, full recompute."""
    if row["dup"] == "1":
        raise LeftOutError("a repeat of another row")
    gpus = whole(row, "gpus")
    setup = TrainingSetup(
        microbatch=whole(row, "mbs"),
        tensor=whole(row, "tp"),
        pipeline=whole(row, "pp"),
        training=training("float16"),
        recompute="full",
        overlap_gradients=False,
        inputs_first=True,
    )
    yield Run(
        row=number,
        label=f"{row['params_b']}B, {setup.describe()}",
        group=(f"{row['params_b']}B", gpus),
        model=gpt_of(row, vocabulary=VTRAIN_VOCABULARY),
        cluster=Cluster.preset("a100-800g").with_devices(gpus, device=device_named(row["gpu"])),
        setups=(setup,),
        seconds=float(row["iter_ms"]) * 1e-3,
        ran=True,
    )


def bigscience(number: int, row: Row) -> Iterator[Run]:
    """Megatron-DeepSpeed, bf16 with float32 gradients, ZeRO-1, full recompute."""
    if row["shape_consistent"] != "1":
        raise LeftOutError("shape and reported TFLOP/s do not agree")
    gpus, pipeline, layers = whole(row, "gpus"), whole(row, "pp"), whole(row, "layers")
    ends = layers % pipeline != 0
    setup = TrainingSetup(
        microbatch=whole(row, "mbs"),
        tensor=whole(row, "tp"),
        pipeline=pipeline,
        training=training("bfloat16"),
        zero=int(float(row["zero"] or 1)) if gpus > whole(row, "tp") * pipeline else 0,
        recompute="full",
        overlap_gradients=False,
        partition="layers and ends" if ends else "layers",
    )
    stated = re.match(r"[\d.]+", row["Mem"] or "")
    yield Run(
        row=number,
        label=f"{row['Size']}, {row['heads']} heads, {setup.describe()}",
        group=(f"{row['Size']} {row['hidden']}×{layers}×{row['heads']}", gpus),
        model=gpt_of(row, vocabulary=BIGSCIENCE_VOCABULARY),
        cluster=Cluster.preset("a100-400g").with_devices(gpus, device=device_named(row["gpu"])),
        setups=(setup,),
        seconds=float(row["iter_s"]),
        peak_bytes=float(stated[0]) * 1e9 if stated else None,
        ran=True,
    )
