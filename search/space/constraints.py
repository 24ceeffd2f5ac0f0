"""What a user asks of a plan, and the search must honour."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, TypeVar

from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.logical_dims import logical_dims
from stratagem.searcher.space.skeletons import (
    ZERO_STAGES,
    Options,
    Skeleton,
    followed_policy,
    recomputed_by,
    skeleton_of,
)
from stratagem.searcher.space.strategies import warn_of_whole
from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.saved_values import differing, in_words, shown
from stratagem.simulator.graph.checkpoint_segments import check_policy
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Config, Pin, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.hardware.headroom import MEASURED, Headroom, headroom_of
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice, TriedOptions
from stratagem.simulator.sharding.choice_options import tries_of
from stratagem.simulator.sharding.parameter_homes import zero_stages_of
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.simulation.simulation import Simulation

AXES = ("node", "device", "outer", "inner", "data", "tensor")
"""What the meshes of the search call their axes (see `Constraints`)."""


T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition of one's own, for `Constraints.rules`.

    Example:
        >>> Rule("no ZeRO for norms", choices=lambda op, c, mesh: op.kind != "norm" or c.zero == 0)
        Rule(name='no ZeRO for norms')

    Attributes:
        name: what it says, in a few words. A search goes on from a checkpoint of rules with the
            same names.
        choices: whether an operator may have a choice on a mesh.
        skeletons: whether plans on a skeleton may be tried.

    Raises:
        ValueError: it has no name, or neither of the two.
    """

    name: str
    choices: Callable[[Operator, Choice, DeviceMesh], bool] | None = field(
        default=None, repr=False
    )
    skeletons: Callable[[Skeleton], bool] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a rule without a name: say in a few words what it allows")
        if self.choices is None and self.skeletons is None:
            raise ValueError(f"rule {self.name!r} says nothing; give it choices or skeletons")


