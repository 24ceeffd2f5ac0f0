"""What annotations cost: plans under them, without them, and without each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.semi_automatic.annotated_plans import Annotated, complete_plan
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import rank
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.pricing.row_memory import RowMemory


@dataclass(frozen=True, eq=False)
class AnnotationRegret:
    """How much longer a step takes under annotations than it has to.

    Attributes:
        held: the search under all annotations.
        free: the search without any.
        without: the search without one, by its name, under all others.
    """

    held: SearchResult
    free: SearchResult
    without: Mapping[str, SearchResult]

    @property
    def found(self) -> float:
        """How much longer the best plan found under them takes, as a share of the best found.

        Infinite where a plan fits the memory without them, and none under them.
        """
        if self.free.simulation.fits and not self.held.simulation.fits:
            return math.inf
        return self._step(self.held) / self._step(self.free) - 1.0

    @property
    def at_least(self) -> float:
        """What they cost at least, as such a share: no plan under them is below its bound.

        0 where the bound proves nothing, or where the search ended before it was known.
        """
        if self.held.bound is None:
            return 0.0
        return max(0.0, self.held.bound / self._step(self.free) - 1.0)

    @property
    def gains(self) -> dict[str, float]:
        """How much shorter a step gets without one of them, as a share of that under all."""
        held = self._step(self.held)
        return {
            name: max(0.0, 1.0 - self._step(result) / held)
            for name, result in self.without.items()
        }

    @property
    def to_blame(self) -> str | None:
        """The one without which most is gained; None where none alone gains anything."""
        name, gain = max(self.gains.items(), key=lambda item: item[1], default=("", 0.0))
        return name if gain > 0 else None

    @property
    def in_words(self) -> str:
        """What they cost and which is to blame, in a sentence."""
        if not self.held.simulation.fits:
            return self._why_not()
        if self.found <= 0:
            return "the annotations cost nothing: no better plan was found without them"
        proved = f", at least {100 * self.at_least:.1f} %" if self.at_least else ""
        blame = self.to_blame
        why = (
            f"most is gained without {blame!r}, {100 * self.gains[blame]:.1f} %"
            if blame
            else "nothing is gained without any one of them; the rest and the mesh cost that"
        )
        return f"the annotations cost {100 * self.found:.1f} %{proved}: {why}"

    def _why_not(self) -> str:
        """That nothing was found under them that fits, and what does."""
        nothing = "no plan was found under the annotations that fits the memory"
        if not self.free.simulation.fits:
            return f"{nothing}, nor without any"
        fits = [repr(name) for name, found in self.without.items() if found.simulation.fits]
        return f"{nothing}; one fits without {' or without '.join(fits) or 'any of them'}"

    @property
    def table(self) -> Table:
        """The best plan under all, without each, and without any of them."""
        columns = {"plan": Unit.TEXT, "step": Unit.SECONDS, "gained": Unit.SHARE}
        held = self._step(self.held)
        rows = [("under all annotations", held, 0.0)]
        rows += [
            (f"without {name}", self._step(self.without[name]), gain)
            for name, gain in self.gains.items()
        ]
        rows.append(("without any", self._step(self.free), 1.0 - self._step(self.free) / held))
        return Table(self.in_words, columns, tuple(rows))

    def __repr__(self) -> str:
        held, free = (format_duration(self._step(each)) for each in (self.held, self.free))
        return f"<AnnotationRegret: {held} under all annotations, {free} without>"

    def __str__(self) -> str:
        return f"{self.in_words}\n{self.table}"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    @staticmethod
    def _step(result: SearchResult) -> float:
        return result.simulation.step_time


def annotation_regret(
    annotated: Annotated, *, space: Space | None = None, **arguments: Any
) -> AnnotationRegret:
    """Search under annotations, without them, and without each of them, and compare.

    One search for every annotation (a pattern is one) and two more. Each starts from the plan that
    its annotations are completed to, and the one without any from the best under all.

    Example:
        >>> from stratagem.searcher.driver.budget import Budget
        >>> from stratagem.searcher.semi_automatic.annotated_plans import annotate
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> graph = mlp([4096, 4096, 4096], batch=32)
        >>> done = annotate(graph, cluster, {"data": 8}, {"layers.0": {"data": "sample"}})
        >>> regret = annotation_regret(done, budget=Budget(evaluations=200))
        >>> regret.to_blame, regret.found > 0
        ('layers.0', True)

    Args:
        annotated: of `annotate`.
        space: what may be searched beside what the annotations say.
        arguments: others of `search`, but the graph, the cluster, training and a start.

    Raises:
        ValueError: as `search` does, or where an argument is one of these.
    """
    check_arguments(
        "annotation_regret", annotated=(annotated, Annotated), space=(space, Space | None)
    )
    for name in ("start", "training"):
        if name in arguments:
            raise ValueError(
                f"annotation_regret was given {name}, which follows from the annotations; leave "
                "it out"
            )
    arguments = {"memory": RowMemory(), **arguments}  # Much is priced by each of the searches.
    space = space or Space()
    held = _searched(annotated, space, arguments)
    plan, asking = annotated.plan, annotated.asking
    without: dict[str, SearchResult] = {}
    for name in asking.names if len(asking.names) > 1 else ():
        fewer = complete_plan(annotated.graph, plan.cluster, asking.without(name), plan.training)
        found = _searched(fewer, space, arguments)
        # A plan under all of them is one under fewer.
        without[name] = min(held, found, key=lambda result: rank(result.simulation))
    free = search(
        annotated.graph,
        plan.cluster,
        space=space,
        training=plan.training,
        start=held.plan,
        **arguments,
    )
    if len(asking.names) == 1:
        without = {asking.names[0]: free}
    return AnnotationRegret(held, free, without)


def _searched(annotated: Annotated, space: Space, arguments: Mapping[str, Any]) -> SearchResult:
    """The best plan under annotations, which say that all is one stage."""
    said = annotated.space
    return search(
        annotated.graph,
        annotated.plan.cluster,
        training=annotated.plan.training,
        start=annotated.plan,
        space=replace(space, pipeline=said.pipeline, rules=(*space.rules, *said.rules)),
        **arguments,
    )
