"""How many nodes to train on: a search for each size, and the best by time or by money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.searcher.driver.incumbent import FrontPoint, front_of
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import SIMPLEST, search
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster

OBJECTIVES = ("time", "money")
"""What may be small: seconds a step, or what a step costs."""


@dataclass(frozen=True, eq=False)
class SizesResult:
    """Searches on clusters of several sizes.

    Attributes:
        results: by number of nodes, in the order asked for.
        objective: what `best` is best in.
    """

    results: dict[int, SearchResult]
    objective: str

    @property
    def best(self) -> SearchResult:
        """The result that is best in the objective; plans that do not fit come last."""

        def value(result: SearchResult) -> tuple[bool, float]:
            time = result.simulation.step_time
            return not result.simulation.fits, (
                time if self.objective == "time" else result.cost_per_step
            )

        return min(self.results.values(), key=value)

    @property
    def front(self) -> tuple[FrontPoint, ...]:
        """Plans of all sizes that none other beats in time, memory and devices at once."""
        return tuple(front_of(p for result in self.results.values() for p in result.front))

    @property
    def table(self) -> Table:
        """A row for each size."""
        columns = {
            "nodes": Unit.COUNT,
            "step": Unit.SECONDS,
            "no plan under": Unit.SECONDS,
            "tokens or samples a second": Unit.COUNT,
            "memory per device": Unit.BYTES,
            "fits": Unit.TEXT,
            "cost of 1,000 steps": Unit.TEXT,
        }
        rows = tuple(
            (
                nodes,
                r.simulation.step_time,
                r.bound,
                round(r.tokens_per_second),
                r.simulation.peak_memory,
                "yes" if r.simulation.fits else "no",
                f"{1000 * r.cost_per_step:,.2f}" if r.cost_per_step else "no price",
            )
            for nodes, r in self.results.items()
        )
        return Table("the best plan by number of nodes", columns, rows)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def search_sizes(
    graph: OperatorGraph,
    cluster: Cluster,
    num_nodes: Sequence[int],
    *,
    objective: str = "time",
    **arguments: Any,
) -> SizesResult:
    """Search for plans on several numbers of nodes of a cluster.

    Example:
        >>> from dataclasses import replace
        >>> from stratagem.searcher.driver.budget import Budget
        >>> from stratagem.simulator.graph.models import mlp
        >>> cluster = replace(Cluster.preset("dgx-a100"), node_price_per_hour=30.0)
        >>> sizes = search_sizes(
        ...     mlp([64, 64], batch=64), cluster, [1, 2], objective="money",
        ...     budget=Budget(evaluations=0, bounded=0),
        ... )
        >>> sizes.best.plan.cluster.num_nodes
        1

    Args:
        graph: the model at its whole batch, the same on every size.
        cluster: its nodes and links; the number of its own nodes does not count.
        num_nodes: sizes to try.
        objective: ``"time"`` of a step, or ``"money"``, which prefers few nodes well used.
        arguments: of `search`; plans are the simplest unless `prefer` says ``"fastest"``.

    Raises:
        ValueError: an unknown objective, no size, or money on a cluster without a price.
    """
    check_arguments(
        "search_sizes",
        graph=(graph, OperatorGraph),
        cluster=(cluster, Cluster),
        num_nodes=(num_nodes, tuple[int, ...]),
        objective=(objective, str),
    )
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if not num_nodes:
        raise ValueError("num_nodes is empty: name at least one number of nodes")
    if objective == "money" and not cluster.node_price_per_hour:
        raise ValueError(
            f"cluster {cluster.name!r} has no price: set node_price_per_hour to what a node costs "
            "an hour"
        )
    results = {
        nodes: search(graph, cluster.resized(num_nodes=nodes), **{"prefer": SIMPLEST, **arguments})
        for nodes in num_nodes
    }
    return SizesResult(results, objective)
