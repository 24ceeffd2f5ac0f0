"""Families of training setups: Megatron-LM's, DeepSpeed's and GShard's degrees, all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from stratagem.searcher.space.schedule_traits import schedules_of
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.strategies import expert_dims, expert_ways, left_whole, tensor_dims
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.graph.operator_graph import repeated_blocks

MAX_MICROBATCH = 64
"""Samples that a replica takes at once at most; powers of two up to it are tried."""

MAX_VIRTUAL_STAGES = 4
"""Stages that a rank of an interleaved pipeline has at most."""

DEEPSPEED_BUCKET = 500_000_000
"""Elements that DeepSpeed reduces and gathers at once where it is told nothing: what
``reduce_bucket_size`` and ``allgather_bucket_size`` are then (deepspeed.ai/docs/config-json)."""

MEGATRON_BUCKET = 40_000_000, 1_000_000
"""The same of Megatron-LM: at least so many, and so many for each data-parallel rank
(``bucket_size`` of Megatron Core's ``DistributedDataParallelConfig``)."""


def megatron_bucket(data: int) -> int:
    """Elements of a bucket of Megatron-LM on so many data-parallel ranks.

    Example:
        >>> megatron_bucket(8), megatron_bucket(64)
        (40000000, 64000000)
    """
    least, for_each = MEGATRON_BUCKET
    return max(least, for_each * data)


def megatron_setups(situation: Situation) -> Iterator[TrainingSetup]:
    """Megatron-LM: every tensor × pipeline × data degree, microbatch, interleaving and recompute.

    Tensor parallelism inside a node, with sequence parallelism or without (Korthikanti et al.
    2022); pipelines that deal layers out evenly under 1F1B, plain or interleaved (Narayanan et al.
    2021, arXiv 2104.04473). Experts are copied, cut by tensor parallelism, or shared out over as
    many data-parallel ranks as possible. Models without heads or hidden layers to shard have none.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import gpt
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> max(setup.pipeline for setup in megatron_setups(situation))
        4
    """
    if not tensor_dims(situation.graph, 2):
        return
    total = situation.cluster.num_devices
    layers = max((block.count for block in repeated_blocks(situation.graph)), default=1)
    for tensor in _tensor_ways(situation):
        for pipeline in _divisors(total // tensor):
            if layers % pipeline:
                continue
            most = 1 if situation.graph.is_forward else MAX_VIRTUAL_STAGES
            for rounds in range(1, most + 1):
                if layers % (pipeline * rounds) or (rounds > 1 and pipeline == 1):
                    continue
                yield from _variants(situation, tensor, pipeline, rounds)


def zero_setups(situation: Situation, stage: int) -> Iterator[TrainingSetup]:
    """DeepSpeed: a ZeRO stage over all data-parallel ranks, with tensor parallelism and without.

    Rajbhandari et al. 2020 (arXiv 1910.02054). Gradient accumulation and recompute as they fit.
    Experts are copied, or shared out over as many data-parallel ranks as possible, as in
    DeepSpeed-MoE (Rajbhandari et al. 2022, arXiv 2201.05596).

    Raises:
        ValueError: the ZeRO stage is not 1, 2 or 3.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"DeepSpeed has ZeRO stages 1, 2 and 3, not {stage}")
    yield from _without_pipelines(situation, (stage,), partial(_expert_ways, situation))


def as_deepspeed_runs(situation: Situation, setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """A setup of `zero_setups` in the buckets that DeepSpeed has by default."""
    yield _in_buckets(setup, DEEPSPEED_BUCKET)


def as_megatron_runs(situation: Situation, setup: TrainingSetup) -> Iterator[TrainingSetup]:
    """A setup of `megatron_setups` in the buckets that Megatron-LM has by default.

    Without its distributed optimizer, which is ZeRO-1, and with it.
    """
    data = setup.data(situation.cluster)
    if data > 1:
        yield _in_buckets(setup, megatron_bucket(data))
        yield _in_buckets(replace(setup, zero=1), megatron_bucket(data))


def _in_buckets(setup: TrainingSetup, elements: int) -> TrainingSetup:
    return replace(setup, bucket_bytes=elements * setup.training.gradient_bytes)


def gshard_setups(situation: Situation) -> Iterator[TrainingSetup]:
    """GShard: experts shared out over the data-parallel ranks, all else data or tensor parallel.

    Lepikhin et al. 2020 (arXiv 2006.16668); with tensor parallelism as DeepSpeed-MoE has it
    (Rajbhandari et al. 2022, arXiv 2201.05596), and ZeRO-1 or none for what is not an expert's.
    Models without experts have none.
    """
    if not expert_dims(situation.graph):
        return

    def shared(data: int) -> tuple[int, ...]:
        return tuple(ways for ways in _expert_ways(situation, data) if ways > 1)

    yield from _without_pipelines(situation, (0, 1), shared)


def _without_pipelines(
    situation: Situation, zero_stages: Sequence[int], experts: Callable[[int], tuple[int, ...]]
) -> Iterator[TrainingSetup]:
    """Data and tensor parallelism, with some ways to share out experts over the data ranks.

    Setups in which nothing is data parallel are left out.
    """
    for tensor, microbatch, policy, zero in itertools.product(
        _tensor_ways(situation), _microbatches(situation), _policies(situation), zero_stages
    ):
        if tensor == situation.cluster.num_devices:
            continue
        for expert in experts(situation.cluster.num_devices // tensor):
            yield TrainingSetup(
                microbatch=microbatch,
                tensor=tensor,
                training=situation.training,
                schedule=_schedule(situation),
                zero=zero,
                recompute=policy,
                expert=expert,
            )


def _variants(
    situation: Situation, tensor: int, pipeline: int, rounds: int
) -> Iterator[TrainingSetup]:
    data = situation.cluster.num_devices // (tensor * pipeline)
    for microbatch, policy, sequence, expert in itertools.product(
        _microbatches(situation, data),
        _policies(situation),
        (False, True),
        _expert_ways(situation, data),
    ):
        parts = situation.graph.batch // (data * microbatch)
        if (sequence and tensor == 1) or (rounds > 1 and parts % pipeline):
            continue
        yield TrainingSetup(
            microbatch=microbatch,
            tensor=tensor,
            pipeline=pipeline,
            virtual_stages=rounds,
            training=situation.training,
            schedule=_schedule(situation),
            recompute=policy,
            sequence_parallel=sequence,
            inputs_first=tensor > 1 and not sequence,
            expert=expert,
        )


def _expert_ways(situation: Situation, data: int) -> tuple[int, ...]:
    """Experts on every data-parallel rank, or shared out over as many as they can be."""
    if not expert_dims(situation.graph):
        return (1,)
    return tuple(sorted({1, max(expert_ways(situation.graph, data))}))


def _schedule(situation: Situation) -> str:
    """What these pipelines run under."""
    return schedules_of(situation.graph, None)[0]


def _policies(situation: Situation) -> tuple[str, ...]:
    """What may be recomputed; a forward pass keeps nothing that could be."""
    return ("none",) if situation.graph.is_forward else RECOMPUTE_POLICIES


def _tensor_ways(situation: Situation) -> list[int]:
    """Ways that divide a node and that all of the model can be cut into."""
    cluster = situation.cluster
    return [
        ways
        for ways in _divisors(min(cluster.devices_per_node, cluster.num_devices))
        if cluster.num_devices % ways == 0
        if ways == 1
        or (tensor_dims(situation.graph, ways) and not left_whole(situation.graph, ways))
    ]


def _microbatches(situation: Situation, data: int = 1) -> list[int]:
    """Powers of two of samples of a replica at once, or all of them if they stay together."""
    batch, counts = situation.graph.batch, situation.graph.microbatch_counts
    if counts == (1,):
        return [batch // data] if batch % data == 0 else []
    sizes = [1 << k for k in range(MAX_MICROBATCH.bit_length())]
    return [n for n in sizes if batch % (n * data) == 0 and batch // (n * data) in counts]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
