"""The plan: all that must be known to run a model on a cluster, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import msgspec

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.graph.image_splits import split_images
from stratagem.simulator.graph.local_statistics import local_statistics
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, check_config, parse_placement
from stratagem.simulator.graph.substitutions import Rewritten, Substituted, rewrite
from stratagem.simulator.graph.token_slices import Slices, check_slices, num_slices
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.mirrored_stages import check_homes, check_pins
from stratagem.simulator.schedules.actions import Schedule, validate
from stratagem.simulator.schedules.named_schedules import (
    REMEMBERED_SCHEDULES,
    schedule_by_name,
)
from stratagem.simulator.sharding.choice import USUAL_VALUES, Choice
from stratagem.simulator.sharding.choice_options import check_choice, options_of
from stratagem.simulator.sharding.step_options import StepOptions

PLAN_FORM = FileForm(version=2, remedy="search again")
CUSTOM = "custom"
"""Name of a schedule whose orders the plan itself lists."""


MOST_MICROBATCHES = 2**14
"""Of a plan; its batch is at least as large."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive operators, the devices they run on, and a choice for each."""

    operators: tuple[str, ...]
    mesh: DeviceMesh
    choices: Mapping[str, Choice]


@dataclass(frozen=True)
class Prediction:
    """What the search expected: seconds per step, peak bytes per device of each stage."""

    step_time: float
    peak_memory: tuple[int, ...]
    fits: bool


