"""The nearest plan with one set of degrees: what most training programs are told.

Their options name a tensor-parallel degree, a number of pipeline stages, a ZeRO stage and so on,
the same for the whole model. Each degree of a plan is what most of its work has; where degrees do
not fit the model, the batch or the devices, the nearest ones that do are taken, by the ratio.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stratagem.exports.reading.differences import PartsMemory, effective, summed_axes
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.logical_dims import logical_dims
from stratagem.searcher.space.stage_cuts import by_stage, layer_units
from stratagem.searcher.space.strategies import expert_dims, expert_ways, tensor_dims
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES, recomputed_operators
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard, splits_of
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator, factors, shape_of
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.named_schedules import (
    record_of,
    schedule_by_name,
    with_rounds,
)
from stratagem.simulator.schedules.schedule_record import Sizes
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.parameter_homes import trainable_weights


@dataclass(frozen=True)
class SetupLimits:
    """What the options of a program can say.

    Attributes:
        zero_stages: the ZeRO stages that it has, by tensor and pipeline ways.
        tensor: whether it has tensor parallelism.
        sequence: whether that may be, or must be, sequence parallel.
        pipeline: whether it has pipelines.
        virtual: whether a pipeline rank may have several stages.
        uneven: whether stages may have different numbers of layers.
        schedules: of its pipelines, the usual one first.
        recompute: policies that it has.
        experts: whether experts may be shared out.
    """

    zero_stages: Callable[[int, int], Sequence[int]]
    tensor: bool = True
    sequence: tuple[bool, ...] = (False,)
    pipeline: bool = False
    virtual: bool = False
    uneven: bool = False
    schedules: tuple[str, ...] = ("1f1b",)
    recompute: tuple[str, ...] = RECOMPUTE_POLICIES
    experts: bool = False


@dataclass(frozen=True)
class Uniform:
    """A plan of one set of degrees.

    Attributes:
        plan: it, with the buckets of the plan that it is near to.
        setup: its degrees.
        data: data-parallel ways.
        blocks: how many repeated blocks each stage has.
        expert_ways: over how many devices experts are shared out.
    """

    plan: Plan
    setup: TrainingSetup
    data: int
    blocks: tuple[int, ...]
    expert_ways: int

    @property
    def bucket_elements(self) -> int:
        """Gradients that a device puts into a bucket: its share of those that fill the plan's."""
        return -(-self.plan.bucket_bytes // self._bytes_each)

    def bucket_bytes(self, elements: int) -> int:
        """The buckets of a plan of which a device has so many elements."""
        return elements * self._bytes_each

    @property
    def _bytes_each(self) -> int:
        return self.plan.training.gradient_bytes * self.setup.tensor


@dataclass(frozen=True)
class _Degrees:
    devices: int
    pipeline: int
    virtual: int
    tensor: int
    microbatches: int

    @property
    def data(self) -> int:
        return self.devices // (self.pipeline * self.tensor)

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual


def nearest_uniform(plan: Plan, graph: OperatorGraph, limits: SetupLimits) -> Uniform:
    """The plan with one set of degrees that is nearest to a plan, within limits.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plan = TrainingSetup(tensor=2, pipeline=2, zero=1).plan(graph, cluster)
        >>> found = nearest_uniform(plan, graph, SetupLimits(lambda tensor, pipeline: (0, 3)))
        >>> found.setup.tensor, found.setup.pipeline, found.setup.zero, found.data
        (2, 1, 0, 4)
    """
    return _Near(plan, graph, limits).uniform()


@dataclass
class _Near:
    plan: Plan
    graph: OperatorGraph
    limits: SetupLimits
    _tensor: dict[int, bool] = field(default_factory=dict)
    _parts: PartsMemory = field(default_factory=PartsMemory)

    def uniform(self) -> Uniform:
        degrees = self._degrees()
        stages, blocks = self._stages(degrees.stages)
        small = self.graph.microbatch(degrees.microbatches)
        setups = [self._setup(degrees, sequence) for sequence in self._sequences(degrees.tensor)]
        shape = tuple(axis.size for axis in setups[0].axes(degrees.data))
        strategies = [setup.strategy(small, shape) for setup in setups]
        plans = [
            self._plan(degrees, setup, choices, stages)
            for setup, choices in zip(setups, strategies, strict=True)
        ]
        best = 0
        if len(plans) > 1:
            best = min(range(len(plans)), key=lambda k: self._apart(plans[k]))
        ways = _expert_ways(self.graph, strategies[best], shape)
        return Uniform(plans[best], setups[best], degrees.data, blocks, ways)

    def _work(self) -> Iterator[tuple[Operator, Stage, float]]:
        """Operators of the plan that the model has too, with their stage and flops."""
        known = self.plan.rewrite(self.graph).graph
        for operator in known.operators:
            if not operator.is_source and operator.name in self.graph.index:
                stage = self.plan.stages[self.plan.stage_of[operator.name]]
                yield operator, stage, kind_of(operator).flops(operator, operator.sizes)

    def _degrees(self) -> _Degrees:
        """The possible degrees with the least change of the plan's, on as many devices."""
        plan, experts = self.plan, expert_dims(self.graph)
        votes: Counter[int] = Counter()
        for operator, stage, flops in self._work():
            if (
                operator.weights
                and kind_of(operator).product is not None
                and operator.name not in experts
            ):
                votes[_weight_ways(operator, stage)] += round(flops)
        tensor = max(votes, key=lambda ways: (votes[ways], -ways), default=1)

        def apart(degrees: _Degrees) -> tuple[float, ...]:
            return (
                _steps(degrees.tensor, tensor) + _steps(degrees.pipeline, plan.num_ranks),
                _steps(degrees.microbatches, plan.num_microbatches),
                degrees.pipeline,
                degrees.tensor,
                degrees.microbatches,
            )

        for devices in range(plan.num_devices, 0, -1):
            found = list(self._possible(devices))
            if found:
                return min(found, key=apart)
        raise AssertionError("one device can always run everything")

    def _possible(self, devices: int) -> Iterator[_Degrees]:
        limits, batch = self.limits, self.graph.batch
        virtual = len(self.plan.stages) // self.plan.num_ranks if limits.virtual else 1
        for pipeline in _divisors(devices) if limits.pipeline else [1]:
            for tensor in _divisors(devices // pipeline) if limits.tensor else [1]:
                data = devices // (pipeline * tensor)
                if batch % data or not self._has_tensor(tensor):
                    continue
                for parts in _divisors(batch // data):
                    rounds = virtual if self._turns(pipeline, virtual, parts) else 1
                    counts = [n for n in (rounds, 1) if self._has_stages(pipeline * n)]
                    if counts:
                        yield _Degrees(devices, pipeline, counts[0], tensor, parts)

    def _turns(self, ranks: int, virtual: int, parts: int) -> bool:
        """Whether ranks of a pipeline may have so many stages each."""
        if ranks == 1 or virtual == 1:
            return False
        sizes = Sizes(ranks * virtual, parts, ranks)
        return record_of(self._schedule(virtual)).accepts(sizes)

    def _has_tensor(self, ways: int) -> bool:
        """Whether each dim that tensor parallelism shards divides, but for padded vocabularies."""
        if ways not in self._tensor:
            sharded = tensor_dims(self.graph, ways) if ways > 1 else {}
            padded = self._padded
            by_expert = sharded.items() & expert_dims(self.graph).items()
            self._tensor[ways] = ways == 1 or (
                bool(sharded)
                and (self.limits.experts or not by_expert)
                and all(
                    self.graph.operator(name).sizes[dim] % ways == 0
                    for name, dim in sharded.items()
                    if (name, dim) not in padded
                )
            )
        return self._tensor[ways]

    @cached_property
    def _padded(self) -> set[tuple[str, str]]:
        """Operators and their dims that count the words of a vocabulary, which programs pad."""
        return {
            member
            for name, dim in logical_dims(self.graph).items()
            if name.split(".")[0] == "vocab"
            for chain in dim.chains
            for member in chain
        }

    def _has_stages(self, count: int) -> bool:
        blocks = len(self._units) - 2
        return count == 1 or (blocks >= count and (self.limits.uneven or blocks % count == 0))

    @cached_property
    def _units(self) -> list[list[int]]:
        return layer_units(self.graph)

    def _stages(self, count: int) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
        """Whole blocks per stage, where the plan has most of each if it has as many stages."""
        before, *blocks, after = self._units
        stages = [k * count // len(blocks) for k in range(len(blocks))]
        if self.limits.uneven and count == len(self.plan.stages):
            near = list(itertools.accumulate(map(self._stage_of, blocks), max))
            stages = near if set(near) == set(range(count)) else stages
        stage_of = dict.fromkeys(before, 0) | dict.fromkeys(after, count - 1)
        for block, stage in zip(blocks, stages, strict=True):
            stage_of |= dict.fromkeys(block, stage)
        counts = Counter(stages)
        return by_stage(self.graph, stage_of, count), tuple(counts[s] for s in range(count))

    def _stage_of(self, block: Sequence[int]) -> int:
        votes = Counter(
            self.plan.stage_of[name]
            for name in (self.graph.names[i] for i in block)
            if name in self.plan.stage_of
        )
        return max(votes, key=lambda stage: (votes[stage], -stage), default=0)

    def _sequences(self, tensor: int) -> Sequence[bool]:
        return self.limits.sequence if tensor > 1 else (False,)

    def _setup(self, degrees: _Degrees, sequence: bool) -> TrainingSetup:
        return TrainingSetup(
            microbatch=self.graph.batch // (degrees.microbatches * degrees.data),
            tensor=degrees.tensor,
            pipeline=degrees.pipeline,
            virtual_stages=degrees.virtual,
            schedule=self._schedule(degrees.virtual),
            training=self.plan.training,
            zero=self._zero(degrees) if degrees.data > 1 else 0,
            recompute=self._recompute(),
            sequence_parallel=sequence,
            expert=self._expert(degrees) if self.limits.experts else 1,
        )

    def _schedule(self, virtual: int) -> str:
        """The plan's schedule where the program has it, else its usual one."""
        listed = (with_rounds(name, virtual) for name in self.limits.schedules)
        possible = [name for name in listed if name]
        return self.plan.schedule if self.plan.schedule in possible else possible[0]

    def _zero(self, degrees: _Degrees) -> int:
        """The ZeRO stage nearest to that of most parameters; of two equally near the higher."""
        graph = self.plan.rewrite(self.graph).graph
        votes: Counter[int] = Counter()
        for operator, stage, _ in self._work():
            choice = stage.choices[operator.name]
            if not trainable_weights(graph, operator):
                continue  # Of frozen parameters, lower stages than the third say nothing.
            if summed_axes(graph, operator, choice.config, stage.mesh) > 1:
                votes[choice.zero] += sum(
                    math.prod(shape_of(weight.layout, operator.sizes))
                    for weight in operator.weights
                )
        most = max(votes, key=lambda stage: (votes[stage], stage), default=0)
        stages = self.limits.zero_stages(degrees.tensor, degrees.pipeline)
        return min(stages, key=lambda stage: (abs(stage - most), -stage))

    def _recompute(self) -> str:
        """The policy whose operators are most like those that the plan recomputes."""
        again = {
            operator.name
            for operator, stage, _ in self._work()
            if stage.choices[operator.name].recompute
        }
        return min(
            self.limits.recompute,
            key=lambda policy: len(again ^ recomputed_operators(self.graph, policy)),
        )

    def _expert(self, degrees: _Degrees) -> int:
        """The expert-parallel ways nearest to the plan's, but for those of tensor parallelism."""
        experts = expert_dims(self.graph)
        votes: Counter[int] = Counter()
        for operator, stage, flops in self._work():
            if operator.name in experts:
                config = stage.choices[operator.name].config
                ways = math.prod(splits_of(config, experts[operator.name], stage.mesh.shape))
                inside = _weight_ways(operator, stage) > ways
                votes[1 if ways == degrees.tensor and not inside else ways] += round(flops) + 1
        wanted = max(votes, key=lambda ways: (votes[ways], -ways), default=1)
        possible = expert_ways(self.graph, degrees.data)
        return min(possible, key=lambda ways: (_steps(ways, wanted), ways))

    def _plan(
        self,
        degrees: _Degrees,
        setup: TrainingSetup,
        choices: Choices,
        stages: tuple[tuple[str, ...], ...],
    ) -> Plan:
        devices = sorted(self.plan.devices)[: degrees.devices]
        share = degrees.devices // degrees.pipeline
        axes = setup.axes(degrees.data)
        schedule = schedule_by_name(
            setup.placed_schedule,
            len(stages),
            degrees.microbatches,
            num_ranks=degrees.pipeline,
        )
        meshes = [
            DeviceMesh(axes, tuple(devices[rank * share : (rank + 1) * share]))
            for rank in range(degrees.pipeline)
        ]
        return replace(
            self.plan,
            name=setup.describe(),
            fingerprint=self.graph.fingerprint,
            stages=tuple(
                Stage(names, meshes[rank], {n: choices[n] for n in names})
                for names, rank in zip(stages, schedule.homes, strict=True)
            ),
            num_microbatches=degrees.microbatches,
            schedule=setup.placed_schedule,
            inputs_first=False,
            prediction=None,
            token_slices=1,
            orders=(),
            substitutions=(),
        )

    def _apart(self, nearest: Plan) -> float:
        """Elements made by operators that the plan does otherwise."""
        total = 0.0
        for operator, stage, _ in self._work():
            there = nearest.stages[nearest.stage_of[operator.name]]
            choices: list[Choice] = [
                effective(self.graph, operator, s.choices[operator.name], s.mesh)
                for s in (stage, there)
            ]
            ends = (choices[0].config, stage.mesh), (choices[1].config, there.mesh)
            if not self._parts.are_alike(operator, *ends):
                total += math.prod(shape_of(operator.outputs[0].layout, operator.sizes))
        return total


def _weight_ways(operator: Operator, stage: Stage) -> int:
    """Into how many parts a choice cuts the parameters of an operator."""
    own = {name for weight in operator.weights for name in factors(weight.layout)}
    config = stage.choices[operator.name].config
    return math.prod(
        size
        for p, size in zip(config, stage.mesh.shape, strict=True)
        if isinstance(p, Shard) and p.dim in own
    )


def _expert_ways(graph: OperatorGraph, choices: Choices, shape: tuple[int, ...]) -> int:
    for name, dim in expert_dims(graph).items():
        return math.prod(splits_of(choices[name].config, dim, shape))
    return 1


def _steps(degree: int, other: int) -> float:
    """How far two degrees are apart: doublings."""
    return abs(math.log2(degree / other))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
