"""What would change with other hardware: the found plan priced anew, a quick search elsewhere."""

from __future__ import annotations

from dataclasses import replace

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.incumbent import ProgressReport as Progress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.schedule_traits import searched_schedules
from stratagem.simulator.base.tables import Table, Unit, Value
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.hardware.cluster import Cluster, Link
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.simulation.simulation import simulate_plan

FACTOR = 2.0
"""How much faster the faster links are."""


def hardware_changes(
    result: SearchResult,
    costs: CostModel,
    *,
    budget: Budget,
    space: Space | None = None,
    progress: Progress | None = None,
) -> Table:
    """The step with faster links and with one node more, and how each was found out.

    Args:
        result: of the search.
        costs: prices of operators, those of the search.
        budget: of the search on one node more.
        space: that of the search.
        progress: called often with a `Progress`.
    """
    ours = result.simulation.step_time
    rows: list[tuple[Value, ...]] = [("as it is", ours, 0.0, "the plan found, simulated")]
    for what, cluster, links in _faster(result.plan.cluster):
        step = _on(result, cluster, costs)
        rows.append((what, step, step / ours - 1.0, f"the same plan simulated with {links}"))
    rows.append(_one_node_more(result, costs, budget, space, progress))
    columns = {
        "what if": Unit.TEXT,
        "step": Unit.SECONDS,
        "change": Unit.SHARE,
        "how it was found out": Unit.TEXT,
    }
    note = (
        "A plan made for faster links may be another one, so theirs are the least that they would "
        "bring; the batch stays the same."
    )
    return Table("what other hardware would do", columns, tuple(rows), note)


def _faster(cluster: Cluster) -> list[tuple[str, Cluster, str]]:
    """Clusters with faster links: what is faster, the cluster, and its figures in words."""
    inside, between = cluster.intra_node, cluster.inter_node
    found = []
    if cluster.devices_per_node > 1:
        words = f"{_speeds(inside)} in a node"
        found.append(("links in a node twice as fast", _linked(cluster, inside=True), words))
    if cluster.num_nodes > 1:
        words = f"{_speeds(between)} between nodes"
        found.append(("links between nodes twice as fast", _linked(cluster, between=True), words))
    if len(found) == 2:
        both = _linked(cluster, inside=True, between=True)
        found.append(("all links twice as fast", both, "both"))
    return found


def _linked(cluster: Cluster, *, inside: bool = False, between: bool = False) -> Cluster:
    return replace(
        cluster,
        intra_node=_sped_up(cluster.intra_node) if inside else cluster.intra_node,
        inter_node=_sped_up(cluster.inter_node) if between else cluster.inter_node,
    )


def _sped_up(link: Link) -> Link:
    """The link with more bandwidth; its latencies stay."""
    return link.slowed(1 / FACTOR, latencies=False)


def _speeds(link: Link) -> str:
    return f"{FACTOR * link.bandwidth_gb_s:g} GB/s instead of {link.bandwidth_gb_s:g} GB/s"


def _on(result: SearchResult, cluster: Cluster, costs: CostModel) -> float:
    plan = replace(result.plan, cluster=cluster)
    return simulate_plan(plan, result.graph, costs).step_time


def _one_node_more(
    result: SearchResult,
    costs: CostModel,
    budget: Budget,
    space: Space | None,
    progress: Progress | None,
) -> tuple[Value, ...]:
    plan, ours = result.plan, result.simulation.step_time
    cluster = plan.cluster.resized(num_nodes=plan.cluster.num_nodes + 1)
    what = f"one node more ({cluster.num_nodes} nodes, {cluster.num_devices} devices)"
    given = replace(space or Space(headroom=result.headroom or 0.0), rewrites=0)
    if given.schedules is None and plan.schedule in searched_schedules():
        given = replace(given, schedules=(plan.schedule,))
    # Most of such a search is looking at pipelines of other depths, so they come last.
    alike = replace(given, pipeline=given.pipeline or plan.num_ranks)
    for wishes in (alike,) if given == alike else (alike, given):
        try:
            found = search(
                result.graph,
                cluster,
                space=wishes,
                costs=costs,
                training=plan.training,
                budget=replace(budget, skeletons=1, bounded=0, seed=plan.seed),
                baselines=(),
                prefer="fastest" if result.fastest is None else "simplest",
                progress=progress,
            )
        except ValueError as error:
            row: tuple[Value, ...] = what, None, None, f"a search there finds no plan: {error}"
            continue
        where = f"with {_ranks(wishes.pipeline)}" if wishes.pipeline else "with any pipeline"
        how = (
            f"a quick search there {where}: {found.evaluations:,} plans in "
            f"{format_duration(found.seconds)}, where {result.evaluations:,} were evaluated here"
        )
        if found.simulation.fits:
            step = found.simulation.step_time
            return what, step, step / ours - 1.0, how
        row = what, None, None, f"{how}; no plan that fits was found"
    return row


def _ranks(count: int) -> str:
    return "no pipeline" if count == 1 else f"{count} pipeline ranks"
