"""Llama models under nanotron on H100 nodes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.fidelity.runs import Model, Row, Run, device_named, whole
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import GIB
from stratagem.simulator.kernel_times.training import Training

COLUMNS = frozenset({"clean", "status", "peak_mem_GB", "embed_inferred", "ffn"})
TIED = ("1B",)
"""Models whose embeddings are tied where one rank has both ends, for rows that do not say so."""


def nanotron(number: int, row: Row) -> Iterator[Run]:
    """bf16 with float32 gradients, 1F1B, sequence parallelism, no recompute.

    nanotron's log tells what PyTorch allocated on rank 0, on the first stage, in GiB.
    """
    gpus, ran = whole(row, "gpus"), row["status"] == "ok"
    setup = TrainingSetup(
        microbatch=whole(row, "mbs"),
        tensor=whole(row, "tp"),
        pipeline=whole(row, "pp"),
        training=Training(
            precision="bfloat16",
            gradient_precision="float32",
            bucketed_gradients=True,
            eager_loss=True,
        ),
        zero=whole(row, "zero") if gpus > whole(row, "tp") * whole(row, "pp") else 0,
        sequence_parallel=True,
        overlap_gradients=False,
        partition="parameters",
    )
    embedding = row["embed_inferred"]
    tied = embedding == "tied" if embedding else row["model"] in TIED and setup.pipeline == 1
    timed = ran and row["clean"] == "1"
    yield Run(
        row=number,
        label=f"{row['model']} on {gpus}, {setup.describe()}",
        group=(row["model"], gpus),
        model=Model.of(
            "llama",
            num_layers=whole(row, "layers"),
            hidden=whole(row, "hidden"),
            num_heads=whole(row, "heads"),
            ffn=whole(row, "ffn"),
            vocabulary=whole(row, "vocab"),
            sequence=whole(row, "seq"),
            batch=whole(row, "gbs"),
            tied=tied,
            fused=True,
        ),
        cluster=Cluster.preset("h100-3200g-nanotron").with_devices(
            gpus, device=device_named(row["gpu"])
        ),
        setups=(setup,),
        seconds=float(row["iter_ms"]) * 1e-3 if timed else None,
        peak_bytes=float(row["peak_mem_GB"]) * GIB if ran and row["peak_mem_GB"] else None,
        peak_rank=0,
        ran=ran,
    )
