"""Pricing many strategies on one mesh: every operator's choices once, then look-ups.

A strategy literature knows how to lay out is one choice an operator on one mesh. Simulating each
as a plan of its own builds the same task graphs again and again; here they are built once, over
all choices that any of the strategies makes, and each strategy is a play of a few blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.graph.placement import smallest_shard
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.device_memory import StageTensors

_SCHEDULE = "1f1b"
"""Of plans of one stage."""


@dataclass(frozen=True)
class Price:
    """Seconds of a step and bytes per device at its peak."""

    step_time: float
    peak: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.capacity

    @property
    def rank(self) -> tuple[float, float]:
        """Sorts prices as `situation.rank` sorts simulations: those that fit by time first."""
        return (0.0 if self.fits else self.peak / self.capacity, self.step_time)


class StagePrices:
    """Steps of one stage on one mesh, under any of the choices that were given for an operator.

    Equal to what `simulate_plan` says of `one_stage_plan`, without pins.

    Example:
        >>> from stratagem.searcher.space.strategies import data_parallel
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> mesh = DeviceMesh((MeshAxis("data", 8),), tuple(range(8)))
        >>> choices = data_parallel(graph, mesh.shape)
        >>> prices = StagePrices(situation, mesh, {n: (c,) for n, c in choices.items()})
        >>> prices.of(choices).step_time == situation.simulate(
        ...     one_stage_plan("data parallel", situation, mesh, choices)
        ... ).step_time
        True

    Args:
        situation: what the plans are made for.
        mesh: all devices of the stage.
        choices: per operator those that it may be given.
        num_microbatches: of a step.
    """

    def __init__(
        self,
        situation: Situation,
        mesh: DeviceMesh,
        choices: Mapping[str, Sequence[Choice]],
        num_microbatches: int = 1,
    ) -> None:
        listed = {name: tuple(dict.fromkeys(several)) for name, several in choices.items()}
        skeleton = _one_stage(situation, mesh, num_microbatches)
        self._priced = situation.priced(skeleton, listed)
        self._number = [
            {choice: k for k, choice in enumerate(several)} for several in self._priced.choices
        ]
        self._capacity = mesh.memory_bytes(situation.cluster)

    def of(self, choices: Mapping[str, Choice]) -> Price:
        """The price of a strategy.

        Raises:
            KeyError: a choice is none of those that were given for its operator.
        """
        number = np.array(
            [
                numbers[choices[name]]
                for name, numbers in zip(self._priced.graph.names, self._number, strict=True)
            ],
            dtype=np.int64,
        )
        (lifetimes,), names = self._priced.lifetimes, self._priced.graph.names
        tensors = StageTensors(0, lifetimes, lifetimes.bytes_under(number), names)
        peak = tensors.state + max(tensors.peak(0), tensors.peak(1))
        return Price(self._priced.step_ns(number) * 1e-9, peak, self._capacity)


def one_stage_plan(
    name: str,
    situation: Situation,
    mesh: DeviceMesh,
    choices: Mapping[str, Choice],
    num_microbatches: int = 1,
) -> Plan:
    """The plan that runs the whole model as one stage."""
    skeleton = _one_stage(situation, mesh, num_microbatches)
    return situation.plan(skeleton, choices, name=name)


def _one_stage(situation: Situation, mesh: DeviceMesh, num_microbatches: int) -> Skeleton:
    return Skeleton((situation.graph.names,), (mesh,), num_microbatches, _SCHEDULE)


def grid_meshes(situation: Situation) -> list[DeviceMesh]:
    """All devices as data × model, for every model axis that divides a node and the devices.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
        >>> situation = Situation(mlp([8, 8], batch=8), cluster, Training(), default_costs())
        >>> [mesh.shape for mesh in grid_meshes(situation)]
        [(8, 1), (4, 2), (2, 4)]
    """
    cluster = situation.cluster
    total, per_node = cluster.num_devices, cluster.devices_per_node
    return [
        DeviceMesh((MeshAxis("data", total // ways), MeshAxis("model", ways)), tuple(range(total)))
        for ways in range(1, min(per_node, total) + 1)
        if per_node % ways == 0 and total % ways == 0
    ]


T = TypeVar("T")


def fewest_microbatches(
    situation: Situation, mesh: DeviceMesh, attempt: Callable[[int], tuple[T, Price]]
) -> tuple[int, T, Price]:
    """The first power of two of microbatches with which something fits, and what that is.

    Every index of the first axis keeps a sample at least. Where nothing fits, the most
    microbatches. More of them need less memory, so the first is found by bisection.

    Args:
        situation: gives the batch.
        mesh: gives the first axis.
        attempt: what to make with so many microbatches, and its price.
    """
    batch, ways = situation.graph.batch, mesh.shape[0]
    counts = [1]
    while 2 * counts[-1] in situation.graph.microbatch_counts:
        if smallest_shard(batch // (2 * counts[-1]), [ways]) < 1:
            break
        counts.append(2 * counts[-1])
    made: dict[int, tuple[T, Price]] = {}

    def fits(k: int) -> bool:
        made[k] = attempt(counts[k])
        return made[k][1].fits

    last = len(counts) - 1
    if fits(0) or last == 0 or not fits(last):
        k = max(made)
        return counts[k], *made[k]
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return counts[high], *made[high]
