"""Equal stages: what a stage's blocks and tensors look like is worked out once for each shape.

Two stages have one shape when their operators, edges and ties are equal, one by one, and have the
same rows of the cost table; they then differ in where their operators stand in the graph only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.pricing.recent_values import RecentValues
from stratagem.simulator.pricing.row_memory import STAGE_OPERATORS
from stratagem.simulator.sharding.step_options import StepOptions
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.stage.stage_blocks import StageBlocks
from stratagem.simulator.stage.tails_of_backwards import (
    with_bare_backward,
    with_parts_apart,
    with_sums_apart,
)
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes, stage_lifetimes

Made = TypeVar("Made")


@dataclass(eq=False)
class StageShapes:
    """Builds blocks and lifetimes, each shape once.

    `split`, `options`, `slowdown` and `stashes` are those of `stage_blocks`; `apart` says whether
    sync and update are there apart too, `accumulates` whether there are microbatches before the
    last, whose gradients may be summed (see `tails_of_backwards`). `plans` keeps those of stages
    with one choice an operator, for other pipelines too: what is made of lists of choices is
    large, and kept for this pipeline only.
    """

    split: bool = False
    options: StepOptions = field(default_factory=StepOptions)
    slowdown: int = 0
    stashes: bool = False
    apart: bool = False
    accumulates: bool = False
    plans: RecentValues[Any] = field(default_factory=lambda: RecentValues(STAGE_OPERATORS))
    _lists: dict[Any, tuple[CostTable, Any]] = field(default_factory=dict)

    def blocks(self, table: CostTable) -> StageBlocks:
        """The blocks of a stage."""
        first, blocks = self._made(
            table,
            self._blocks,
            "blocks",
            self.split,
            self.options,
            self.slowdown,
            self.stashes,
            self.apart,
            self.accumulates,
        )
        return blocks.moved(table.operators[0] - first.operators[0])

    def _blocks(self, table: CostTable) -> StageBlocks:
        made = stage_blocks(
            table,
            split=self.split,
            options=self.options,
            slowdown=self.slowdown,
            stashes=self.stashes,
        )
        if self.stashes:
            made = with_bare_backward(made)
        else:
            made = with_sums_apart(made, accumulates=self.accumulates)
        return with_parts_apart(made) if self.apart else made

    def lifetimes(
        self, table: CostTable, arriving: Mapping[Edge, Ints], num_versions: int | None = None
    ) -> Lifetimes:
        """The tensors of a stage to which `arriving` bytes come from other stages.

        `num_versions` of the weights are kept where each microbatch has an update.
        """
        base = table.operators[0]
        made = partial(
            stage_lifetimes,
            arriving=arriving,
            split=self.split,
            num_versions=num_versions,
            bucket_bytes=self.options.bucket_bytes,
        )
        # A producer in another stage stands for itself: its choices price the arrival.
        arrivals = tuple(
            (edge.producer - base, edge.consumer - base, edge.slot, nbytes.tobytes())
            for edge, nbytes in arriving.items()
        )
        first, lifetimes = self._made(
            table,
            made,
            "lifetimes",
            self.split,
            num_versions,
            self.options.bucket_bytes,
            table.derive(_leaving),
            arrivals,
        )
        return lifetimes.moved(base - first.operators[0])

    def _made(
        self, table: CostTable, make: Callable[[CostTable], Made], what: str, *settings: object
    ) -> tuple[CostTable, Made]:
        """What is made of a stage, and the first stage of its shape, which it was made of."""
        key = what, settings, table.derive(_shape_of)
        if table.is_of_plan:
            weight = len(table.operators)
            found: tuple[CostTable, Made]
            found = self.plans.get(key, lambda: (table, make(table)), weight)
            return found
        if key not in self._lists:
            self._lists[key] = table, make(table)
        return self._lists[key]


def _shape_of(table: CostTable) -> tuple[Any, ...]:
    """What equal stages have in common; rows and the graph are told apart by identity."""
    base = table.operators[0]
    segment = table.graph.segments
    segments = tuple(segment[i] - base for i in table.operators)
    return (
        id(table.graph),
        segments,
        tuple((i - base, id(table.row(i))) for i in table.operators),
        tuple(
            (e.producer - base, e.output, e.consumer - base, e.slot, id(table.edge_rows[row]))
            for e, row in zip(table.edges, table.edge_row_of, strict=True)
        ),
        tuple(
            (i - base, j - base, id(row))
            for (i, j), row in zip(table.ties, table.tie_rows, strict=True)
        ),
    )


def _leaving(table: CostTable) -> tuple[tuple[int, int], ...]:
    """Which results other stages read, and how often."""
    inside = set(table.operators)
    base = table.operators[0]
    return tuple(
        (edge.producer - base, edge.output)
        for i in table.operators
        for edge in table.graph.readers[i]
        if edge.consumer not in inside
    )
