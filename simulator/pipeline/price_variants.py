"""One plan under several prices: what its steps take, with blocks that are laid out once.

Prices that differ in their figures only, as a device that is a tenth slower, give a stage the same
tasks. So the tables of a plan, each with one choice an operator, are joined to one with as many
choices as there are prices, of which the k-th costs what the k-th prices say. Blocks of lists of
choices are what a search has: durations are looked up by choice (see `stage_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.pipeline.priced_pipeline import PricedPipeline
from stratagem.simulator.pricing.cost_rows import EdgeLaunches, EdgeRow, PricedTime
from stratagem.simulator.pricing.cost_table import CostTable

Row = TypeVar("Row")


class _NotAlikeError(Exception):
    """Prices under which a plan has other tasks."""


def step_variants(priced: Sequence[PricedPipeline]) -> list[int]:
    """What a step takes under each of several prices, ns.

    Args:
        priced: one plan, of whole tokens and in one direction, under each of the prices, each
            operator with one choice.

    Example:
        >>> step_variants([fast, slow])  # doctest: +SKIP
        [18_700_000, 19_100_000]
    """
    try:
        together = _joined_pipeline(priced)
    except _NotAlikeError:
        return [each.step_ns(each.first) for each in priced]
    on_parts = any(stage.cells.split for stage in together.placed)
    found = []
    for k, each in enumerate(priced):
        # On which cells a conversion is depends on its path, which is another where links are.
        own = replace(together, builders=each.builders) if on_parts else together
        durations = own.block_durations(np.full_like(each.first, k))
        each.fill_crossings(durations, each.first)
        found.append(simulate(together.macro.with_durations(durations)).makespan)
    return found


def _joined_pipeline(priced: Sequence[PricedPipeline]) -> PricedPipeline:
    joined: dict[tuple[int, ...], Any] = {}

    def once(make: Callable[[Sequence[Row]], Row], rows: Sequence[Row]) -> Row:
        """Equal stages have the same rows, by which they are told."""
        key = tuple(map(id, rows))
        if key not in joined:
            joined[key] = make(rows)
        found: Row = joined[key]
        return found

    def table(tables: Sequence[CostTable]) -> CostTable:
        first = tables[0]
        for other in tables[1:]:
            alike = first.row_of == other.row_of and first.edge_row_of == other.edge_row_of
            if not alike or first.edges != other.edges or first.ties != other.ties:
                raise _NotAlikeError
        rows, edges, ties = (
            zip(*(getattr(each, name) for each in tables), strict=True)
            for name in ("rows", "edge_rows", "tie_rows")
        )
        return replace(
            first,
            rows=tuple(once(_joined_row, each) for each in rows),
            edge_rows=tuple(once(_joined_edge, each) for each in edges),
            tie_rows=tuple(once(_joined_row, each) for each in ties),
        )

    tables = tuple(map(table, zip(*(each.tables for each in priced), strict=True)))
    choices = tuple(each * len(priced) for each in priced[0].choices)
    return replace(priced[0], tables=tables, choices=choices)


def _joined_edge(rows: Sequence[EdgeRow]) -> EdgeRow:
    """Shares are numbered anew: those of one price are told from those of all others."""
    count = len(rows)
    numbered = [
        each
        if each.shares is None
        else replace(each, shares=tuple(np.where(s < 0, s, s * count + k) for s in each.shares))
        for k, each in enumerate(rows)
    ]
    return _joined_row(numbered)


def _joined_row(rows: Sequence[Row]) -> Row:
    """Rows field by field; what is said of all choices together must be the same."""
    names = [each.name for each in fields(rows[0])]  # type: ignore[arg-type]
    joined = {name: _joined([getattr(row, name) for row in rows]) for name in names}
    return replace(rows[0], **joined)  # type: ignore[type-var]


def _joined(values: Sequence[Any]) -> Any:
    """What one choice each has, by choice; by pair of choices on the diagonal, else nothing."""
    first = values[0]
    if any(type(each) is not type(first) for each in values):
        raise _NotAlikeError
    if isinstance(first, PricedTime | EdgeLaunches):
        return _joined_row(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values) if first.ndim == 1 else _diagonal(values)
    if isinstance(first, tuple):
        if first and isinstance(first[0], np.ndarray):
            return tuple(map(_joined, zip(*values, strict=True)))
        return tuple(each for value in values for each in value)
    if any(each != first for each in values):
        raise _NotAlikeError
    return first


def _diagonal(values: Sequence[Ints]) -> Ints:
    return np.diag([int(each.item()) for each in values])
