"""What the file of a search keeps of its space, its front and how its best plan fell."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from stratagem.searcher.driver.incumbent import FrontPoint, TracePoint
from stratagem.searcher.improvement.outcomes import Fate, SkeletonRecord
from stratagem.searcher.robustness.erring_prices import PriceGroup
from stratagem.searcher.robustness.robust_choice import Robustness
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.base.numbers_in_json import packed, unpacked
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.plan.plan import Plan

T = TypeVar("T")

KeptSeconds = float | Literal["infinite"]
"""Seconds that may be infinite, for which JSON has no number."""


def kept_seconds(seconds: float) -> KeptSeconds:
    """Seconds for a file."""
    return "infinite" if math.isinf(seconds) else seconds


def read_seconds(kept: KeptSeconds) -> float:
    """The seconds that were kept."""
    return math.inf if kept == "infinite" else kept


@dataclass(frozen=True)
class KeptMesh:
    """A mesh: its axes, and its devices packed."""

    axes: tuple[tuple[str, int], ...]
    devices: str


@dataclass(frozen=True)
class KeptRecord:
    """A `SkeletonRecord`; stages and meshes are indices into those of `KeptSpace`."""

    stages: tuple[int, ...]
    meshes: tuple[int, ...]
    num_microbatches: int
    schedule: str
    recompute: tuple[str, ...]
    fate: str
    bound: KeptSeconds
    best: float | None
    why: str
    orders: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeptSpace:
    """The skeletons of a search; what several share is listed once.

    Attributes:
        operators: names.
        stages: the operators of each stage, packed indices.
        meshes: of stages.
        records: of skeletons.
    """

    operators: tuple[str, ...]
    stages: tuple[str, ...]
    meshes: tuple[KeptMesh, ...]
    records: tuple[KeptRecord, ...]

    @classmethod
    def of(cls, space: Iterable[SkeletonRecord]) -> KeptSpace:
        """What is kept of a space."""
        operators: dict[str, int] = {}
        stages: dict[tuple[str, ...], int] = {}
        meshes: dict[DeviceMesh, int] = {}
        records = []
        for record in space:
            skeleton = record.skeleton
            for name in (name for stage in skeleton.stages for name in stage):
                operators.setdefault(name, len(operators))
            records.append(
                KeptRecord(
                    tuple(stages.setdefault(stage, len(stages)) for stage in skeleton.stages),
                    tuple(meshes.setdefault(mesh, len(meshes)) for mesh in skeleton.meshes),
                    skeleton.num_microbatches,
                    skeleton.schedule,
                    skeleton.policies,
                    record.fate.name.lower(),
                    kept_seconds(record.bound),
                    record.best,
                    record.why,
                    skeleton.orders,
                )
            )
        return cls(
            tuple(operators),
            tuple(packed(np.array([operators[name] for name in stage])) for stage in stages),
            tuple(
                KeptMesh(
                    tuple((axis.name, axis.size) for axis in mesh.axes),
                    packed(np.array(mesh.devices)),
                )
                for mesh in meshes
            ),
            tuple(records),
        )

    def space(self) -> tuple[SkeletonRecord, ...]:
        """The space that was kept.

        Raises:
            ValueError: if it is none; the message says why.
        """
        stages = [self._stage(unpacked(text).tolist()) for text in self.stages]
        meshes = [
            DeviceMesh(
                tuple(MeshAxis(*axis) for axis in kept.axes),
                tuple(unpacked(kept.devices).tolist()),
            )
            for kept in self.meshes
        ]
        return tuple(
            SkeletonRecord(
                Skeleton(
                    tuple(_listed(stages, number, "stage") for number in kept.stages),
                    tuple(_listed(meshes, number, "mesh") for number in kept.meshes),
                    kept.num_microbatches,
                    kept.schedule,
                    kept.recompute,
                    kept.orders,
                ),
                Fate[kept.fate.upper()],
                read_seconds(kept.bound),
                kept.best,
                kept.why,
            )
            for kept in self.records
        )

    def _stage(self, numbers: list[int]) -> tuple[str, ...]:
        return tuple(_listed(self.operators, number, "operator") for number in numbers)


def _listed(things: Sequence[T], number: int, what: str) -> T:
    if not 0 <= number < len(things):
        raise ValueError(f"its space names {what} {number} of {len(things)}")
    return things[number]


@dataclass(frozen=True)
class KeptPoint:
    """A `FrontPoint`."""

    step_time: float
    peak_memory: int
    num_devices: int
    plan: dict[str, Any]

    @classmethod
    def of(cls, point: FrontPoint) -> KeptPoint:
        """What is kept of a point."""
        plan = json.loads(point.plan.to_json())
        return cls(point.step_time, point.peak_memory, point.num_devices, plan)

    def point(self) -> FrontPoint:
        """The point that was kept."""
        plan = Plan.from_json(json.dumps(self.plan), what="a plan of its front")
        return FrontPoint(self.step_time, self.peak_memory, self.num_devices, plan)


@dataclass(frozen=True)
class KeptTrace:
    """A `TracePoint`."""

    evaluations: int
    skeleton: str
    best: KeptSeconds

    @classmethod
    def of(cls, point: TracePoint) -> KeptTrace:
        """What is kept of a point."""
        return cls(point.evaluations, point.skeleton, kept_seconds(point.best))

    def point(self) -> TracePoint:
        """The point that was kept."""
        return TracePoint(self.evaluations, self.skeleton, read_seconds(self.best))


@dataclass(frozen=True)
class KeptDraws:
    """What plans take under drawn errors, as files have it: `Robustness`, groups in order."""

    names: tuple[str, ...]
    nominal: tuple[float, ...]
    steps: tuple[tuple[float, ...], ...]
    errors: tuple[float, ...]
    seed: int

    @classmethod
    def of(cls, sure: Robustness) -> KeptDraws:
        """What is kept of drawn errors."""
        return cls(
            sure.names,
            tuple(sure.nominal.tolist()),
            tuple(map(tuple, sure.steps.tolist())),
            tuple(sure.errors[group] for group in PriceGroup),
            sure.seed,
        )

    def robustness(self) -> Robustness:
        """The same as it was.

        Raises:
            ValueError: a draw has not one step above 0 a plan, or a group of prices has no error.
        """
        plans, groups = len(self.names), len(PriceGroup)
        if not self.steps or {len(self.nominal), *map(len, self.steps)} != {plans}:
            raise ValueError(f"draws of errors: each has one step for each of {plans} plans")
        if min(min(each) for each in (self.nominal, *self.steps)) <= 0:
            raise ValueError("draws of errors: a plan takes no time; steps are above 0 seconds")
        if len(self.errors) != groups:
            raise ValueError(f"{len(self.errors)} errors of prices for {groups} groups of them")
        return Robustness(
            self.names,
            np.array(self.nominal),
            np.array(self.steps),
            dict(zip(PriceGroup, self.errors, strict=True)),
            self.seed,
        )
