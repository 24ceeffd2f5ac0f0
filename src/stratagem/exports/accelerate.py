"""Hugging Face Accelerate: its YAML file, for FSDP, DeepSpeed or Megatron-LM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stratagem.exports.reading.export import ExportDraft
from stratagem.exports.reading.fsdp_units import unit_gradient_bytes
from stratagem.exports.reading.one_setup import SetupLimits, Uniform, nearest_uniform
from stratagem.searcher.methods.literature.setup_families import DEEPSPEED_BUCKET
from stratagem.searcher.space.training_setup import ALL_AT_ONCE
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan

Yaml = Mapping[str, Any]


def _fsdp_stages(tensor: int, pipeline: int) -> Sequence[int]:
    """Replicas with tensor parallelism need shards too."""
    return (2, 3) if tensor > 1 else (0, 2, 3)


def _sharded_stages(tensor: int, pipeline: int) -> Sequence[int]:
    return (2, 3)


def _deepspeed_stages(tensor: int, pipeline: int) -> Sequence[int]:
    return (0, 1, 2, 3)


def _megatron_stages(tensor: int, pipeline: int) -> Sequence[int]:
    return (0, 1)


FSDP = SetupLimits(zero_stages=_fsdp_stages, recompute=("none", "full"))
DEEPSPEED = SetupLimits(zero_stages=_deepspeed_stages, tensor=False, recompute=("none",))
MEGATRON = SetupLimits(
    zero_stages=_megatron_stages,
    sequence=(False, True),
    pipeline=True,
    recompute=("none", "selective"),
)


def accelerate_fsdp(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """Accelerate's YAML file with FSDP2 and, for models with a tensor plan, tensor parallelism.

    Plain data parallelism where nothing is sharded.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> draft = accelerate_fsdp(TrainingSetup(zero=3).plan(graph, cluster), graph)
        >>> "  fsdp_reshard_after_forward: true" in draft.text
        True
    """
    found = _fsdp_nearest(plan, graph)
    setup = found.setup
    bucket = unit_gradient_bytes(graph, plan.training)
    found = replace(found, plan=replace(found.plan, bucket_bytes=bucket))
    config = _common(found, "MULTI_GPU" if found.plan.num_devices > 1 else "NO")
    if setup.zero:
        config = _common(found, "FSDP") | _fsdp(found)
    if setup.zero or setup.tensor > 1:
        config |= _degrees(found)
    missing = [*_batch(found)]
    if setup.tensor > 1:
        missing.append(
            "Which parameters are split is the tensor plan of the model itself (transformers, "
            'tp_plan="auto").'
        )
    return ExportDraft(_yaml(config), found.plan, tuple(missing))


def accelerate_deepspeed(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """Accelerate's YAML file with a ZeRO stage of DeepSpeed.

    Buckets are DeepSpeed's own, and only stage 3 overlaps with computing.
    """
    found = nearest_uniform(plan, graph, DEEPSPEED)
    stage = found.setup.zero
    bucket = found.bucket_bytes(DEEPSPEED_BUCKET) if stage == 3 else ALL_AT_ONCE
    found = replace(found, plan=replace(found.plan, bucket_bytes=bucket))
    config = _common(found, "DEEPSPEED") | {
        "deepspeed_config": {
            "zero_stage": stage,
            "gradient_accumulation_steps": found.plan.num_microbatches,
            "zero3_init_flag": stage == 3,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
        }
    }
    return ExportDraft(_yaml(config), found.plan, (_samples(found),))


def accelerate_megatron(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """Accelerate's YAML file with the Megatron-LM plugin."""
    found = nearest_uniform(plan, graph, MEGATRON)
    setup = found.setup
    first = setup.tensor > 1 and not setup.sequence_parallel
    found = replace(found, plan=replace(found.plan, inputs_first=first, bucket_bytes=ALL_AT_ONCE))
    config = _common(found, "MEGATRON_LM") | {
        "megatron_lm_config": {
            "megatron_lm_tp_degree": setup.tensor,
            "megatron_lm_pp_degree": setup.pipeline,
            "megatron_lm_num_micro_batches": found.plan.num_microbatches,
            "megatron_lm_sequence_parallelism": setup.sequence_parallel,
            "megatron_lm_recompute_activations": setup.recompute == "selective",
            "megatron_lm_use_distributed_optimizer": setup.zero == 1,
            "megatron_lm_gradient_clipping": 1.0,
        }
    }
    return ExportDraft(_yaml(config), found.plan, (_samples(found),))


def _common(found: Uniform, kind: str) -> dict[str, Any]:
    plan = found.plan
    names = {"bfloat16": "bf16", "float16": "fp16"}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": names.get(plan.training.formats.storage, "no"),
        "num_machines": len(plan.nodes),
        "num_processes": plan.num_devices,
    }


def _fsdp_nearest(plan: Plan, graph: OperatorGraph) -> Uniform:
    """The nearest plan; what shards nothing is not FSDP's, which alone can recompute."""
    found = nearest_uniform(plan, graph, FSDP)
    if found.setup.zero or found.setup.recompute == "none":
        return found
    if found.data > 1:
        return nearest_uniform(plan, graph, replace(FSDP, zero_stages=_sharded_stages))
    return nearest_uniform(plan, graph, replace(FSDP, recompute=("none",)))


def _fsdp(found: Uniform) -> dict[str, Any]:
    setup = found.setup
    return {
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": setup.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": setup.recompute == "full",
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }


def _degrees(found: Uniform) -> dict[str, Any]:
    return {
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": found.data,
            "parallelism_config_tp_size": found.setup.tensor,
            "parallelism_config_cp_size": 1,
        }
    }


def _batch(found: Uniform) -> Iterator[str]:
    yield _samples(found)
    parts = found.plan.num_microbatches
    if parts > 1:
        yield (
            f"The {parts} microbatches of a step are set in the script: "
            f"Accelerator(gradient_accumulation_steps={parts})."
        )


def _samples(found: Uniform) -> str:
    return f"The batch size of a process, {found.setup.microbatch}, is set in its data loader."


def _yaml(config: Yaml, indent: str = "") -> str:
    """Nested mappings of words, numbers and truth values as YAML."""
    lines = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    """A word, number or truth value; text that is more than a word is quoted, as JSON does it."""
    if not isinstance(value, str):
        return str(value).lower()
    if value.lower() in ("no", "none"):
        return f"'{value}'"
    return value if re.fullmatch("[A-Za-z][A-Za-z0-9_]*", value) else json.dumps(value)
