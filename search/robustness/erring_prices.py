"""Prices that are off by what is said of them, and what a step then takes.

What a cost model gets wrong it gets wrong everywhere: a device whose products are slower than its
model says is slower in all of them, under every plan. So errors are drawn by group of prices, one
factor for all that a group prices, and plans are compared under the same factors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.cost_model import Cost, CostModel, Direction, LaunchTimes
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.pipeline.pipeline import pipeline_of
from stratagem.simulator.pipeline.price_variants import step_variants
from stratagem.simulator.pipeline.priced_pipeline import Prices, listed_choices, price_pipeline
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.priced_plan import plan_model, spread_of, step_seconds

STEP = 0.1
"""By which share a group of prices is made dearer, to see how much of a step hangs on it."""


class PriceGroup(enum.Enum):
    """Prices that err together."""

    PRODUCTS = "matrix products and attention"
    OTHERS = "other kernels"
    UPDATES = "the optimizer's updates"
    INSIDE = "links in a node"
    BETWEEN = "links between nodes"


LINKS = (PriceGroup.INSIDE, PriceGroup.BETWEEN)
"""Those that no cost model says, but the cluster."""


@dataclass(frozen=True)
class ErringPrices:
    """A cost model some of whose kernels take another share of the time that it says.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.cost_model import RooflineCosts
        >>> device = Cluster.preset("dgx-a100").device_type(0)
        >>> slow = ErringPrices(RooflineCosts(), {PriceGroup.UPDATES: 2.0})
        >>> both = [c.update_cost(10**9, Training(), device) for c in (slow, slow.costs)]
        >>> both[0].seconds / both[1].seconds
        2.0

    Attributes:
        costs: the cost model.
        factors: of the times of a group; 1 where none is given.
    """

    costs: CostModel
    factors: Mapping[PriceGroup, float]

    def operator_cost(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> Cost:
        """See `CostModel`."""
        cost = self.costs.operator_cost(operator, sizes, direction, training, device)
        return self._off(cost, _group_of(operator))

    def launch_seconds(
        self,
        operator: Operator,
        sizes: Mapping[str, int],
        direction: Direction,
        training: Training,
        device: DeviceType,
    ) -> float | None:
        """See `LaunchTimes`."""
        if not isinstance(self.costs, LaunchTimes):
            return None
        return self.costs.launch_seconds(operator, sizes, direction, training, device)

    def update_cost(self, num_parameters: int, training: Training, device: DeviceType) -> Cost:
        """See `CostModel`."""
        cost = self.costs.update_cost(num_parameters, training, device)
        return self._off(cost, PriceGroup.UPDATES)

    def _off(self, cost: Cost, group: PriceGroup) -> Cost:
        return replace(cost, seconds=cost.seconds * self.factors.get(group, 1.0))


def _group_of(operator: Operator) -> PriceGroup:
    return PriceGroup.OTHERS if kind_of(operator).product is None else PriceGroup.PRODUCTS


def erring(
    plan: Plan, costs: CostModel, factors: Mapping[PriceGroup, float]
) -> tuple[Plan, CostModel]:
    """A plan and its prices with every group off by its factor: links by those of the cluster."""
    return _slowed(plan, factors), _dearer(costs, factors)


def _dearer(costs: CostModel, factors: Mapping[PriceGroup, float]) -> CostModel:
    """The cost model with its kernels off by their factors."""
    if all(group in LINKS for group in factors):
        return costs
    return ErringPrices(costs, dict(factors))


def _slowed(plan: Plan, factors: Mapping[PriceGroup, float]) -> Plan:
    """The plan on links that are off by their factors."""
    cluster = plan.cluster
    if not any(group in factors for group in LINKS):
        return plan
    slower = replace(
        cluster,
        intra_node=cluster.intra_node.slowed(factors.get(PriceGroup.INSIDE, 1.0)),
        inter_node=cluster.inter_node.slowed(factors.get(PriceGroup.BETWEEN, 1.0)),
    )
    return replace(plan, cluster=slower)


class StepSlopes:
    """What plans take in seconds, and how much more for each group of prices that is dearer.

    Plans of one cluster and one training share prices. A step is taken to grow with each group as
    it does from no error to `STEP`: exactly so as long as the same tasks are waited for.

    Example:
        >>> slopes = StepSlopes(graph, costs)  # doctest: +SKIP
        >>> slopes.of(plan)  # doctest: +SKIP
        (0.0187, array([0.0102, 0.0031, 0.0011, 0.0029, 0.]))
    """

    def __init__(
        self, graph: OperatorGraph, costs: CostModel, memory: RowMemory | None = None
    ) -> None:
        self._graph, rows = graph, memory or RowMemory()
        # One cost model for each group, by which `rows` finds again what it priced.
        self._prices = {
            group: Prices(_dearer(costs, _a_step_dearer(group)), rows)
            for group in (None, *PriceGroup)
        }
        self.errors = dict.fromkeys(PriceGroup, 0.0)
        """Of each group, in the plans so far: the largest standard deviation that is stated."""

    def of(self, plan: Plan) -> tuple[float, Floats]:
        """Seconds of a step, and seconds more for each group (in order) whose prices double."""
        unused = {PriceGroup.BETWEEN} if len(plan.nodes) == 1 else set()
        groups = [group for group in PriceGroup if group not in unused]
        plans = [self._erring(plan, group) for group in (None, *groups)]
        graph = plan.rewrite(self._graph).graph
        if plan.is_mirrored or plan.token_slices != 1:
            models = [plan_model(each, graph, own.costs, own.memory) for each, own in plans]
            tables = [stage.table for stage in models[0].stages]
            errors = price_errors(tables, models[0].graph, plan.cluster)
            steps = list(map(step_seconds, models))
        else:
            small = graph.microbatch(plan.num_microbatches)
            choices = listed_choices(small, {name: plan.choice(name) for name in small.names})
            priced = [
                price_pipeline(pipeline_of(each), small, choices, own) for each, own in plans
            ]
            errors = price_errors(priced[0].tables, small, plan.cluster)
            steps = [ns * 1e-9 for ns in step_variants(priced)]
        for group, error in errors.items():
            self.errors[group] = max(self.errors[group], error)
        step, *rest = steps
        dearer = dict.fromkeys(PriceGroup, step) | dict(zip(groups, rest, strict=True))
        return step, (np.array(list(dearer.values())) - step) / STEP

    def _erring(self, plan: Plan, group: PriceGroup | None) -> tuple[Plan, Prices]:
        return _slowed(plan, _a_step_dearer(group)), self._prices[group]


def _a_step_dearer(group: PriceGroup | None) -> dict[PriceGroup, float]:
    """The factors by which one group is dearer, or none is."""
    return {} if group is None else {group: 1.0 + STEP}


def price_errors(
    tables: Iterable[CostTable], graph: OperatorGraph, cluster: Cluster
) -> dict[PriceGroup, float]:
    """How far each group of prices may be off: one standard deviation, a share of them.

    Kernels by what the cost model says of them, weighted by the time that they take; links by what
    they say themselves. Nobody states errors of updates, nor of links that were not measured,
    which get those of all kernels. Where no step of the cluster was measured, each group is also
    off by as much as clusters are apart.

    Example:
        >>> price_errors(priced.tables, graph, cluster)[PriceGroup.INSIDE]  # doctest: +SKIP
        0.05
    """
    tables = list(tables)
    spread = spread_of(tables, cluster)
    found: dict[PriceGroup, list[tuple[float, float]]] = {}
    for table in tables:
        for i in table.operators:
            row = table.row(i)
            group = _group_of(graph.operators[i])
            told = float(row.passes_ns[0]), float(row.relative_error[0])
            found.setdefault(group, []).append(told)
    rest = _weighted(pair for pairs in found.values() for pair in pairs)
    known = {group: _weighted(found.get(group, ())) for group in _KERNELS}
    for group, link in (
        (PriceGroup.INSIDE, cluster.intra_node),
        (PriceGroup.BETWEEN, cluster.inter_node),
    ):
        if link.relative_error:
            known[group] = link.relative_error
    return {group: math.hypot(known.get(group, rest), spread) for group in PriceGroup}


_KERNELS = (PriceGroup.PRODUCTS, PriceGroup.OTHERS)


def _weighted(pairs: Iterable[tuple[float, float]]) -> float:
    pairs = list(pairs)
    total = sum(ns for ns, _ in pairs)
    return sum(ns * error for ns, error in pairs) / total if total else 0.0


def drawn_factors(errors: Mapping[PriceGroup, float], *, draws: int, seed: int) -> Floats:
    """Factors on the prices of each group, [draws, groups], log-normal and independent.

    The same for the same seed. A draw of a group has the same rank among all draws whatever the
    errors are.

    Example:
        >>> drawn_factors(dict.fromkeys(PriceGroup, 0.0), draws=2, seed=0).tolist()
        [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    spreads = np.array([errors[group] for group in PriceGroup])
    normal = np.random.default_rng(seed).standard_normal((draws, len(spreads)))
    factors: Floats = np.exp(normal * spreads)
    return factors