_LISTED = ("zero_stages", "microbatches", "schedules", "recompute")
"""Conditions that one value may be given for, or several; none would allow no plan."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Conditions on every plan that a search may return.

    Example:
        >>> Constraints(max_tensor=4, zero_stages=(0, 1), forbid=(("vocab", "node"),)).max_tensor
        4

    The axis ``node`` is every axis of a mesh along which devices of several nodes lie, ``device``
    every one along which several of one node do, whatever the mesh calls it; an axis of all
    devices is both. Other axes are named as the meshes of the search name them: a node may be cut
    into ``outer`` and ``inner``, all devices into ``data`` and ``tensor``. Dims are logical dims
    (`literature.logical_dims`, such as ``batch``, ``heads``, ``vocab``) or dims of operators
    (``out``). Of ZeRO stages, microbatches, schedules and policies one alone stands for itself,
    and a list for a tuple.

    Attributes:
        pin: configs by operator, or by a pattern such as ``layers.*.attention``: those operators
            must have exactly these placements. Such a search only tries meshes with as many axes,
            and leaves out rewritten graphs that lack one of those operators.
        forbid: (dim, axis) pairs: the dim may not be sharded along the axis.
        require: (dim, axis) pairs: whatever can be sharded along the dim must be, on that axis or
            one of them, on every mesh that has the axis.
        pipeline: number of pipeline ranks; `max_pipeline` the most.
        tensor: into how many parts dims other than the samples cut an operator, at the most of
            all operators; `max_tensor` the most. Experts count.
        zero_stages: ZeRO stages that parameters may have, of 0, 1, 2 and 3.
        microbatches: numbers of microbatches that may be tried.
        schedules: that pipelines may have, one or several of ``"1f1b"``, ``"gpipe"``,
            ``"interleaved"`` and ``"zb-h1"``; with ``"terapipe"``, ``"chimera"`` or ``"dualpipe"``
            beside these the best pipelines are tried with sliced tokens, or in two directions (see
            `Form`).
            When left out 1F1B is searched, and baselines may have others; a forward pass has
            ``"gpipe"`` only.
        recompute: policies (see `checkpoint_segments`) of which every stage must follow one to the
            letter. When left out all are tried, and operators may be recomputed beside them.
        headroom: what of each device's memory must stay free: a share, a `Headroom`, or
            ``"measured"``, as it is unless told: what measured runs lacked beside what was
            predicted (see `simulator.hardware.headroom`). 0 lets plans fill the memory.
        rules: conditions of one's own (see `Rule`).

    Raises:
        ValueError: a degree below 1, both a fixed degree and a limit under it, a pair that is both
            forbidden and required, a headroom outside [0, 1), two rules with one name, a ZeRO
            stage or policy that there is not, or an empty list.
    """

    pin: Mapping[str, Config] = field(default_factory=dict)
    forbid: tuple[tuple[str, str], ...] = ()
    require: tuple[tuple[str, str], ...] = ()
    pipeline: int | None = None
    max_pipeline: int | None = None
    tensor: int | None = None
    max_tensor: int | None = None
    zero_stages: tuple[int, ...] | None = None
    microbatches: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    recompute: tuple[str, ...] | None = None
    headroom: float | str | Headroom = MEASURED
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for name in _LISTED:
            if isinstance(alone := getattr(self, name), int | str):
                object.__setattr__(self, name, (alone,))
        check_fields(self, type(self).__name__.lower())
        for name in _LISTED:
            if getattr(self, name) == ():
                raise ValueError(f"constraints: {name} allows nothing; name at least one")
        if min(self.microbatches or (1,)) < 1:
            raise ValueError(
                f"constraints: microbatches are {self.microbatches}; each must be 1 or more"
            )
        for name in ("pipeline", "max_pipeline", "tensor", "max_tensor"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"constraints: {name} is {value}; it must be 1 or more")
        for name in ("pipeline", "tensor"):
            fixed, most = getattr(self, name), getattr(self, f"max_{name}")
            if fixed is not None and most is not None and fixed > most:
                raise ValueError(
                    f"constraints: {name} is {fixed}, but max_{name} is {most}; drop one of them"
                )
        for pair in self.forbid:
            if pair in self.require:
                raise ValueError(
                    f"constraints: both forbid and require name {pair[0]!r} on {pair[1]!r}; drop "
                    "it in one of them"
                )
        if isinstance(self.headroom, str) and self.headroom != MEASURED:
            raise ValueError(
                f"constraints: headroom is {self.headroom!r}; give a share of the memory, from 0 "
                f"to below 1, or {MEASURED!r}"
            )
        if not isinstance(self.headroom, str | Headroom) and not 0 <= self.headroom < 1:
            raise ValueError(
                f"constraints: headroom is {self.headroom}; it is a share of the memory, from 0 "
                "to below 1"
            )
        names = [rule.name for rule in self.rules]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"constraints: {len(twice)} rules are called {twice[0]!r}; give each a "
                "name of its own"
            )
        if unknown_stages := set(self.zero_stages or ()) - set(ZERO_STAGES):
            raise ValueError(
                f"constraints: zero_stages are {self.zero_stages}, of which there is no "
                f"{min(unknown_stages)}: name some of 0, 1, 2 and 3"
            )
        for policy in self.recompute or ():
            check_policy(policy)

    def room(self, cluster: Cluster) -> Headroom:
        """What of each device's memory of a cluster must stay free.

        Example:
            >>> Constraints().room(Cluster.preset("dgx-a100", num_nodes=1))
            Headroom(share=0.11, fixed_bytes=2441084928)
        """
        return headroom_of(self.headroom, cluster)

    def describe(self) -> str:
        """Those that are set: ``pipeline=7, zero_stages=(0,)``."""
        return in_words(differing(self)) or "(none)"

    def bind(self, graph: OperatorGraph) -> BoundConstraints:
        """The constraints with the names of a model looked up.

        Raises:
            ValueError: an operator pattern or a dim that the model lacks; it names what is near. A
                number of microbatches that the batch cannot be cut into.
        """
        return BoundConstraints(self, graph)

    def check_axes(self, others: Iterable[str] = ()) -> None:
        """Refuse pairs with an axis that no mesh has.

        Args:
            others: axes that a plan to start from has beside those of the search.

        Raises:
            ValueError: names the axis, and what is near.
        """
        known = [*AXES, *(axis for axis in others if axis not in AXES)]
        for what, pairs in (("forbid", self.forbid), ("require", self.require)):
            for dim, axis in pairs:
                if axis not in known:
                    raise unknown(
                        f"axis to {what} for dim {dim!r} called", axis, known, where="constraints"
                    )

    def check_degrees(self, graph: OperatorGraph, num_devices: int) -> None:
        """Refuse degrees that do nothing on so many devices.

        Warns:
            LeftWhole: tensor parallelism of `tensor` ways does not reach some operators.

        Raises:
            ValueError: ZeRO is asked for where a stage has one device.
        """
        ranks = self.pipeline or 1
        if self.zero_stages is not None and 0 not in self.zero_stages and num_devices <= ranks:
            raise ValueError(
                f"constraints: zero_stages is {self.zero_stages}, but {num_devices} devices in "
                f"{ranks} pipeline ranks leave nothing to shard over; allow stage 0 or take more "
                "devices"
            )
        if self.tensor is not None:
            warn_of_whole(graph, self.tensor)


