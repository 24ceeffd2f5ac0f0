"""A training run as people state it: degrees of parallelism, microbatch, ZeRO, recompute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stratagem.searcher.space.stage_cuts import balanced_stages, layer_stages
from stratagem.searcher.space.strategies import (
    AxisRule,
    expert_dims,
    expert_ways,
    sharing_experts,
    tensor_dims,
    tensor_parallel,
    warn_of_whole,
    with_recompute,
)
from stratagem.simulator.base.field_types import check_arguments, check_fields
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
        check_fields(self, "training setup")
        for name in ("microbatch", "virtual_stages", *(degree.name for degree in DEGREES)):
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
        ways = math.prod(degree.ways(self) for degree in DEGREES if not degree.of_data)
        if cluster.num_devices % ways:
            raise ValueError(
                f"{self._beside_data} are {ways} devices, which do not divide the "
                f"{cluster.num_devices} of cluster {cluster.name!r}"
            )
        return cluster.num_devices // ways

    @property
    def _beside_data(self) -> str:
        """The ways that data parallelism leaves, in words."""
        told = [d for d in DEGREES if not d.of_data and (d.always or d.ways(self) > 1)]
        return f"{' × '.join(f'{d.ways(self)} {d.name}' for d in told)} ways"

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
        check_arguments(
            "plan", graph=(graph, OperatorGraph), cluster=(cluster, Cluster), name=(name, str)
        )
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
                f"ZeRO-{self.zero} has nothing to shard over: {self._beside_data} leave 1 "
                f"data-parallel way of the {cluster.num_devices} devices; take fewer of those "
                "ways, or zero=0"
            )
        for degree in DEGREES:
            if degree.ways(self) > 1:
                degree.check(self, graph, data)

    def describe(self) -> str:
        """The degrees in a few words: ``tensor 8, pipeline 4, microbatch 2, ZeRO-1``."""
        words = [f"{d.name} {d.ways(self)}" for d in DEGREES if d.always]
        if self.virtual_stages > 1:
            words.append(f"{self.virtual_stages} stages a rank")
        words.append(f"microbatch {self.microbatch}")
        if self.zero:
            words.append(f"ZeRO-{self.zero}")
        if self.recompute != "none":
            words.append(f"{self.recompute} recompute")
        words += [f"{d.name} {d.ways(self)}" for d in DEGREES if not d.always and d.ways(self) > 1]
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
            along={k: d.rule for k, d in enumerate(self._degrees_along, 1) if d.rule is not None},
            inside_experts=self.expert > 1,
        )
        return with_recompute(graph, choices, self.recompute)

    def axes(self, data: int) -> tuple[MeshAxis, ...]:
        """The axes of each stage's mesh for so many data-parallel ways: data, expert, tensor.

        Data-parallel ranks that have the same experts are along the first; the second is there
        where experts are shared out, as is that of any degree but `tensor`.
        """
        alike = data // math.prod(degree.ways(self) for degree in DEGREES if degree.of_data)
        along = (MeshAxis(degree.name, degree.ways(self)) for degree in self._degrees_along)
        return MeshAxis("data", alike), *along

    @property
    def _degrees_along(self) -> list[ParallelDegree]:
        """The degrees of a mesh's axes behind the first; the last is `tensor`."""
        inside = [degree for degree in DEGREES if degree.inside_stages]
        return [degree for degree in reversed(inside) if degree.always or degree.ways(self) > 1]

    def stages(self, graph: OperatorGraph, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
        """The operators of each stage, by name, as `partition` deals them out."""
        count = self.pipeline * self.virtual_stages
        if self.partition == "time":
            return balanced_stages(graph, cluster, count, training=self.training)
        return layer_stages(graph, count, self.partition)


def _check_tensor(setup: TrainingSetup, graph: OperatorGraph, data: int) -> None:
    if not tensor_dims(graph, setup.tensor, inside_experts=setup.expert > 1):
        raise ValueError(
            f"no operator of {graph.name!r} can be cut {setup.tensor} tensor-parallel ways; "
            "take fewer, or tensor=1"
        )


def _check_experts(setup: TrainingSetup, graph: OperatorGraph, data: int) -> None:
    if data % setup.expert:
        raise ValueError(
            f"{setup.expert} expert-parallel ways do not divide the {data} data-parallel ways; "
            "take a divisor of those"
        )
    experts = expert_dims(graph)
    if not experts:
        raise ValueError(
            f"expert is {setup.expert}, but {graph.name!r} has no experts; take expert=1"
        )
    possible = expert_ways(graph, data)
    if setup.expert not in possible:
        name, dim = next(iter(experts.items()))
        raise ValueError(
            f"the {graph.operator(name).dim(dim).size} experts of {name!r} cannot be shared "
            f"out {setup.expert} ways without a device that has none; take one of {possible}"
        )


@dataclass(frozen=True, kw_only=True)
class ParallelDegree:
    """A way to share out a step's work beside data parallelism: into how many parts.

    Example:
        >>> [degree.name for degree in DEGREES if degree.inside_stages]
        ['tensor', 'expert']

    Attributes:
        name: of the field of `TrainingSetup` that has it, of a mesh's axis, and in words.
        check: refuses ways, above one, that a model cannot have, or not over the data-parallel
            ranks that there are.
        rule: what its axis does to operators; None for stages, which have no axis, and for tensor
            parallelism, which follows chains of dims and is along the last axis.
        inside_stages: whether a stage's mesh has an axis for it.
        of_data: whether it divides data-parallel ranks, not the devices beside them.
        always: whether words, and meshes that have an axis for it, have it with one way, too.
    """

    name: str
    check: Callable[[TrainingSetup, OperatorGraph, int], None] = lambda *_: None
    rule: AxisRule | None = None
    inside_stages: bool = True
    of_data: bool = False
    always: bool = False

    def ways(self, setup: TrainingSetup) -> int:
        """Into how many parts a setup has it."""
        ways: int = getattr(setup, self.name)
        return ways


EXPERT_AXIS = "expert"
"""The degree, and the axis of a setup's meshes, that experts are shared out over."""

DEGREES = (
    ParallelDegree(name="tensor", check=_check_tensor, always=True),
    ParallelDegree(name="pipeline", inside_stages=False, always=True),
    ParallelDegree(name=EXPERT_AXIS, check=_check_experts, rule=sharing_experts, of_data=True),
)
"""Axes of meshes are in the opposite order, behind that of data parallelism."""


ALL_AT_ONCE = 2**62
"""A bucket that no gradients fill: it is reduced when backward has ended."""
