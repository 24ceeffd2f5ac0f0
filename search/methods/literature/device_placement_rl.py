"""Device placement by policy gradient (Mirhoseini et al. 2017, arXiv 1706.04972; 2018, ICLR).

Groups of operators are put on single devices, our `Pin`, without splitting any of them. A policy
is sampled, each placement is timed, and what was faster than expected becomes likelier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.methods.literature.one_stage_prices import one_stage_plan
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Skeleton
from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Pin
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.device_memory import StageTensors

OVER_MEMORY = 10.0
"""How many times worse the reward of a placement is that some device cannot hold."""

BASELINE_RATE = 0.1
"""Share of the way that the baseline goes towards the mean reward of each update."""

ENTROPY = 0.01
"""Weight of the policy's entropy, so that it does not settle too early."""


@dataclass(frozen=True)
class Reinforced:
    """The best placement that was sampled, and what was sampled.

    Attributes:
        plan: one device for each operator.
        step_time: of the plan, s.
        fits: whether every device holds what is placed on it.
        num_samples: placements drawn.
        num_simulated: of those the different ones.
        mean_times: mean step of the placements of each update, s.
    """

    plan: Plan
    step_time: float
    fits: bool
    num_samples: int
    num_simulated: int
    mean_times: tuple[float, ...]


def reinforce(
    situation: Situation,
    *,
    num_samples: int = 500,
    samples_per_update: int = 10,
    max_groups: int = 64,
    learning_rate: float = 0.2,
    seed: int = 0,
) -> Reinforced:
    """Place groups of operators on single devices by REINFORCE, scored by the simulator.

    Like the papers: the reward is −√(step time), a placement over the memory is punished, a moving
    average of rewards is the baseline, several placements are drawn for each update. Unlike them:
    the policy has a row of logits for each group instead of a recurrent network over the
    operators, so it learns one model at a time; groups are not learned but consecutive operators
    of a segment (a layer of a transformer), merged until there are `max_groups`; advantages are
    divided by their spread; and steps are simulated, not measured, so a sample takes milliseconds
    where theirs took seconds to minutes. Placements that differ in which device is which inside
    the only node are one, and each is simulated once.

    Memory is counted device by device, by what is pinned there, as `simulate_plan` does.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
        >>> situation = Situation(mlp([8, 8], batch=4), cluster, Training(), default_costs())
        >>> found = reinforce(situation, num_samples=20)
        >>> found.step_time == situation.simulate(found.plan).step_time
        True

    Args:
        situation: model, cluster and costs.
        num_samples: placements to draw.
        samples_per_update: of them for each step of the policy.
        max_groups: how many groups at most.
        learning_rate: of the policy (Adam).
        seed: of every random number; equal arguments give equal plans.

    Raises:
        ValueError: a count below 1.
    """
    counts = {
        "num_samples": num_samples,
        "samples_per_update": samples_per_update,
        "max_groups": max_groups,
    }
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"reinforce: {name} is {value}; it must be at least 1")
    group_of = operator_groups(situation.graph, max_groups)
    placements = Placements(situation, group_of)
    policy = _Policy(int(group_of.max()) + 1, situation.cluster.num_devices, learning_rate)
    rng = np.random.default_rng(seed)
    best: tuple[bool, float, Ints] | None = None
    baseline, mean_times = 0.0, list[float]()
    for start in range(0, num_samples, samples_per_update):
        drawn = policy.draw(rng, min(samples_per_update, num_samples - start))
        timed = [placements.price(placement) for placement in drawn]
        for placement, (seconds, fits) in zip(drawn, timed, strict=True):
            if best is None or (not fits, seconds) < best[:2]:
                best = not fits, seconds, placement
        rewards = np.array(
            [-np.sqrt(seconds) * (1.0 if fits else OVER_MEMORY) for seconds, fits in timed]
        )
        mean_times.append(float(np.mean([seconds for seconds, _ in timed])))
        baseline = float(rewards.mean()) if start == 0 else baseline
        policy.learn(drawn, rewards - baseline)
        baseline += BASELINE_RATE * (float(rewards.mean()) - baseline)
    assert best is not None  # At least one is drawn.
    over, seconds, placement = best
    plan = placements.plan(placement)
    return Reinforced(
        plan, seconds, not over, num_samples, placements.num_simulated, tuple(mean_times)
    )


def operator_groups(graph: OperatorGraph, max_groups: int) -> Ints:
    """The group of each operator: its segment, neighbours merged until there are `max_groups`.

    Sources, which every device computes, belong to the group of what follows them.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> groups = operator_groups(gpt(num_layers=4, batch=8), 64)
        >>> int(groups.max()) + 1, bool((np.diff(groups) >= 0).all())
        (9, True)
    """
    segments = np.array(graph.segments)
    first = next(i for i, op in enumerate(graph.operators) if not op.is_source)
    segments[:first] = segments[first]
    number: Ints = np.unique(segments, return_inverse=True)[1].astype(np.int64)
    count = int(number.max()) + 1
    if count > max_groups:
        number = number * max_groups // count
    return number