@dataclass(frozen=True, kw_only=True)
class Space(TriedOptions, Constraints):
    """What a search may do, and what its plans must meet.

    Example:
        >>> Space(schedules="zb-h1", max_tensor=4, chunks=(1, 4), zero_stages=[0, 1])
        Space(max_tensor=4, zero_stages=(0, 1), schedules=('zb-h1',), chunks=(1, 4))

    Conditions on plans are said as in `Constraints`, and which options of choices are tried as in
    `TriedOptions`; what the plan to start from does is tried, too, unless told otherwise.

    Attributes:
        regather: as in `TriedOptions`, and tried unless told otherwise: Megatron-LM's sequence
            parallelism needs it, and it costs nothing but where memory is short.
        bucket_bytes: gradients are reduced in buckets of at least so many bytes, unsharded; by
            operator for 0. When left out, as the plan to start from has it, without one as the
            fastest baseline does.
        inputs_first: gradients of weights run beside the conversion of those of inputs (see
            `Plan`); likewise.
        place: whether operators of the best plans are tried on parts of their meshes, where those
            on other parts run at the same time (see `Pin`).
        start_options: whether options of choices that the plan to start from has are tried, too,
            said or not.
        rewrites: how many graphs are searched as well that compute the same, those that algebraic
            substitutions make best of (see `graph_rewrites`); evaluations and seconds of the
            budget are shared.

    Raises:
        ValueError: what `Constraints` and `Options` refuse, or a negative number of rewrites.
    """

    regather: bool = True
    bucket_bytes: int | None = None
    inputs_first: bool | None = None
    place: bool = False
    start_options: bool = True
    rewrites: int = 0

    def __post_init__(self) -> None:
        Constraints.__post_init__(self)
        self.options()
        if self.rewrites < 0:
            raise ValueError(f"rewrites is {self.rewrites}; search 0 or more rewritten graphs")

    def options(self, start: Plan | None = None) -> Options:
        """What is tried beside configs and ZeRO stages, with what a plan to start from does.

        Example:
            >>> Space(fuse=True).options() == Options(fuse=True)
            True
        """
        said = {each.name: getattr(self, each.name) for each in fields(TriedOptions)}
        like = start if self.start_options else None
        does = {} if like is None else tries_of(choices_of(like).values())
        alike = (StepOptions() if like is None else like).as_options
        return Options(
            **{name: _either(given, does.get(name, given)) for name, given in said.items()},
            **{name: _said(getattr(self, name), usual) for name, usual in alike.items()},
            place=self.place or (start is not None and start.has_pins),
        )

    __repr__ = shown


_Condition = Callable[[Operator, Choice, DeviceMesh, Cluster], bool]


