"""What both homes of a stage do about its parameters: sums, updates, publishing
(`mirrored_stages`).

Behind the last backward block of a stage on either home its gradients are summed, an operator's
after the other, while both ranks go on with other blocks. Updates and what publishes them come
behind all blocks of a rank, each when its sum is through; what publishes a bucket comes behind
all of its updates, and a path that several share pays its latency once:

    rank 0   … B0 │ B1 B1 │     │ update 1 │ publish 1 │ update 0 …
    between       │ sum 0 │     │
    rank 1   … B0 │ B1 │  │ update 1 …

The operators stand in the order of the backward pass, as their gradients do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.operator import factor_sizes
from stratagem.simulator.pricing.cost_rows import PricedTime, timed
from stratagem.simulator.pricing.cost_table import CostTable, TableBuilder
from stratagem.simulator.pricing.shared_latency import shortened, spared_latency
from stratagem.simulator.pricing.stage_boundaries import syncs_compute
from stratagem.simulator.schedules.macro_draft import ALL, CopyTask
from stratagem.simulator.sharding.choice import ParameterMessage
from stratagem.simulator.sharding.joint_mesh import after_sum, before_sum, joint_mesh
from stratagem.simulator.sharding.parameter_homes import (
    ParameterUse,
    gradient_buckets,
    residences,
    use_of,
)
from stratagem.simulator.sharding.resharding_paths import (
    Resharder,
    ReshardingStep,
    shared_resharder,
)
from stratagem.simulator.stage.stage_blocks import KIND_OF_ROLE, TaskRole

Sums = list[tuple[int, tuple[ReshardingStep, ...]]]


class ReplicaHome(NamedTuple):
    """A stage on one of its homes, with one choice per operator."""

    builder: TableBuilder
    table: CostTable


class HomeTask(NamedTuple):
    """A task of both homes (`task.copy` is `ALL`) or of one, and the resources of it (`mask`)."""

    task: CopyTask
    name: str
    kind: TaskKind
    ns: int
    mask: int


def home_tasks(
    homes: tuple[ReplicaHome, ReplicaHome], cluster: Cluster, bucket_bytes: int
) -> tuple[HomeTask, ...]:
    """What a stage does on its homes behind its last backward blocks.

    Args:
        homes: the first and the second.
        cluster: gives the links between them.
        bucket_bytes: gradients are summed in buckets of at least so many bytes, unsharded.
    """
    return _SyncWriter(homes, cluster, bucket_bytes).write()


def homes_block(first: DeviceMesh, second: DeviceMesh, cluster: Cluster) -> bool:
    """Whether a sum over both homes of a stage keeps the cores of their devices busy."""
    return syncs_compute(joint_mesh(first, second), cluster)


def home_sums(builder: TableBuilder, table: CostTable, i: int, joint: Resharder) -> Sums:
    """The steps that sum each gradient of operator `i` over both homes, and bytes of a scalar."""
    graph, operator = builder.graph, builder.graph.operators[i]
    inside = set(table.operators)
    uses = [use_of(graph, builder.owner, operator, weight, inside) for weight in operator.weights]
    choice, shape = table.row(i).choices[0], builder.mesh.shape
    found: Sums = []
    for lies in residences(operator, uses, choice, shape):
        if lies.use is ParameterUse.OWNED:
            nbytes = lies.sending(ParameterMessage.GRADIENT, builder.training.formats).nbytes
            sizes = factor_sizes(lies.weight.layout, operator.sizes)
            steps = joint.path(sizes, nbytes, before_sum(lies.home), after_sum(lies.home))
            found.append((nbytes, steps))
    return found


@dataclass(eq=False)
class _SyncWriter:
    """Writes the tasks of a stage."""

    homes: tuple[ReplicaHome, ReplicaHome]
    cluster: Cluster
    bucket_bytes: int
    made: list[HomeTask] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh = joint_mesh(self.homes[0].builder.mesh, self.homes[1].builder.mesh)
        links = tuple(mesh.link(axis, self.cluster) for axis in range(len(mesh.axes)))
        self.joint = shared_resharder(mesh.shape, links)

    def write(self) -> tuple[HomeTask, ...]:
        """The sums first, then what each home does behind them."""
        table = self.homes[0].table
        order, names = table.operators[::-1], table.graph.names
        nbytes = {i: table.row(i).unsharded_gradient_bytes for i in order}
        buckets: list[dict[int, int]] = []
        for bucket in gradient_buckets(order, nbytes, self.bucket_bytes):
            buckets.append(sums := {})
            for i, price in zip(bucket, self._sums(bucket), strict=True):
                if price.ns.any():
                    sums[i] = len(self.made)
                    self._add(
                        CopyTask(ALL), TaskRole.HOME_SYNC, f"{names[i]} sync of both homes", price
                    )
        for sums in buckets:
            for i, number in sums.items():
                for copy in (0, 1):
                    self._update(CopyTask(copy, number), i)
            if self.bucket_bytes:
                for before, i in zip([None, *sums], sums, strict=False):
                    for copy in (0, 1):
                        self._publish(CopyTask(copy, max(sums.values())), before, i)
        return tuple(self.made)

    def _sums(self, bucket: Sequence[int]) -> Iterator[PricedTime]:
        """The times of the sums of a bucket; equal paths pay their latency once."""
        builder, table = self.homes[0].builder, self.homes[0].table
        before: set[tuple[tuple[object, int], ...]] = set()
        for i in bucket:
            seconds, mask = 0.0, 0
            for nbytes, steps in home_sums(builder, table, i, self.joint):
                kinds = tuple((step.collective, step.axis) for step in steps)
                shared = self.joint.seconds(steps, 0, later=True) if kinds in before else 0.0
                seconds += self.joint.seconds(steps, nbytes, later=True) - shared
                mask |= self.joint.mask(steps)
                before.add(kinds)
            yield timed([(seconds, mask)])

    def _update(self, task: CopyTask, i: int) -> None:
        table = self.homes[task.copy].table
        row, names = table.row(i), table.graph.names
        self._add(task, TaskRole.UPDATE, f"{names[i]} update", row.update)
        if not self.bucket_bytes:
            self._publish(task, None, i)
        for k, (owner, user) in enumerate(table.ties):
            if owner == i:
                price = table.tie_rows[k].publish
                self._add(task, TaskRole.TIE_PUBLISH, f"{names[i]} ↔ {names[user]}", price)

    def _publish(self, task: CopyTask, before: int | None, i: int) -> None:
        """Publish an operator's parameters, behind the one `before` it in its bucket, if any."""
        table = self.homes[task.copy].table
        price = table.row(i).publish
        if self.bucket_bytes:
            behind = table.row(i).publish_latency
            front = None if before is None else table.row(before).publish_latency
            price = shortened(price, spared_latency(front, behind))
        self._add(task, TaskRole.PUBLISH, f"{table.graph.names[i]} publish", price)

    def _add(self, task: CopyTask, role: TaskRole, name: str, price: PricedTime) -> None:
        ns, mask = (int(each.ravel()[0]) for each in (price.ns, price.mask))
        if ns:
            self.made.append(HomeTask(task, name, KIND_OF_ROLE[role], ns, mask))