@dataclass(frozen=True)
class Plan(SavedValue, StepOptions):
    """Stages, their meshes and choices, the schedule: everything the executor needs.

    Stages on the same devices are on one rank; ranks are numbered as the stages bring them up.

    What all stages do alike are its `StepOptions`: `bucket_bytes`, `inputs_first`.

    Attributes:
        schedule: a name in `SCHEDULES`, or ``custom``.
        token_slices: parts into which the tokens of a microbatch are cut (TeraPipe): how many
            equal ones, or the length of each.
        orders: of a custom schedule, one line a rank, such as ``rank 0: 0F0 0B0``.
        substitutions: what was rewritten in the model's graph before it was planned; operators
            and `fingerprint` are those of the rewritten graph.

    Raises:
        ValueError: when stages share some of their devices, a device is not in the cluster, or
            the schedule is unknown, invalid or not for these stages and ranks.
    """

    FILE: ClassVar[str] = "plan file"

    name: str
    model: str
    fingerprint: str
    cluster: Cluster
    training: Training
    stages: tuple[Stage, ...]
    num_microbatches: int = 1
    schedule: str = "1f1b"
    seed: int = 0
    prediction: Prediction | None = None
    token_slices: Slices = 1
    orders: tuple[str, ...] = ()
    substitutions: tuple[Substituted, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f"plan {self.name!r}")
        self.check_step_options(f"plan {self.name!r}: ")
        if not self.stages:
            raise ValueError(f"plan {self.name!r} has no stages")
        if self.num_microbatches > MOST_MICROBATCHES:
            raise ValueError(
                f"plan {self.name!r}: num_microbatches is {self.num_microbatches}; at most "
                f"{MOST_MICROBATCHES:,} can be played, and they must divide the batch"
            )
        self._check_devices()
        self._check_ranks()
        if self.is_mirrored:
            self._check_mirrored()

    def __repr__(self) -> str:
        return (
            f"<Plan {self.name!r}: num_stages={len(self.stages)}, num_devices={self.num_devices}, "
            f"num_microbatches={self.num_microbatches}, schedule={self.schedule!r}>"
        )

    @property
    def is_mirrored(self) -> bool:
        """Whether stages have a second home each, in a pipeline the other way round (Chimera)."""
        return self._made_schedule.is_mirrored

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages are updated amid the step, by gradients of older weights (PipeDream)."""
        return self._made_schedule.update_every is not None

    def mirrored(self) -> Plan:
        """The pipeline the other way round: each stage on the mesh of its mirror image."""
        meshes = [stage.mesh for stage in reversed(self.stages)]
        stages = zip(self.stages, meshes, strict=True)
        return replace(self, stages=tuple(replace(s, mesh=mesh) for s, mesh in stages))

    def homes(self, stage: int) -> tuple[DeviceMesh, ...]:
        """The meshes that have a stage: its own, and in a mirrored plan that of its image."""
        own = self.stages[stage].mesh
        return (own, self.stages[-1 - stage].mesh) if self.is_mirrored else (own,)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage: stages on the same devices share one."""
        ranks: dict[frozenset[int], int] = {}
        return tuple(
            ranks.setdefault(frozenset(stage.mesh.devices), len(ranks)) for stage in self.stages
        )

    @property
    def num_ranks(self) -> int:
        """Number of different sets of devices that stages run on."""
        return max(self.rank_of) + 1

    def group(self, stage: int) -> str:
        """What the lanes of a stage's devices are called: by stage, or by rank if those differ."""
        alone = self.num_ranks == len(self.stages) and not self.is_mirrored
        return f"stage {stage}" if alone else f"rank {self.rank_of[stage]}"

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The stage of each operator, by name."""
        return {name: s for s, stage in enumerate(self.stages) for name in stage.operators}

    @cached_property
    def devices(self) -> frozenset[int]:
        """The devices that the plan uses."""
        return frozenset(device for stage in self.stages for device in stage.mesh.devices)

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes on which these are."""
        return frozenset(map(self.cluster.node_of, self.devices))

    @property
    def num_devices(self) -> int:
        """Number of devices that the plan uses."""
        return len(self.devices)

    @cached_property
    def device_types(self) -> tuple[DeviceType, ...]:
        """The distinct types of the devices that the plan uses."""
        found = (kind for stage in self.stages for kind in stage.mesh.device_types(self.cluster))
        return tuple({kind.name: kind for kind in found}.values())

    def choice(self, operator: str) -> Choice:
        """The choice for an operator."""
        return self.stages[self.stage_of[operator]].choices[operator]

    def make_schedule(self) -> Schedule:
        """The schedule's actions for this plan's stages, ranks and microbatches."""
        return self._made_schedule

    @property
    def has_own_orders(self) -> bool:
        """Whether the schedule is what `orders` list, and has no record."""
        return self.schedule == CUSTOM

    @cached_property
    def has_pins(self) -> bool:
        """Whether some operator is pinned to a part of its stage's mesh."""
        choices = (choice for stage in self.stages for choice in stage.choices.values())
        return any(choice.is_pinned for choice in choices)

    @property
    def streamed(self) -> tuple[str, ...]:
        """The operators whose pieces are streamed (see `Choice`), stage by stage."""
        return tuple(n for stage in self.stages for n, c in stage.choices.items() if c.streamed)

    @property
    def in_sums(self) -> tuple[str, ...]:
        """The operators that run inside sums (see `Choice`), stage by stage."""
        return tuple(n for stage in self.stages for n, c in stage.choices.items() if c.in_sum)

    @cached_property
    def _made_schedule(self) -> Schedule:
        if self.has_own_orders:
            return self._custom_schedule()
        if self.orders:
            raise ValueError(
                f"plan {self.name!r} lists orders of its own, but its schedule is "
                f"{self.schedule!r}: call the schedule {CUSTOM!r}, or leave the orders out"
            )
        return schedule_by_name(
            self.schedule,
            len(self.stages),
            self.num_microbatches,
            num_ranks=self.num_ranks,
            num_slices=num_slices(self.token_slices),
        )

    def rewrite(self, graph: OperatorGraph) -> Rewritten:
        """What the plan's substitutions make of a model's graph, which is what the plan runs.

        A graph that has been rewritten stays as it is; a plan for split images splits them, one
        for local statistics makes them local.

        Raises:
            ValueError: a substitution does not fit `graph`.
        """
        if self.fingerprint == graph.fingerprint:
            return Rewritten(graph)
        split = split_images(graph)
        for known in (split, local_statistics(graph), local_statistics(split)):
            if known.fingerprint == self.fingerprint:
                return Rewritten(known)
        if not self.substitutions:
            return Rewritten(graph)
        try:
            return rewrite(graph, self.substitutions)
        except ValueError as error:
            raise ValueError(
                f"plan {self.name!r} was made for model {self.model!r} with "
                f"{len(self.substitutions)} substitutions, one of which does not fit: {error}"
            ) from error

    def on(self, graph: OperatorGraph) -> OperatorGraph:
        """What the plan runs of a model: its graph, rewritten as the plan says, and checked.

        Raises:
            ValueError: the plan is not for `graph` (see `rewrite` and `check`).
        """
        rewritten = self.rewrite(graph).graph
        self.check(rewritten)
        return rewritten

    def check(self, graph: OperatorGraph) -> None:
        """Refuse a plan that is not for `graph`, rewritten by its substitutions if it has some.

        Raises:
            ValueError: another model's plan; an operator that no stage or that two stages run, or
                that runs before what it reads; a config that its operator cannot have; a batch
                that the microbatches do not divide; token slices of a model that cannot be cut
                into them (see `token_slices`), or of operators sharded along positions.
        """
        if self.fingerprint != graph.fingerprint:
            raise ValueError(
                f"plan {self.name!r} was made for model {self.model!r} (fingerprint "
                f"{self.fingerprint[:12]}), not for {graph.name!r} ({graph.fingerprint[:12]}); "
                f"search again for this model, batch and sequence length"
            )
        self._check_stages(graph)
        if graph.is_forward:
            self._check_forward(graph)
        for operator in graph.microbatch(self.num_microbatches).operators:
            stage = self.stages[self.stage_of[operator.name]]
            choice = stage.choices[operator.name]
            config = choice.config
            check_config(operator, config, stage.mesh.shape)
            check_choice(operator, choice, stage.mesh.shape)
            if choice.fused and self.is_mirrored and operator.weights:
                raise ValueError(
                    f"plan {self.name!r} fuses the update of operator {operator.name!r} with "
                    f"its gradient sync, but under {self.schedule} the sum over both homes "
                    "comes between them: choose fused=False there"
                )
            if operator.is_source and any(p != REPLICATE for p in config):
                raise ValueError(
                    f"source {operator.name!r} must be replicated: every rank computes it in full"
                )
        if self.token_slices != 1:
            configs = {name: self.choice(name).config for name in graph.names}
            check_slices(graph, self.token_slices, configs)

    def _custom_schedule(self) -> Schedule:
        return own_schedule(
            self.orders,
            len(self.stages),
            self.num_microbatches,
            self.num_ranks,
            num_slices(self.token_slices),
            where=f"plan {self.name!r}",
        )

    def _check_devices(self) -> None:
        owner: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            stage.mesh.check(self.cluster)
            for device in stage.mesh.devices:
                first = owner.setdefault(device, number)
                if self.rank_of[first] != self.rank_of[number]:
                    raise ValueError(
                        f"plan {self.name!r}: device {device} is in stage {first} and in stage "
                        f"{number}, whose other devices differ; stages share all of their devices "
                        "or none"
                    )

    def _check_ranks(self) -> None:
        schedule = self.make_schedule()
        for stage, rank in enumerate(self.rank_of):
            if rank not in schedule.ranks_of(stage):
                places = " and ".join(map(str, schedule.ranks_of(stage)))
                raise ValueError(
                    f"plan {self.name!r}: stage {stage} is on the devices of rank {rank}, but "
                    f"schedule {self.schedule!r} places it on rank {places}"
                )

    def _check_mirrored(self) -> None:
        where = f"plan {self.name!r}, schedule {self.schedule!r}"
        check_homes(where, [stage.mesh for stage in self.stages], self.make_schedule())
        for stage in self.stages:
            check_pins(where, {n: choice.config for n, choice in stage.choices.items()})

    def _check_forward(self, graph: OperatorGraph) -> None:
        """A forward pass keeps its results until all microbatches are through, tokens whole."""
        where = f"plan {self.name!r} of the forward pass {graph.name!r}"
        if num_slices(self.token_slices) > 1:
            raise ValueError(
                f"{where} has {num_slices(self.token_slices)} token slices, whose results nothing "
                "puts together; choose 1"
            )
        schedule = self.make_schedule()
        if not schedule.runs_ahead or schedule.update_every is not None:
            raise ValueError(
                f"{where} has schedule {self.schedule!r} of {self.num_microbatches} microbatches, "
                "which waits for backward passes that are not there; choose 'gpipe'"
            )

    def _check_stages(self, graph: OperatorGraph) -> None:
        listed = [name for stage in self.stages for name in stage.operators]
        if len(set(listed)) != len(listed):
            twice = next(name for name in listed if listed.count(name) > 1)
            raise ValueError(f"plan {self.name!r} runs operator {twice!r} in two stages")
        for operator in graph.operators:
            if operator.name not in self.stage_of:
                raise ValueError(f"plan {self.name!r} has no stage for operator {operator.name!r}")
            if operator.name not in self.stages[self.stage_of[operator.name]].choices:
                raise ValueError(
                    f"plan {self.name!r} has no choice for operator {operator.name!r}"
                )
            for read in operator.inputs:
                if graph.operator(read.source).is_source:
                    continue
                if self.stage_of[read.source] > self.stage_of[operator.name]:
                    raise ValueError(
                        f"plan {self.name!r}: operator {operator.name!r} in stage "
                        f"{self.stage_of[operator.name]} reads {read.source!r} of the later stage "
                        f"{self.stage_of[read.source]}"
                    )

    def to_json(self) -> str:
        """The text of the plan file; equal plans have equal text."""
        return encode(_to_file(self))

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> Plan:
        """Read the text of a plan file.

        Where its training does not say which loss runs, that was priced as `Training.eager_loss`
        has it, and its prediction and certificate hold of that.
        """
        what = what or "plan"
        file = PLAN_FORM.read(text, _PlanFile, what)
        with reading(what):
            plan = _from_file(file)
            if not plan.training.fused_loss and not _says_which_loss(text):
                plan = replace(plan, training=replace(plan.training, eager_loss=True))
            plan.cluster.check_figures("its cluster")
        return plan


