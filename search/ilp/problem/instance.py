"""What is to be solved: nodes that choose a strategy, costs between pairs, limits on memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints


@dataclass(frozen=True)
class CostEdge:
    """What two nodes cost together: `costs[k, l]` if `first` chooses k and `second` chooses l.

    Infinity forbids the pair. Edges of the same two nodes add up.
    """

    first: int
    second: int
    costs: Floats


@dataclass(frozen=True)
class Device:
    """A memory of `limit` bytes: one number, or one for every time step."""

    label: str
    limit: int | Ints


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that `node` holds on a device in the steps [start, end), by its strategy."""

    node: int
    start: int
    end: int
    nbytes: Ints
    device: int = 0


@dataclass(frozen=True)
class Instance:
    """Nodes with non-negative costs by strategy, edges, and memory as intervals of time.

    Example:
        >>> import numpy as np
        >>> disagree = np.array([[0.0, 2.0], [2.0, 0.0]])
        >>> costs = (np.array([1.0, 0.0]), np.array([0.0, 5.0]))
        >>> pair = Instance(costs, (CostEdge(0, 1, disagree),))
        >>> pair.objective([0, 0])
        1.0

    Costs are of any one unit; infinity forbids. Whole numbers stay exact up to 2⁵³. Memory is in
    bytes. `names` are of the nodes, for messages.

    Raises:
        ValueError: arrays of the wrong length, negative or undefined figures, unknown nodes.
    """

    costs: tuple[Floats, ...]
    edges: tuple[CostEdge, ...] = ()
    uses: tuple[MemoryUse, ...] = ()
    devices: tuple[Device, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.names and len(self.names) != len(self.costs):
            raise ValueError(
                f"{len(self.names)} names for {len(self.costs)} nodes; name all or none of them"
            )
        for node, costs in enumerate(self.costs):
            if costs.ndim != 1 or len(costs) == 0:
                raise ValueError(
                    f"{self.name(node)} has costs of shape {costs.shape}; give one number per "
                    "strategy, and one strategy at least"
                )
            _check_costs(costs, self.name(node))
        checked: set[int] = set()
        for edge in self.edges:
            self._check_edge(edge, checked)
        for device in self.devices:
            if np.any(np.asarray(device.limit) < 0):
                raise ValueError(f"{device.label} has a negative limit; limits are bytes")
        for use in self.uses:
            self._check_use(use)

    def _check_edge(self, edge: CostEdge, checked: set[int]) -> None:
        ends = f"the edge of nodes {edge.first} and {edge.second}"
        if not (0 <= edge.first < self.num_nodes and 0 <= edge.second < self.num_nodes):
            raise ValueError(f"{ends} names a node that is not one of {self.num_nodes}")
        if edge.first == edge.second:
            raise ValueError(
                f"{ends} joins a node to itself; add its diagonal to the node's costs"
            )
        shape = (len(self.costs[edge.first]), len(self.costs[edge.second]))
        if edge.costs.shape != shape:
            raise ValueError(
                f"{ends} has costs of shape {edge.costs.shape}, its nodes have {shape} strategies"
            )
        if id(edge.costs) not in checked:
            checked.add(id(edge.costs))
            _check_costs(edge.costs, ends)

    def _check_use(self, use: MemoryUse) -> None:
        if not 0 <= use.node < self.num_nodes:
            raise ValueError(
                f"memory of node {use.node} is given, but there are {self.num_nodes} nodes"
            )
        name = self.name(use.node)
        if not 0 <= use.device < len(self.devices):
            raise ValueError(
                f"{name} uses device {use.device}, but {len(self.devices)} devices are given"
            )
        if not 0 <= use.start <= use.end:
            raise ValueError(
                f"{name} holds memory from step {use.start} to {use.end}; give 0 <= start <= end"
            )
        if use.nbytes.shape != (len(self.costs[use.node]),):
            raise ValueError(
                f"{name} has bytes for {use.nbytes.shape} strategies and costs for "
                f"{len(self.costs[use.node])}; give both for each strategy"
            )
        if len(use.nbytes) and use.nbytes.min() < 0:
            raise ValueError(f"{name} uses {use.nbytes.min()} bytes; bytes cannot be negative")
        limit = self.devices[use.device].limit
        if isinstance(limit, np.ndarray) and use.end > len(limit):
            raise ValueError(
                f"{name} holds memory until step {use.end}, but {self.devices[use.device].label} "
                f"has limits for {len(limit)} steps; give a limit for every step"
            )

    @property
    def num_nodes(self) -> int:
        """How many nodes choose."""
        return len(self.costs)

    def name(self, node: int) -> str:
        """What a message calls a node."""
        return self.names[node] if self.names else f"node {node}"

    def objective(self, choice: Sequence[int] | Ints) -> float:
        """Costs of the nodes and edges under one strategy per node; memory is not looked at."""
        chosen = np.asarray(choice)
        if chosen.shape != (self.num_nodes,):
            raise ValueError(
                f"{chosen.shape} choices for {self.num_nodes} nodes; give one per node"
            )
        total = sum(float(costs[k]) for costs, k in zip(self.costs, chosen, strict=True))
        for edge in self.edges:
            total += float(edge.costs[chosen[edge.first], chosen[edge.second]])
        return total

    def memory(self, choice: Sequence[int] | Ints) -> list[Ints]:
        """Bytes in use on each device at each step, as far as anything is in use."""
        profiles = [np.zeros(steps + 1, np.int64) for steps in self.num_steps]
        for use in self.uses:
            nbytes = use.nbytes[choice[use.node]]
            profiles[use.device][use.start] += nbytes
            profiles[use.device][use.end] -= nbytes
        return [np.cumsum(profile)[:-1] for profile in profiles]

    def excess(self, choice: Sequence[int] | Ints) -> int:
        """Bytes by which the worst step of any device is over its limit, 0 if all is within."""
        worst = 0
        for device, profile in zip(self.devices, self.memory(choice), strict=True):
            if len(profile):
                worst = max(worst, int((profile - limits(device, len(profile))).max()))
        return worst

    @cached_property
    def num_steps(self) -> list[int]:
        """Time steps of each device: one more than the last that anything is in use."""
        steps = [0] * len(self.devices)
        for use in self.uses:
            steps[use.device] = max(steps[use.device], use.end)
        return steps


def limits(device: Device, num_steps: int) -> Ints:
    """The limit of a device at each of its first steps, in bytes."""
    if isinstance(device.limit, np.ndarray):
        return device.limit[:num_steps]
    return np.full(num_steps, device.limit, np.int64)


def _check_costs(costs: Floats, of: str) -> None:
    if np.isnan(costs).any():
        raise ValueError(f"a cost of {of} is not a number; infinity is how a choice is forbidden")
    if costs.size and costs.min() < 0:
        raise ValueError(f"{of} costs {costs.min()}; costs cannot be negative")
