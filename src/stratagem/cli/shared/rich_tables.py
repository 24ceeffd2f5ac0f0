"""Results as tables in a terminal, for the command line and the examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from stratagem.runs.predicted_and_measured import Comparison
from stratagem.simulator.base import tables as results
from stratagem.simulator.base.tables import Unit
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.simulation.simulation import Simulation


def strategy_table(
    simulations: Mapping[str, Simulation],
    *,
    title: str = "",
    told: Mapping[str, str] | None = None,
    draws: Mapping[str, tuple[float, float]] | None = None,
) -> Table:
    """Plans by name, the first one emphasised: step time, memory, whether they fit.

    Args:
        simulations: of the plans.
        title: of the table.
        told: by name what is said of whether plans fit, where that is more than yes and no.
        draws: by name in which share of drawn errors of the prices a plan is the best, and what it
            loses at worst, where that is known.
    """
    table = Table(title=Text(title) if title else None, title_justify="left", title_style="bold")
    table.add_column("strategy")
    table.add_column("predicted\nstep", justify="right")
    table.add_column("peak memory\nper device", justify="right")
    table.add_column("fits")
    for heading in ("best in\nshare of draws", "lost\nat worst") if draws else ():
        table.add_column(heading, justify="right")
    for number, (name, simulation) in enumerate(simulations.items()):
        table.add_row(
            Text(name),
            format_duration(simulation.step_time),
            format_bytes(simulation.peak_memory),
            (told or {}).get(name) or _whether_fits(simulation),
            *(f"{100 * figure:.1f} %" for figure in (draws or {}).get(name, ())),
            style="bold" if number == 0 else None,
            end_section=number == 0,
        )
    return table


def _whether_fits(simulation: Simulation) -> str:
    return "yes" if simulation.fits else f"no, {_missing(simulation)} too much"


def _missing(simulation: Simulation) -> str:
    return format_bytes(max(stage.peak - stage.capacity for stage in simulation.memory))


def comparison_table(comparison: Comparison, *, title: str = "") -> Table:
    """Where a device's time goes, predicted beside measured."""
    table = Table(title=Text(title) if title else None, title_justify="left", title_style="bold")
    table.add_column("time of a device in a step")
    for heading in ("predicted", "measured", "error"):
        table.add_column(Text(heading), justify="right")
    for number, row in enumerate(comparison.rows):
        table.add_row(
            Text(row.what),
            format_duration(row.predicted),
            format_duration(row.measured),
            Text(row.error),
            style="bold" if number == 0 else None,
            end_section=number == 0,
        )
    if comparison.notes:
        table.caption = Text(" ".join(comparison.notes))
    return table


def result_table(result: results.Table, *, most: int | None = None) -> Table:
    """A table of results, of which the first `most` rows; numbers stand on the right."""
    shown = result if most is None else result.head(most)
    table = Table(title=Text(shown.title), title_justify="left", title_style="bold")
    for heading, unit in shown.columns.items():
        table.add_column(Text(heading), justify="left" if unit is Unit.TEXT else "right")
    for row in shown.texts():
        table.add_row(*map(Text, row))
    return table


def simple_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Plain columns of text."""
    table = Table()
    for heading in headings:
        table.add_column(Text(heading))
    for row in rows:
        table.add_row(*map(Text, row))
    return table