_ChoiceFile = make_dataclass(
    "_ChoiceFile",
    [
        ("config", tuple[str, ...]),
        *((name, type(usual), usual) for name, usual in USUAL_VALUES.items()),
    ],
    frozen=True,
)
"""A choice with placements as they are printed: what options there are is said once."""


@dataclass(frozen=True)
class _StageFile:
    axes: tuple[MeshAxis, ...]
    devices: tuple[int, ...]
    operators: tuple[str, ...]
    choices: dict[str, _ChoiceFile]  # type: ignore[valid-type]


@dataclass(frozen=True)
class _PlanHead:
    version: int
    name: str
    model: str
    fingerprint: str
    cluster: Cluster
    training: Training
    num_microbatches: int
    schedule: str
    stages: tuple[_StageFile, ...]


@dataclass(frozen=True)
class _PlanFile(StepOptions, _PlanHead):
    seed: int = 0
    prediction: Prediction | None = field(default=None)
    token_slices: Slices = 1
    orders: tuple[str, ...] = ()
    substitutions: tuple[Substituted, ...] = ()


_AS_THEY_ARE = tuple(f.name for f in fields(Plan) if f.name != "stages")
"""What a file has of a plan as it is."""

if {f.name for f in fields(_PlanFile)} != {"version", "stages", *_AS_THEY_ARE}:
    raise AssertionError("a plan file has every field of a plan")


