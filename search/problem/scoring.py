"""Scores of plans of a problem: what its kernels are given, and the peaks that they find."""

from __future__ import annotations

from typing import Any

from stratagem.searcher.problem import _score_kernels
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.simulator.base.arrays import Ints


def peaks_of(p: Problem, profiles: Ints) -> list[int]:
    """Bytes per device of each rank at its peak, from the `profiles` of its stages."""
    ranks = range(p.capacities.size)
    return [int(_score_kernels.rank_peak(rank, profiles, *p.ranks)) for rank in ranks]


def arguments_of(p: Problem) -> tuple[Any, ...]:
    """What the kernels take of a problem, in their order."""
    return (
        p.capacities,
        p.blocks,
        p.tensors,
        p.ranks,
        p.crossings,
        p.arrivals,
        p.macro,
        p.macro_work,
        p.table,
        p.plays,
    )