class BoundConstraints:
    """Constraints on plans for one model."""

    def __init__(self, constraints: Constraints, graph: OperatorGraph) -> None:
        self.constraints = constraints
        for parts in constraints.microbatches or ():
            graph.microbatch(parts)
        names = [op.name for op in graph.operators]
        self._pins: dict[str, Config] = {}
        for pattern, config in constraints.pin.items():
            matched = fnmatch.filter(names, pattern)
            if not matched:
                raise unknown(f"operator of {graph.name!r} to constrain called", pattern, names)
            for name in matched:
                _check_dims(graph.operator(name), config)
            self._pins.update(dict.fromkeys(matched, config))
        self._forbid = _by_operator(constraints.forbid, graph)
        self._require = _by_operator(constraints.require, graph)
        self._graph = graph
        rules = constraints.rules
        self._choice_rules = [rule.choices for rule in rules if rule.choices is not None]
        self._skeleton_rules = [rule.skeletons for rule in rules if rule.skeletons is not None]

    def lost_in(self, graph: OperatorGraph) -> str:
        """Why the constraints cannot be held on a graph made from this one; empty if they can."""
        lost = [name for name in self._pins if name not in graph.index]
        if lost:
            return f"{lost[0]!r} is pinned, which they merge with others or split"
        try:
            self.constraints.bind(graph)
        except ValueError as error:
            return str(error)
        return ""

    @cached_property
    def _conditions(self) -> tuple[_Condition, ...]:
        """What every choice must meet: one for each constraint on choices that is given."""
        c = self.constraints
        given: tuple[tuple[_Condition, bool], ...] = (
            (self._is_pinned_so, bool(self._pins)),
            (self._is_on_no_forbidden, bool(self._forbid)),
            (self._is_on_required, bool(self._require)),
            (self._has_zero_stage, c.zero_stages is not None),
            (self._has_few_tensor_ways, (c.tensor or c.max_tensor) is not None),
            (self._meets_rules, bool(self._choice_rules)),
        )
        return tuple(condition for condition, is_given in given if is_given)

    @property
    def allows_all(self) -> bool:
        """Whether every operator may have every choice."""
        return not self._conditions

    def allows(
        self, operator: Operator, choice: Choice, mesh: DeviceMesh, cluster: Cluster
    ) -> bool:
        """Whether an operator may have a choice on a mesh of a cluster."""
        return all(meets(operator, choice, mesh, cluster) for meets in self._conditions)

    def _is_pinned_so(self, operator: Operator, choice: Choice, *_: object) -> bool:
        pinned = self._pins.get(operator.name)
        return pinned is None or choice.config == pinned

    def _is_on_no_forbidden(
        self, operator: Operator, choice: Choice, mesh: DeviceMesh, cluster: Cluster
    ) -> bool:
        return not any(
            choice.config[k] == Shard(dim)
            for dim, axis in self._forbid.get(operator.name, ())
            for k in _axes_called(axis, mesh, cluster.devices_per_node)
        )

    def _is_on_required(
        self, operator: Operator, choice: Choice, mesh: DeviceMesh, cluster: Cluster
    ) -> bool:
        for dim, axis in self._require.get(operator.name, ()):
            axes = _axes_called(axis, mesh, cluster.devices_per_node)
            if axes and all(choice.config[k] != Shard(dim) for k in axes):
                return False
        return True

    def _has_zero_stage(
        self, operator: Operator, choice: Choice, mesh: DeviceMesh, _: Cluster
    ) -> bool:
        stages = self.constraints.zero_stages or ()
        return choice.zero in stages or choice.zero in zero_stages_of(
            self._graph, operator, choice.config, mesh.shape, stages
        )

    def _has_few_tensor_ways(
        self, operator: Operator, choice: Choice, mesh: DeviceMesh, _: Cluster
    ) -> bool:
        most = self.constraints.tensor or self.constraints.max_tensor
        return most is None or tensor_ways(operator, choice.config, mesh.shape) <= most

    def _meets_rules(
        self, operator: Operator, choice: Choice, mesh: DeviceMesh, _: Cluster
    ) -> bool:
        return all(rule(operator, choice, mesh) for rule in self._choice_rules)

    def allows_skeleton(self, skeleton: Skeleton) -> bool:
        """Whether plans on a skeleton may be tried."""
        c = self.constraints
        widths = {len(config) for config in self._pins.values()}
        ranks = skeleton.num_ranks
        return (
            (c.pipeline is None or ranks == c.pipeline)
            and (c.max_pipeline is None or ranks <= c.max_pipeline)
            and (c.microbatches is None or skeleton.num_microbatches in c.microbatches)
            and (c.schedules is None or ranks == 1 or skeleton.schedule in c.schedules)
            and (c.tensor is None or any(_has(mesh.shape, c.tensor) for mesh in skeleton.meshes))
            and (not widths or all({len(mesh.axes)} == widths for mesh in skeleton.meshes))
            and all(rule(skeleton) for rule in self._skeleton_rules)
        )

    def allows_whole(self, plan: Plan) -> bool:
        """Whether a plan meets what no operator's choice does alone: tensor ways that one has."""
        wanted = self.constraints.tensor
        return wanted is None or most_tensor_ways(plan, self._graph) == wanted

    @cached_property
    def _recomputed(self) -> dict[str, frozenset[str]]:
        """What is recomputed under each of the policies that are named."""
        return recomputed_by(self._graph, self.constraints.recompute or ())

    def violations(self, simulation: Simulation) -> list[str]:
        """In words, what a simulated plan does that the constraints do not allow."""
        room = self.constraints.room(simulation.plan.cluster)
        return self.breaks(simulation) + [
            f"rank {r} holds {rank.peak} of {rank.capacity} bytes; {room} must stay free"
            for r, rank in enumerate(simulation.memory)
            if room and rank.peak > room.usable(rank.capacity)
        ]

    def without_room(self, simulation: Simulation) -> Simulation | None:
        """A plan that leaves too little memory free, under the capacity it may use; else None."""
        room = self.constraints.room(simulation.plan.cluster)
        if not room or all(m.peak <= room.usable(m.capacity) for m in simulation.memory):
            return None
        memory = (replace(m, capacity=room.usable(m.capacity)) for m in simulation.memory)
        return replace(simulation, memory=tuple(memory))

    def breaks(self, simulation: Simulation) -> list[str]:
        """The same of all constraints but the memory that must stay free."""
        plan, found = simulation.plan, []
        if plan.substitutions or plan.fingerprint != self._graph.fingerprint:
            graph = plan.rewrite(self._graph).graph
            lost = self.lost_in(graph)
            if lost:
                return [f"{lost}, in a plan for a rewritten graph"]
            same = replace(simulation, plan=replace(plan, substitutions=()))
            return BoundConstraints(self.constraints, graph).breaks(same)
        c = self.constraints
        if not self.allows_skeleton(skeleton_of(plan)):
            found.append(
                f"{plan.num_ranks} ranks, {plan.num_microbatches} microbatches, {plan.schedule}"
            )
        for stage in () if self.allows_all else plan.stages:
            for name, choice in stage.choices.items():
                operator = self._graph.operator(name)
                if not self.allows(operator, choice, stage.mesh, plan.cluster):
                    found.append(f"{name} has {choice} on a mesh of {stage.mesh.shape}")
        if not self.allows_whole(plan):
            found.append(f"tensor ways are {most_tensor_ways(plan, self._graph)}")
        for s, stage in enumerate(() if c.recompute is None else plan.stages):
            if followed_policy(stage, self._recomputed) is None:
                found.append(
                    f"stage {s} follows no recompute policy of {', '.join(self._recomputed)}"
                )
        return found


