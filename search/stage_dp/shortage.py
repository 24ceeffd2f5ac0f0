"""Why nothing fits: the plan nearest to fitting, by how much it is over, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.space.schedule_traits import traits_of
from stratagem.searcher.stage_dp.closed_form_times import microbatches_held
from stratagem.searcher.stage_dp.pipeline_dp import Devices
from stratagem.searcher.stage_dp.tables import _dp_kernels as kernels
from stratagem.searcher.stage_dp.tables.limits import PipelineLimits
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain
from stratagem.simulator.base.units import format_bytes


@dataclass(frozen=True)
class PipelineShortage:
    """The least that a plan is over the memory.

    Attributes:
        over: bytes that its worst stage lacks at least, with one microbatch; 0 where that fits and
            only the microbatches in flight do not.
        stage: its number, from 0.
        num_stages: of the plan.
        first: the first operator of the stage.
        last: its last operator.
        num_microbatches: of the plan.
        remedy: what would make it fit.
    """

    over: int
    stage: int
    num_stages: int
    first: str
    last: str
    num_microbatches: int
    remedy: str

    def __str__(self) -> str:
        lacks = (
            f"lacks at least {format_bytes(self.over)} a device with one microbatch in flight"
            if self.over > 0
            else "holds one microbatch, but not all that are in flight"
        )
        return (
            f"no plan fits; nearest is a plan of {self.num_stages} stage"
            f"{'s' if self.num_stages > 1 else ''} and {self.num_microbatches} microbatch"
            f"{'es' if self.num_microbatches > 1 else ''}, where stage {self.stage} "
            f"({self.first} … {self.last}) {lacks}: {self.remedy}"
        )


def least_shortage(
    chain: OperatorChain,
    devices: Devices,
    schedule: str,
    parts: int,
    counts: Sequence[int],
    limits: PipelineLimits,
) -> PipelineShortage | None:
    """The chain of stages whose worst stage is over the memory by least; None if there is none."""
    over = np.stack([table.over for table in devices.tables])
    found: PipelineShortage | None = None
    for count in counts:
        worst, cuts = kernels.least_over(over, devices.table_of, devices.sizes, count)
        if worst >= kernels.NO_RANGE or (found is not None and worst >= found.over):
            continue
        stage = int(np.argmax(cuts[:, 2]))
        places = chain.cuts[cuts[stage, :2]]
        names = chain.graph.names
        held = microbatches_held(schedule, count, parts)[::-1][stage]
        found = PipelineShortage(
            over=max(0, int(worst)),
            stage=stage,
            num_stages=count,
            first=names[chain.operators[places[0]]],
            last=names[chain.operators[places[1] - 1]],
            num_microbatches=parts,
            remedy=_remedy(limits, schedule, held),
        )
    return found


def _remedy(limits: PipelineLimits, schedule: str, held: int) -> str:
    """What a user may change, the cheapest first."""
    ways: list[str] = []
    if traits_of(schedule).runs_ahead and held > 1:
        ways.append(f"use 1f1b, which holds fewer than the {held} microbatches of {schedule}")
    if "full" not in limits.recompute:
        ways.append("allow full recompute")
    if 3 not in limits.zero_stages:
        ways.append("allow ZeRO-3")
    if limits.tensor_ways:
        ways.append("allow more tensor-parallel ways")
    if limits.microbatches:
        ways.append("allow more microbatches")
    if limits.headroom:
        ways.append(f"leave less free than {limits.headroom}")
    return ", ".join([*ways, "take more devices or a smaller batch" if not ways else ""]).strip(
        ", "
    )
