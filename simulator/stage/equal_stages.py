"""Equal stages: what a stage's blocks and tensors look like is worked out once for each shape.

Two stages have one shape when their operators, edges and ties are equal, one by one, and have the
same rows of the cost table; they then differ in where their operators stand in the graph only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.stage.stage_blocks import StageBlocks
from stratagem.simulator.stage.tails_of_backwards import (
    with_bare_backward,
    with_parts_apart,
    with_sums_apart,
)
from stratagem.simulator.stage.tensor_lifetimes import Lifetimes, stage_lifetimes


@dataclass(eq=False)
class StageShapes:
    """Builds blocks and lifetimes, each shape once.

    `split`, `bucket_bytes`, `slowdown`, `inputs_first` and `stashes` are those of `stage_blocks`;
    `apart` says whether sync and update are there apart too, `accumulates` whether there are
    microbatches before the last, whose gradients may be summed (see `tails_of_backwards`).
    """

    split: bool = False
    bucket_bytes: int = 0
    slowdown: int = 0
    inputs_first: bool = False
    stashes: bool = False
    apart: bool = False
    accumulates: bool = False
    _shapes: dict[int, tuple[CostTable, Any]] = field(default_factory=dict)
    _blocks: dict[Any, tuple[CostTable, StageBlocks]] = field(default_factory=dict)
    _lifetimes: dict[Any, tuple[CostTable, Lifetimes]] = field(default_factory=dict)

    def blocks(self, table: CostTable) -> StageBlocks:
        """The blocks of a stage."""
        key = self._shape(table)
        if key not in self._blocks:
            made = stage_blocks(
                table,
                split=self.split,
                bucket_bytes=self.bucket_bytes,
                slowdown=self.slowdown,
                inputs_first=self.inputs_first,
                stashes=self.stashes,
            )
            if self.stashes:
                made = with_bare_backward(made)
            else:
                made = with_sums_apart(made, accumulates=self.accumulates)
            self._blocks[key] = table, with_parts_apart(made) if self.apart else made
        first, blocks = self._blocks[key]
        return blocks.moved(table.operators[0] - first.operators[0])

    def lifetimes(
        self, table: CostTable, arriving: Mapping[Edge, Ints], num_versions: int | None = None
    ) -> Lifetimes:
        """The tensors of a stage to which `arriving` bytes come from other stages.

        `num_versions` of the weights are kept where each microbatch has an update.
        """
        base = table.operators[0]
        key = (
            self._shape(table),
            _leaving(table),
            num_versions,
            tuple(
                # A producer in another stage stands for itself: its choices price the arrival.
                (edge.producer - base, edge.consumer - base, edge.slot, nbytes.tobytes())
                for edge, nbytes in arriving.items()
            ),
        )
        if key not in self._lifetimes:
            made = stage_lifetimes(table, arriving, split=self.split, num_versions=num_versions)
            self._lifetimes[key] = table, made
        first, lifetimes = self._lifetimes[key]
        return lifetimes.moved(base - first.operators[0])

    def _shape(self, table: CostTable) -> Any:
        if id(table) not in self._shapes:
            self._shapes[id(table)] = table, _shape_of(table)
        return self._shapes[id(table)][1]


def _shape_of(table: CostTable) -> tuple[Any, ...]:
    """What equal stages have in common; rows are told apart by identity."""
    base = table.operators[0]
    segments: tuple[int, ...] = ()
    if any(row.may_recompute for row in table.rows):
        segment = table.graph.segments
        segments = tuple(segment[i] - base for i in table.operators)
    return (
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