@dataclass(frozen=True)
class _TrainingGiven:
    training: dict[str, object]


def _says_which_loss(text: str) -> bool:
    """Whether a plan file was written since trainings have `eager_loss`."""
    return "eager_loss" in msgspec.json.decode(text, type=_TrainingGiven).training


def _to_file(plan: Plan) -> _PlanFile:
    stages = tuple(
        _StageFile(
            axes=stage.mesh.axes,
            devices=stage.mesh.devices,
            operators=stage.operators,
            choices={
                name: _ChoiceFile(tuple(map(str, choice.config)), *options_of(choice))
                for name in stage.operators
                for choice in [stage.choices[name]]
            },
        )
        for stage in plan.stages
    )
    same = {name: getattr(plan, name) for name in _AS_THEY_ARE}
    return _PlanFile(version=PLAN_FORM.version, stages=stages, **same)


def _choice(file: Any) -> Choice:
    return Choice(tuple(map(parse_placement, file.config)), *options_of(file))


def _from_file(file: _PlanFile) -> Plan:
    stages = tuple(
        Stage(
            operators=stage.operators,
            mesh=DeviceMesh(stage.axes, stage.devices),
            choices={name: _choice(choice) for name, choice in stage.choices.items()},
        )
        for stage in file.stages
    )
    return Plan(stages=stages, **{name: getattr(file, name) for name in _AS_THEY_ARE})


def own_schedule(
    orders: tuple[str, ...],
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
    num_slices: int = 1,
    *,
    where: str,
) -> Schedule:
    """The schedule that orders of one's own list, one line a rank.

    Example:
        >>> own_schedule(("rank 0: 0F0 0B0",), 1, 1, 1, where="plan 'mine'").num_stages
        1

    Raises:
        ValueError: they are for other sizes, or no schedule; `where` says whose they are.
    """
    schedule = _parsed(orders)
    for what, ours, theirs in (
        ("stages", num_stages, schedule.num_stages),
        ("microbatches", num_microbatches, schedule.num_microbatches),
        ("ranks", num_ranks, schedule.num_ranks),
        ("token slices", num_slices, schedule.num_slices),
    ):
        if ours != theirs:
            raise ValueError(
                f"{where} has {ours} {what}, but its orders are for {theirs}: change one of them"
            )
    return _validated(orders)


@lru_cache(maxsize=REMEMBERED_SCHEDULES)
def _parsed(orders: tuple[str, ...]) -> Schedule:
    """Remembered, as each plan of a search on its orders has the same."""
    return Schedule.parse("\n".join(orders), name=CUSTOM)


@lru_cache(maxsize=REMEMBERED_SCHEDULES)
def _validated(orders: tuple[str, ...]) -> Schedule:
    validate(_parsed(orders))
    return _parsed(orders)


def ranks_of(plan: Plan) -> dict[int, int]:
    """Ranks count the devices that a plan uses in ascending order."""
    return {device: rank for rank, device in enumerate(sorted(plan.devices))}