class _Policy:
    """A softmax over devices for each group, trained by Adam (Kingma & Ba 2015)."""

    def __init__(self, num_groups: int, num_devices: int, learning_rate: float) -> None:
        self.logits = np.zeros((num_groups, num_devices))
        self.rate = learning_rate
        self.mean, self.square = np.zeros_like(self.logits), np.zeros_like(self.logits)
        self.updates = 0

    @property
    def shares(self) -> Floats:
        """[groups, devices], the probability of each device."""
        powers = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        shares: Floats = powers / powers.sum(axis=1, keepdims=True)
        return shares

    def draw(self, rng: np.random.Generator, count: int) -> list[Ints]:
        """Placements: per group a device."""
        below = np.cumsum(self.shares, axis=1)
        return [
            np.minimum((rng.random((below.shape[0], 1)) >= below).sum(axis=1), below.shape[1] - 1)
            for _ in range(count)
        ]

    def learn(self, drawn: Sequence[Ints], advantages: Floats) -> None:
        """One step along E[advantage · ∇ log p(placement)] and the gradient of the entropy."""
        shares = self.shares
        spread = float(advantages.std())
        scaled = advantages / spread if spread > 0 else np.zeros_like(advantages)
        gradient = np.zeros_like(shares)
        rows = np.arange(shares.shape[0])
        for placement, advantage in zip(drawn, scaled, strict=True):
            chosen = np.zeros_like(shares)
            chosen[rows, placement] = 1.0
            gradient += advantage * (chosen - shares) / len(drawn)
        logs = np.log(np.maximum(shares, 1e-12))
        entropy = -(shares * logs).sum(axis=1, keepdims=True)
        gradient += ENTROPY * shares * (-logs - entropy)
        self.updates += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.updates)
        square = self.square / (1 - 0.999**self.updates)
        self.logits += self.rate * mean / (np.sqrt(square) + 1e-8)


class Placements:
    """Prices placements of groups; operators and conversions are priced once for all of them.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
        >>> situation = Situation(mlp([8, 8], batch=4), cluster, Training(), default_costs())
        >>> groups = operator_groups(situation.graph, 2)
        >>> placements = Placements(situation, groups)
        >>> placements.price(np.array([0, 3])) == placements.price(np.array([2, 1]))
        True

    Args:
        situation: model, cluster and costs; all devices are one axis.
        group_of: per operator its group.
    """

    def __init__(self, situation: Situation, group_of: Ints) -> None:
        graph, cluster = situation.graph, situation.cluster
        devices = cluster.num_devices
        self._situation, self._group_of = situation, group_of
        self._mesh = DeviceMesh((MeshAxis("device", devices),), tuple(range(devices)))
        self._is_source = np.array([op.is_source for op in graph.operators])
        pins = tuple(Choice((Pin(k),)) for k in range(devices))
        self._choices = [(Choice((REPLICATE,)),) if s else pins for s in self._is_source]
        skeleton = Skeleton((graph.names,), (self._mesh,), 1, "1f1b")
        listed = dict(zip(graph.names, self._choices, strict=True))
        self._priced = situation.priced(skeleton, listed)
        self._capacities = [
            DeviceMesh((MeshAxis("device", 1),), (k,)).memory_bytes(cluster)
            for k in range(devices)
        ]
        types = {cluster.device_type(k).name for k in range(devices)}
        nodes = {cluster.node_of(k) for k in range(devices)}
        self._devices_are_alike = len(types) == len(nodes) == 1
        self._known: dict[tuple[int, ...], tuple[float, bool]] = {}

    @property
    def num_simulated(self) -> int:
        """Number of different placements that were priced."""
        return len(self._known)

    def price(self, placement: Ints) -> tuple[float, bool]:
        """Seconds of a step, and whether every device holds its part."""
        key = self._key(placement)
        if key not in self._known:
            number = np.where(self._is_source, 0, placement[self._group_of])
            self._known[key] = self._priced.step_ns(number) * 1e-9, self._fits(number)
        return self._known[key]

    def plan(self, placement: Ints) -> Plan:
        """The plan of a placement."""
        number = np.where(self._is_source, 0, placement[self._group_of]).tolist()
        names = self._situation.graph.names
        chosen = {
            name: options[k] for name, options, k in zip(names, self._choices, number, strict=True)
        }
        return one_stage_plan("REINFORCE device placement", self._situation, self._mesh, chosen)

    def _key(self, placement: Ints) -> tuple[int, ...]:
        """Equal for placements that cost the same: devices numbered as they come up."""
        if not self._devices_are_alike:
            return tuple(placement.tolist())
        numbers: dict[int, int] = {}
        return tuple(numbers.setdefault(k, len(numbers)) for k in placement.tolist())

    def _fits(self, number: Ints) -> bool:
        """Whether what is pinned to each device fits it."""
        (life,) = self._priced.lifetimes
        every = StageTensors(0, life, life.bytes_under(number), self._situation.graph.names)
        for device, capacity in enumerate(self._capacities):
            tensors = every.on((number == device) | self._is_source)
            if tensors.state + max(tensors.peak(0), tensors.peak(1)) > capacity:
                return False
        return True
