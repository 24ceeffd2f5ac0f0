"""A training run as people state it: degrees of parallelism, microbatch, ZeRO, recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stratagem.searcher.space.stage_cuts import balanced_stages, layer_stages
from stratagem.searcher.space.strategies import (
    expert_dims,
    expert_ways,
    tensor_dims,
    tensor_parallel,
    warn_of_whole,
    with_recompute,
)
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.graph.checkpoint_segments import check_policy
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.named_schedules import SCHEDULES, schedule_by_name, with_rounds
from stratagem.simulator.sharding.choice import Choice

PARTITIONS = ("layers", "layers and ends", "parameters", "time")
"""How layers are dealt out to pipeline stages (see `TrainingSetup.partition`)."""


@dataclass(frozen=True)
class TrainingSetup:
    """What a command line of Megatron-LM, DeepSpeed, nanotron or FSDP says of a training run.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> setup = TrainingSetup(microbatch=2, tensor=4, pipeline=2, recompute="full")
        >>> plan = setup.plan(gpt(num_layers=4, batch=16), cluster)
        >>> len(plan.stages), plan.num_microbatches, plan.stages[0].mesh.shape
        (2, 8, (1, 4))

    Devices are numbered as Megatron-LM does it: those of a tensor-parallel group are neighbours,
    then the data-parallel ranks, then the pipeline stages (Narayanan et al. 2021, arXiv
    2104.04473). The batch is that of the graph.

    Attributes:
        microbatch: samples that one data-parallel replica takes at once.
        tensor: tensor-parallel ways.
        pipeline: pipeline-parallel ways.
        virtual_stages: stages on each pipeline rank; above 1 the schedule is interleaved 1F1B.
        schedule: of the microbatches, by its name; it is ``interleaved`` with virtual stages.
        training: precision and optimizer; bfloat16 and Adam when left out, as nearly all such runs
            train. (`search` takes float32 when it is left out, as captured models have it, so that
            its plans compute what the model does.)
        zero: ZeRO stage of all parameters, over the data-parallel ranks and over those that repeat
            what tensor parallelism leaves whole (Rajbhandari et al. 2020).
        recompute: ``none``, ``selective`` or ``full`` (see
            `checkpoint_segments.recomputed_operators`).
        expert: expert-parallel ways, into which data-parallel ranks are divided: each has its
            share of the experts (Lepikhin et al. 2020), which tensor parallelism then cuts inside.
            With 1 way experts are copied, or shared out by tensor parallelism.
        sequence_parallel: whether what tensor parallelism leaves whole is cut along the sequence,
            and gathered again in backward (Korthikanti et al. 2022).
        overlap_gradients: whether gradients are reduced while backward still runs; otherwise all
            at once when it has ended.
        bucket_bytes: gradients are reduced in buckets of at least so many bytes a device, as
            PyTorch's DistributedDataParallel does it (25 MiB there), and what ZeRO shards is
            gathered in buckets, too; 0 reduces each operator's as soon as it is made. A plan's
            buckets, which are counted unsharded, are as many times larger as there are
            tensor-parallel ways.
        inputs_first: whether gradients of weights run beside the conversion of those of inputs
            (Megatron-LM's asynchronous all-reduce of tensor parallelism).
        partition: how a pipeline is cut: ``layers`` gives every stage as many repeated blocks,
            what stands before them to the first stage and what stands after to the last;
            ``layers and ends`` counts each end as one more layer; ``parameters`` balances the
            weights of matrix products (nanotron); ``time`` the predicted time.

    Raises:
        ValueError: a size below 1, a ZeRO stage that is none, an unknown policy or partition,
            virtual stages under another schedule than 1F1B, or buckets of gradients that are not
            reduced while backward runs.
    """

    microbatch: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    training: Training = field(default_factory=lambda: Training(precision="bfloat16"))
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    expert: int = 1
    overlap_gradients: bool = True
    bucket_bytes: int = 0
    inputs_first: bool = False
    partition: str = "layers"

    def __post_init__(self) -> None:
        for name in ("microbatch", "tensor", "pipeline", "virtual_stages", "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"training setup: {name} is {getattr(self, name)}; at least 1")
        if self.virtual_stages > 1 and not with_rounds(self.schedule, self.virtual_stages):
            able = (name for name in SCHEDULES if with_rounds(name, self.virtual_stages))
            raise ValueError(
                f"training setup: schedule is {self.schedule!r}, but virtual_stages is "
                f"{self.virtual_stages}, which only {', '.join(able)} can be given: leave out one "
                "of them"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"training setup: zero is {self.zero}; it must be 0, 1, 2 or 3")
        if self.partition not in PARTITIONS:
            raise unknown("partition", self.partition, PARTITIONS, where="training setup")
        if self.bucket_bytes < 0:
            raise ValueError(f"training setup: bucket_bytes is {self.bucket_bytes}; at least 0")
        if self.bucket_bytes and not self.overlap_gradients:
            raise ValueError(
                f"training setup: buckets of {self.bucket_bytes} bytes are reduced while backward "
                "still runs, but overlap_gradients is False: set bucket_bytes to 0"
            )
        check_policy(self.recompute)

    @property
    def placed_schedule(self) -> str:
        """The schedule that gives a rank so many stages: of 1F1B the interleaved one."""
        if self.virtual_stages == 1:
            return self.schedule
        return with_rounds(self.schedule, self.virtual_stages)

    def data(self, cluster: Cluster) -> int:
        """Data-parallel ways that use up the cluster.

        Raises:
            ValueError: the devices are no multiple of tensor × pipeline ways.
        """
        ways = self.tensor * self.pipeline
        if cluster.num_devices % ways:
            raise ValueError(
                f"{self.tensor} tensor × {self.pipeline} pipeline ways are {ways} devices, which "
                f"do not divide the {cluster.num_devices} of cluster {cluster.name!r}"
            )
        return cluster.num_devices // ways

    def num_microbatches(self, graph: OperatorGraph, cluster: Cluster) -> int:
        """Microbatches of a step.

        Raises:
            ValueError: the batch is no multiple of microbatch × data-parallel ways.
        """
        at_once = self.microbatch * self.data(cluster)
        if graph.batch % at_once:
            raise ValueError(
                f"a batch of {graph.batch} is no multiple of {at_once} samples at once "
                f"(microbatch {self.microbatch} × {self.data(cluster)} data-parallel ways)"
            )
        return graph.batch // at_once

    def plan(self, graph: OperatorGraph, cluster: Cluster, *, name: str = "") -> Plan:
        """The plan that runs `graph` on all devices of `cluster`.

        Warns:
            LeftWhole: tensor parallelism does not reach some operators.

        Raises:
            ValueError: degrees that fit neither the cluster, the batch nor the model, or that do
                nothing; the message says which.
        """
        parts = self.num_microbatches(graph, cluster)
        self.check(graph, cluster)
        warn_of_whole(graph, self.tensor, inside_experts=self.expert > 1)
        small = graph.microbatch(parts)
        axes = self.axes(self.data(cluster))
        choices = self.strategy(small, tuple(axis.size for axis in axes))
        stages = self.stages(graph, cluster)
        share = cluster.num_devices // self.pipeline
        meshes = [
            DeviceMesh(axes, tuple(range(rank * share, (rank + 1) * share)))
            for rank in range(self.pipeline)
        ]
        schedule = schedule_by_name(
            self.placed_schedule, len(stages), parts, num_ranks=self.pipeline
        )
        return Plan(
            name=name or self.describe(),
            model=graph.name,
            fingerprint=graph.fingerprint,
            cluster=cluster,
            training=self.training,
            stages=tuple(
                Stage(names, meshes[rank], {n: choices[n] for n in names})
                for names, rank in zip(stages, schedule.homes, strict=True)
            ),
            num_microbatches=parts,
            schedule=self.placed_schedule,
            bucket_bytes=self.bucket_bytes * self.tensor
            if self.overlap_gradients
            else ALL_AT_ONCE,
            inputs_first=self.inputs_first,
        )

    def check(self, graph: OperatorGraph, cluster: Cluster) -> None:
        """Refuse degrees that do nothing, and experts that cannot be shared out.

        Raises:
            ValueError: names the degree, both numbers, and what to do.
        """
        data = self.data(cluster)
        if self.zero and data == 1:
            raise ValueError(
                f"ZeRO-{self.zero} has nothing to shard over: {self.tensor} tensor × "
                f"{self.pipeline} pipeline ways leave 1 data-parallel way of the "
                f"{cluster.num_devices} devices; take fewer of those ways, or zero=0"
            )
        if self.tensor > 1 and not tensor_dims(graph, self.tensor, inside_experts=self.expert > 1):
            raise ValueError(
                f"no operator of {graph.name!r} can be cut {self.tensor} tensor-parallel ways; "
                "take fewer, or tensor=1"
            )
        if self.expert > 1:
            self._check_experts(graph, data)

    def _check_experts(self, graph: OperatorGraph, data: int) -> None:
        if data % self.expert:
            raise ValueError(
                f"{self.expert} expert-parallel ways do not divide the {data} data-parallel ways; "
                "take a divisor of those"
            )
        experts = expert_dims(graph)
        if not experts:
            raise ValueError(
                f"expert is {self.expert}, but {graph.name!r} has no experts; take expert=1"
            )
        possible = expert_ways(graph, data)
        if self.expert not in possible:
            name, dim = next(iter(experts.items()))
            raise ValueError(
                f"the {graph.operator(name).dim(dim).size} experts of {name!r} cannot be shared "
                f"out {self.expert} ways without a device that has none; take one of {possible}"
            )

    def describe(self) -> str:
        """The degrees in a few words: ``tensor 8, pipeline 4, microbatch 2, ZeRO-1``."""
        words = [f"tensor {self.tensor}", f"pipeline {self.pipeline}"]
        if self.virtual_stages > 1:
            words.append(f"{self.virtual_stages} stages a rank")
        words.append(f"microbatch {self.microbatch}")
        if self.zero:
            words.append(f"ZeRO-{self.zero}")
        if self.recompute != "none":
            words.append(f"{self.recompute} recompute")
        if self.expert > 1:
            words.append(f"expert {self.expert}")
        if self.sequence_parallel:
            words.append("sequence parallel")
        if self.bucket_bytes:
            words.append(f"buckets of {format_bytes(self.bucket_bytes)}")
        return ", ".join(words)

    def strategy(self, graph: OperatorGraph, shape: Sequence[int]) -> dict[str, Choice]:
        """The choice of every operator of a microbatch on a mesh with the setup's `axes`."""
        choices = tensor_parallel(
            graph,
            shape,
            len(shape) - 1,
            sequence_parallel=self.sequence_parallel,
            regather=self.sequence_parallel,
            zero=self.zero,
            expert_axis=1 if self.expert > 1 else None,
        )
        return with_recompute(graph, choices, self.recompute)

    def axes(self, data: int) -> tuple[MeshAxis, ...]:
        """The axes of each stage's mesh for so many data-parallel ways: data, expert, tensor.

        Data-parallel ranks that have the same experts are along the first; the second is there
        where experts are shared out.
        """
        tensor = MeshAxis("tensor", self.tensor)
        if self.expert == 1:
            return MeshAxis("data", data), tensor
        return MeshAxis("data", data // self.expert), MeshAxis("expert", self.expert), tensor

    def stages(self, graph: OperatorGraph, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
        """The operators of each stage, by name, as `partition` deals them out."""
        count = self.pipeline * self.virtual_stages
        if self.partition == "time":
            return balanced_stages(graph, cluster, count, training=self.training)
        return layer_stages(graph, count, self.partition)


ALL_AT_ONCE = 2**62
"""A bucket that no gradients fill: it is reduced when backward has ended."""
