"""torchtitan: overrides of a job's configuration (Liang et al. 2024, arXiv 2410.06511)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stratagem.exports.reading.export import ExportDraft
from stratagem.exports.reading.fsdp_units import unit_gradient_bytes
from stratagem.exports.reading.one_setup import SetupLimits, Uniform, nearest_uniform
from stratagem.exports.reading.transformer_sizes import transformer_sizes
from stratagem.simulator.base.precision import FULL
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.named_schedules import plain_schedules, record_of


def _zero_stages(tensor: int, pipeline: int) -> Sequence[int]:
    """Without a pipeline gradients are reduced after each microbatch, with one once a step."""
    return (0, 2, 3) if pipeline == 1 else (0, 1, 3)


LIMITS = SetupLimits(
    zero_stages=_zero_stages,
    sequence=(False, True),
    pipeline=True,
    virtual=True,
    recompute=("none", "full"),
    experts=True,
)

PRECISION = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
"""By how a plan stores its parameters, how torchtitan can."""


def torchtitan(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """Command-line overrides for torchtitan, one a line; lines that begin with # are comments.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> draft = torchtitan(TrainingSetup(zero=3, tensor=2).plan(graph, cluster), graph)
        >>> [line for line in draft.text.splitlines() if "reshard" in line]
        ['--parallelism.fsdp_reshard_after_forward always']
    """
    known = tuple(name for name in plain_schedules() if record_of(name).torch_name)
    found = nearest_uniform(plan, graph, replace(LIMITS, schedules=known))
    training = found.plan.training
    training = replace(
        training, precision=PRECISION[training.formats.storage], gradient_precision=FULL
    )
    nearest = replace(
        found.plan, training=training, bucket_bytes=unit_gradient_bytes(graph, training)
    )
    found = replace(found, plan=nearest)
    missing = []
    if transformer_sizes(graph) is None:
        missing.append(
            f"torchtitan trains its own models, and {graph.name!r} is not one of its dense "
            "transformers: choose the nearest with --module and --config."
        )
    if training.optimizer != "adam":
        missing.append(
            "Its optimizers are Adam, AdamW and Muon: set another one in the job's configuration."
        )
    text = "".join(f"{line}\n" for line in (*_parallel(found), *_training(found, graph)))
    return ExportDraft(text, nearest, tuple(missing))


def _parallel(found: Uniform) -> Iterator[str]:
    setup = found.setup
    sharded = setup.zero > 0
    yield f"--parallelism.data_parallel_replicate_degree {1 if sharded else found.data}"
    yield f"--parallelism.data_parallel_shard_degree {found.data if sharded else 1}"
    yield (
        "--parallelism.fsdp_reshard_after_forward " + ("always" if setup.zero == 3 else "never")
    )
    yield f"--parallelism.tensor_parallel_degree {setup.tensor}"
    if not setup.sequence_parallel:
        yield "--parallelism.no-enable_sequence_parallel"
    if found.expert_ways > 1:
        yield f"--parallelism.expert_parallel_degree {found.expert_ways}"
    yield f"--parallelism.pipeline_parallel_degree {setup.pipeline}"
    if setup.pipeline > 1:
        name = record_of(found.plan.schedule).torch_name
        yield f"--parallelism.pipeline_parallel_schedule {name}"
        yield f"--parallelism.pipeline_parallel_microbatch_size {setup.microbatch}"
        yield f"--parallelism.pipeline_parallel_layers_per_stage {found.blocks[0]}"
        yield "--parallelism.pipeline_parallel_first_stage_less_layers 0"
        yield "--parallelism.pipeline_parallel_last_stage_less_layers 0"


def _training(found: Uniform, graph: OperatorGraph) -> Iterator[str]:
    setup, precision = found.setup, found.plan.training.formats.storage
    piped = found.plan.num_microbatches if setup.pipeline > 1 else 1
    yield f"--training.local_batch_size {setup.microbatch * piped}"
    yield f"--training.global_batch_size {graph.batch}"
    sizes = transformer_sizes(graph)
    if sizes:
        yield f"--training.seq_len {sizes.sequence}"
    yield f"--training.mixed_precision_param {precision}"
    yield "--training.mixed_precision_reduce float32"
    if setup.pipeline > 1:
        yield "--training.disable_cuda_graphs"
    yield f"activation_checkpoint:{setup.recompute}"
