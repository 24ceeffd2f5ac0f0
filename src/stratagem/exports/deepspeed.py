"""DeepSpeed: its JSON file (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stratagem.exports.reading.export import ExportDraft
from stratagem.exports.reading.one_setup import SetupLimits, Uniform, nearest_uniform
from stratagem.searcher.methods.literature.setup_families import DEEPSPEED_BUCKET
from stratagem.searcher.space.training_setup import ALL_AT_ONCE
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan


def _zero_stages(tensor: int, pipeline: int) -> Sequence[int]:
    return (0, 1, 2, 3)


LIMITS = SetupLimits(zero_stages=_zero_stages, recompute=("none",))

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What DeepSpeed calls a precision."""


def deepspeed(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """The JSON file of DeepSpeed: ZeRO and automatic tensor parallelism.

    Without ZeRO DeepSpeed reduces gradients when backward has ended.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> draft = deepspeed(TrainingSetup(zero=3).plan(graph, cluster), graph)
        >>> json.loads(draft.text)["zero_optimization"]["stage"]
        3
    """
    found = nearest_uniform(plan, graph, LIMITS)
    bucket = (
        (plan.bucket_bytes or found.bucket_bytes(DEEPSPEED_BUCKET))
        if found.setup.zero
        else ALL_AT_ONCE
    )
    found = replace(found, plan=replace(found.plan, bucket_bytes=bucket))
    missing = []
    if len(plan.stages) > 1:
        missing.append(
            "Pipelines are written in code (deepspeed.pipe.PipelineModule), not in the JSON file."
        )
    if any(c.recompute for stage in plan.stages for c in stage.choices.values()):
        missing.append(
            "Recomputing is written in code (deepspeed.checkpointing.checkpoint), not in the JSON "
            "file."
        )
    if found.plan.training.optimizer not in _OPTIMIZERS:
        missing.append(
            f"The JSON file knows no optimizer {found.plan.training.optimizer!r}: give one to "
            "deepspeed.initialize(optimizer=…)."
        )
    text = json.dumps(_config(found, graph), indent=2) + "\n"
    return ExportDraft(text, found.plan, tuple(missing), comment="")


_OPTIMIZERS = {"adam": "Adam", "sgd": "SGD", "lion": "Lion", "lamb": "Lamb", "muon": "Muon"}
"""What the JSON file calls optimizers."""


def _config(found: Uniform, graph: OperatorGraph) -> dict[str, Any]:
    setup, training = found.setup, found.plan.training
    config: dict[str, Any] = {
        "train_batch_size": graph.batch,
        "train_micro_batch_size_per_gpu": setup.microbatch,
        "gradient_accumulation_steps": found.plan.num_microbatches,
        "optimizer": {
            "type": _OPTIMIZERS.get(training.optimizer, ""),
            "params": {"lr": training.learning_rate},
        },
        "zero_optimization": _zero(found),
        "data_types": {"grad_accum_dtype": DTYPES[training.formats.gradients]},
    }
    if training.optimizer not in _OPTIMIZERS:
        del config["optimizer"]
    if training.formats.master:
        config[DTYPES[training.formats.storage]] = {"enabled": True}
    if setup.tensor > 1:
        config["tensor_parallel"] = {
            "autotp_size": setup.tensor,
            "vocab_parallel_lm_head": True,
        }
    return config


def _zero(found: Uniform) -> dict[str, Any]:
    stage, nbytes = found.setup.zero, found.plan.bucket_bytes
    if stage == 0:
        return {"stage": 0}
    overlaps = nbytes < ALL_AT_ONCE
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlaps}
    if overlaps:
        zero |= {"reduce_bucket_size": found.bucket_elements, "contiguous_gradients": True}
    return zero
