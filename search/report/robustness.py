"""How sure the choice of a plan is, under the errors that the cost model states."""

from __future__ import annotations

from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.robustness.robust_choice import DRAWS, Robustness, drawn_steps
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default


def robustness(
    result: SearchResult, *, costs: CostModel | None = None, draws: int = DRAWS, seed: int = 0
) -> Robustness:
    """How often the plan found is the best of those compared if prices are off, and what is lost.

    Errors are drawn by group (products and attention, other kernels, updates, links in a node,
    links between nodes), one factor a draw for all that a group prices and for all plans, as large
    as the cost model states (see `price_errors`). Steps are taken to be linear in the factors
    (`StepSlopes`), so that a plan is priced six times whatever the number of draws.

    Example:
        >>> sure = sg.robustness(result)  # doctest: +SKIP
        >>> sure.in_words  # doctest: +SKIP
        'the best of 15 plans in 72% of 100 draws of errors; at worst it takes 0.2 % more than …'

    Args:
        result: of a search; its plan, the fastest where that is another one, and those of its
            baselines that leave its headroom free are compared. It may have such figures already
            (`SearchResult.robustness`).
        costs: prices of operators, those of the search; the device model when left out.
        draws: how often errors are drawn.
        seed: of the draws.

    Raises:
        ValueError: an argument of another type; if nothing is to be drawn, or the plan found does
            not fit: then there is no choice to be sure of.
    """
    check_arguments(
        "robustness", result=(result, SearchResult), draws=(draws, int), seed=(seed, int)
    )
    if not result.simulation.fits:
        raise ValueError("the plan found does not fit the memory, so there is no choice to judge")
    prices = costs_or_default(costs)
    return drawn_steps(result.graph, result.compared, prices, draws=draws, seed=seed)
