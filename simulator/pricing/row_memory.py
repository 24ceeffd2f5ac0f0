"""What was priced before, by all that its price depends on.

Plans and stages of one search are mostly alike: the same operators with the same choices on meshes
that look the same, and whole stages that did not change from one plan to the next. One memory
keeps both: rows of operators and edges by what a mesh looks like, and what stages of plans are
made of (their tables, blocks, lifetimes and what crosses between them), the last only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq, is_
from typing import Any, NamedTuple

from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.kernel_prices import KernelPrice
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.cost_rows import EdgeRow, OperatorRow
from stratagem.simulator.pricing.recent_values import RecentValues
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.resharding_paths import Resharder, shared_resharder

STAGE_OPERATORS = 30_000
"""Stages of plans that are remembered have so many operators in all."""
CROSSINGS = 10_000
"""So many edges between stages of plans are remembered."""
SEEN = 100_000
"""Values whose numbers are found by identity; more are forgotten, but not their numbers."""


def _nobody() -> None:
    """Watches nothing."""


class MeshFigures(NamedTuple):
    """What prices depend on of a mesh: links, types of devices, and what these `wait`.

    `alike` is a number, equal for meshes of a memory on which everything costs the same.
    """

    links: tuple[AxisLink, ...]
    devices: tuple[DeviceType, ...]
    resharder: Resharder
    wait: float
    alike: int


@dataclass(eq=False)
class RowMemory:
    """Rows already priced, by what a mesh looks like: stages and strategies share them.

    `passes` are costs of single passes by local sizes, which meshes of several shapes share,
    `moved` what becomes of parameters, which operators of any batch share;
    `stages` what stages of plans are made of and `crossings` edges between them, the last only.

    Prices of one cost model, cluster and training are told from those of another. Parts of a
    cluster share what costs there what it costs in the whole.
    Before a row is priced `watch` is called: what it raises ends a table that takes too long.
    """

    operators: dict[Any, dict[Any, OperatorRow]] = field(default_factory=dict)
    edges: dict[Any, dict[Any, EdgeRow]] = field(default_factory=dict)
    passes: dict[Any, dict[Any, KernelPrice]] = field(default_factory=dict)
    moved: dict[Any, dict[Any, Any]] = field(default_factory=dict)
    stages: RecentValues[Any] = field(default_factory=lambda: RecentValues(STAGE_OPERATORS))
    crossings: RecentValues[Any] = field(default_factory=lambda: RecentValues(CROSSINGS))
    watch: Callable[[], None] = field(default=_nobody)
    _meshes: dict[tuple[int, int], MeshFigures] = field(default_factory=dict)
    _clusters: list[Cluster] = field(default_factory=list)
    _hardware: list[Any] = field(default_factory=list)
    _costs: list[CostModel] = field(default_factory=list)
    _priced_by: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _seen: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        """A small number for a large immutable value: hashing it once is slow enough."""
        seen = self._seen.get(id(value))
        if seen is None:
            if len(self._seen) >= SEEN:
                self._seen.clear()
            number = self._numbers.setdefault(value, len(self._numbers))
            seen = self._seen[id(value)] = value, number
        return seen[1]

    def cluster(self, cluster: Cluster) -> int:
        """A small number for a cluster, which cannot be hashed: the whole one, or a part."""
        return _place(self._clusters, cluster, eq)

    def priced_by(self, cluster: Cluster, training: Training, costs: CostModel) -> int:
        """A small number for what prices depend on beside what an operator is, and on which mesh.

        Calibration and types of devices are those of a cluster and of its parts alike.
        """
        kinds = cluster.calibration, cluster.compute_slowdown, cluster.device_types
        hardware, model = _place(self._hardware, kinds, eq), _place(self._costs, costs, is_)
        key = hardware, self.number(training), model
        return self._priced_by.setdefault(key, len(self._priced_by))

    def choices(self, listed: Sequence[Choice]) -> int:
        """A small number for the choices of an operator; those of plans have one each."""
        return self.number(listed[0] if len(listed) == 1 else tuple(listed))

    def figures(self, mesh: DeviceMesh, cluster: Cluster) -> MeshFigures:
        """What prices depend on of a mesh of `cluster`.

        Raises:
            ValueError: a device is not in the cluster.
        """
        key = self.number(mesh), self.cluster(cluster)
        if key not in self._meshes:
            mesh.check(cluster)
            links = tuple(mesh.link(axis, cluster) for axis in range(len(mesh.axes)))
            devices = mesh.device_types(cluster)
            types = tuple(device.name for device in devices)
            wait = mesh.wait(cluster)
            alike = self.number((mesh.shape, links, types, wait))
            resharder = shared_resharder(mesh.shape, links)
            self._meshes[key] = MeshFigures(links, devices, resharder, wait, alike)
        return self._meshes[key]


def _place(known: list[Any], value: Any, same: Callable[[Any, Any], bool]) -> int:
    """Where the same stands among what is known, behind which it is put if it does not."""
    for place, each in enumerate(known):
        if each is value or same(each, value):
            return place
    known.append(value)
    return len(known) - 1
