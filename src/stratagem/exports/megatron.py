"""Megatron-LM: arguments of ``pretrain_gpt.py`` (Shoeybi et al. 2019; Narayanan et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stratagem.exports.reading.export import ExportDraft
from stratagem.exports.reading.one_setup import SetupLimits, Uniform, nearest_uniform
from stratagem.exports.reading.transformer_sizes import TransformerSizes, transformer_sizes
from stratagem.searcher.methods.literature.setup_families import megatron_bucket
from stratagem.searcher.space.training_setup import ALL_AT_ONCE
from stratagem.simulator.base.precision import is_full
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan


def _zero_stages(tensor: int, pipeline: int) -> Sequence[int]:
    """Stages 2 and 3 are Megatron-FSDP, which has no pipelines."""
    return (0, 1, 2, 3) if pipeline == 1 else (0, 1)


LIMITS = SetupLimits(
    zero_stages=_zero_stages,
    sequence=(False, True),
    pipeline=True,
    virtual=True,
    uneven=True,
    experts=True,
)

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""What Megatron-FSDP calls a ZeRO stage."""


def megatron(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """Arguments for Megatron-LM, one option a line; lines that begin with # are comments.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> draft = megatron(TrainingSetup(tensor=2, pipeline=2).plan(graph, cluster), graph)
        >>> draft.text.splitlines()[:2]
        ['--tensor-model-parallel-size 2', '--pipeline-model-parallel-size 2']
    """
    found = nearest_uniform(plan, graph, LIMITS)
    setup = found.setup
    nearest = replace(
        found.plan,
        inputs_first=setup.tensor > 1 and not setup.sequence_parallel,
        bucket_bytes=plan.bucket_bytes or _default_bucket(found),
    )
    sizes = transformer_sizes(graph)
    missing = []
    if sizes is None:
        missing.append(
            f"Megatron-LM trains its own models, and {graph.name!r} is not one of its dense "
            "causal transformers: the arguments that describe the model are left out."
        )
    if setup.zero > 1:
        missing.append(
            "Megatron-FSDP needs the environment variable CUDA_DEVICE_MAX_CONNECTIONS to be unset "
            "or above 1."
        )
    found = replace(found, plan=nearest)
    lines = [*_parallel(found), *_batch(found, graph), *_memory(found), *_precision(nearest)]
    lines += _model(sizes) if sizes else []
    return ExportDraft("".join(f"{line}\n" for line in lines), nearest, tuple(missing))


def layout(blocks: Sequence[int]) -> str:
    """Layers of each stage as ``--pipeline-model-parallel-layout`` has them.

    Example:
        >>> layout((1, 2, 2))
        'Et|tt|ttL'
    """
    stages = ["t" * count for count in blocks]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)


def _default_bucket(found: Uniform) -> int:
    return found.bucket_bytes(megatron_bucket(found.data))


def _parallel(found: Uniform) -> Iterator[str]:
    setup = found.setup
    yield f"--tensor-model-parallel-size {setup.tensor}"
    yield f"--pipeline-model-parallel-size {setup.pipeline}"
    if len(set(found.blocks)) > 1:
        yield f"--pipeline-model-parallel-layout '{layout(found.blocks)}'"
    elif setup.virtual_stages > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {setup.virtual_stages}"
    if setup.sequence_parallel:
        yield "--sequence-parallel"
    if found.expert_ways > 1:
        yield f"--expert-model-parallel-size {found.expert_ways}"
        yield f"--expert-tensor-parallel-size {setup.tensor if setup.expert > 1 else 1}"


def _batch(found: Uniform, graph: OperatorGraph) -> Iterator[str]:
    yield f"--micro-batch-size {found.setup.microbatch}"
    yield f"--global-batch-size {graph.batch}"


def _memory(found: Uniform) -> Iterator[str]:
    setup, plan = found.setup, found.plan
    if setup.zero:
        yield "--use-distributed-optimizer"
    if setup.zero > 1:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {SHARDING[setup.zero]}"
        yield "--ckpt-format fsdp_dtensor"
    if setup.zero > 1 or not plan.training.fused_accumulation:
        yield "--no-gradient-accumulation-fusion"
    if found.data > 1 and plan.bucket_bytes < ALL_AT_ONCE:
        yield "--overlap-grad-reduce"
        yield f"--ddp-bucket-size {found.bucket_elements}"
    if setup.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    if setup.recompute == "selective":
        yield "--recompute-granularity selective"
        yield "--recompute-modules core_attn"


def _precision(plan: Plan) -> Iterator[str]:
    training = plan.training
    names = {"bfloat16": "--bf16", "float16": "--fp16"}
    reduced = {"bfloat16": "--grad-reduce-in-bf16"}
    formats = training.formats
    if formats.storage in names:
        yield names[formats.storage]
        if is_full(formats.gradients):
            yield "--accumulate-allreduce-grads-in-fp32"
        elif formats.gradients in reduced:
            yield reduced[formats.gradients]
    if training.fused_loss:
        yield "--cross-entropy-loss-fusion"
    yield f"--optimizer {training.optimizer}"
    yield f"--lr {training.learning_rate:g}"


def _model(sizes: TransformerSizes) -> Iterator[str]:
    yield f"--num-layers {sizes.layers}"
    yield f"--hidden-size {sizes.hidden}"
    yield f"--ffn-hidden-size {sizes.feed_forward}"
    yield f"--num-attention-heads {sizes.heads}"
    if sizes.query_groups != sizes.heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {sizes.query_groups}"
    yield f"--seq-length {sizes.sequence}"
    yield f"--max-position-embeddings {sizes.sequence}"
    yield f"--vocab-size {sizes.vocabulary}"
    if not sizes.tied:
        yield "--untie-embeddings-and-output-weights"
    if sizes.rms_norm:
        yield "--normalization RMSNorm"
    if sizes.gated:
        yield "--swiglu"
    if sizes.rotary:
        yield "--position-embedding-type rope"
    if not sizes.biases:
        yield "--disable-bias-linear"
