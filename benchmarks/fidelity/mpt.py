"""MPT models under FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.fidelity.runs import LeftOutError, Model, Row, Run, device_named, whole
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.training import Training

COLUMNS = frozenset({"fsdp", "act_ckpt", "tok_s", "mp_mode", "grad_acc"})
ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def mpt(number: int, row: Row) -> Iterator[Run]:
    """bf16, sharded data parallelism; biases and a table of positions, as the parameters count."""
    if row["act_offload"] == "True":
        raise LeftOutError("activations are offloaded to the host")
    if row["fsdp"] not in ZERO:
        raise LeftOutError(f"sharding {row['fsdp']} is not known")
    if not row["tok_s"]:
        raise LeftOutError("tok_s is not given")
    gpus, batch, sequence = whole(row, "gpus"), whole(row, "gbs"), whole(row, "seq")
    device = device_named(row["gpu"])
    setup = TrainingSetup(
        microbatch=whole(row, "mbs"),
        training=Training(precision="bfloat16", flash_version=1, fused_loss=True),
        zero=ZERO[row["fsdp"]] if gpus > 1 else 0,
        recompute="full" if row["act_ckpt"] == "True" else "none",
    )
    yield Run(
        row=number,
        label=f"{row['model']} on {gpus} {row['gpu']}, {sequence} tokens, {setup.describe()}",
        group=(f"{row['model']} {sequence} {row['gpu']}", gpus),
        model=Model.of(
            "gpt",
            num_layers=whole(row, "layers"),
            hidden=whole(row, "hidden"),
            num_heads=whole(row, "heads"),
            sequence=sequence,
            vocabulary=whole(row, "vocab"),
            batch=batch,
        ),
        cluster=Cluster.preset(_preset(device)).with_devices(gpus, device=device),
        setups=(setup,),
        seconds=batch * sequence / float(row["tok_s"]),
        ran=True,
    )


def _preset(device: DeviceType) -> str:
    """The calibrated cluster of the same architecture: sustained clocks are the device's."""
    return "h100-3200g" if device.name.startswith("H") else "a100-1600g"