def _said(given: T | None, usual: T) -> T:
    return usual if given is None else given


def _either(said: Any, does: Any) -> Any:
    """What either of two tries: numbers of both, or whether one says so."""
    return tuple(sorted({*said, *does})) if isinstance(said, tuple) else said or does


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(repr, values))


@cache
def _axes_called(name: str, mesh: DeviceMesh, per_node: int) -> tuple[int, ...]:
    """The axes of more than one device that a name means, by where their devices lie."""

    def is_meant(axis: int) -> bool:
        groups = [[device // per_node for device in group] for group in mesh.groups(axis)]
        if name == "node":
            return any(len(set(nodes)) > 1 for nodes in groups)
        if name == "device":
            return any(len(set(nodes)) < len(nodes) for nodes in groups)
        return mesh.axes[axis].name == name

    return tuple(k for k, ways in enumerate(mesh.shape) if ways > 1 and is_meant(k))


def tensor_ways(operator: Operator, config: Config, shape: tuple[int, ...]) -> int:
    """Into how many parts dims other than the samples cut an operator."""
    total = 1
    for placement, ways in zip(config, shape, strict=True):
        if isinstance(placement, Shard):
            is_sample = operator.dim(str(placement.dim)).kind is DimKind.SAMPLE
            total *= 1 if is_sample else ways
        elif isinstance(placement, Pin):
            total *= ways
    return total


def _has(shape: Sequence[int], ways: int) -> bool:
    """Whether some axes of a mesh are so many ways together.

    Example:
        >>> _has((2, 4), 4), _has((8,), 4)
        (True, False)
    """
    products = {1}
    for size in shape:
        products |= {size * product for product in products}
    return ways in products


def most_tensor_ways(plan: Plan, graph: OperatorGraph) -> int:
    """The most tensor ways of all operators of a plan."""
    return max(
        tensor_ways(graph.operator(name), choice.config, stage.mesh.shape)
        for stage in plan.stages
        for name, choice in stage.choices.items()
    )


def _check_dims(operator: Operator, config: Config) -> None:
    """Refuse a pinned config with a dim that the operator lacks."""
    for placement in config:
        if isinstance(placement, Shard) and placement.dim not in operator.sizes:
            raise unknown(
                "dim", str(placement.dim), operator.sizes, where=f"pin of {operator.name!r}"
            )


def _by_operator(
    pairs: tuple[tuple[str, str], ...], graph: OperatorGraph
) -> dict[str, list[tuple[str, str]]]:
    """Per operator the (dim, axis) pairs of its own dims."""
    found: dict[str, list[tuple[str, str]]] = {}
    if not pairs:
        return found
    logical = logical_dims(graph)
    for name, axis in pairs:
        splits = dict(logical[name].split) if name in logical else {}
        if not splits:
            splits = {
                op.name: dim.name
                for op in graph.operators
                for dim in op.dims
                if dim.name == name and not dim.whole
            }
        if not splits:
            known = sorted({*logical, *(d.name for op in graph.operators for d in op.dims)})
            raise unknown(f"dim of {graph.name!r} that can be sharded called", name, known)
        for operator, dim in splits.items():
            found.setdefault(operator, []).append((dim, axis))
    return found
