"""Scores of plans of a problem: what its kernels are given, and the peaks that they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stratagem.searcher.problem import _score_kernels
from stratagem.searcher.problem._score_kernels import ScoredArrays
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.schedules.work_kinds import SEND
from stratagem.simulator.simulation.device_memory import DeviceMemory


def peaks_of(p: Problem, profiles: Ints) -> list[int]:
    """Bytes per device of each rank at its peak, from the `profiles` of its stages."""
    ranks = range(p.capacities.size)
    return [int(_score_kernels.rank_peak(rank, profiles, p.ranks)) for rank in ranks]


def scored_arrays(p: Problem) -> ScoredArrays:
    """What scores read of a problem; their kernels write to its work space and its table."""
    return ScoredArrays(
        capacities=p.capacities,
        blocks=p.blocks,
        tensors=p.tensors,
        ranks=p.ranks,
        crossings=p.crossings,
        arrivals=p.arrivals,
        macro=p.macro,
        table=p.table,
        plays=p.plays,
    )


class WholeScores:
    """Scores of plans from nothing: every block is played, whatever was played before.

    Args:
        problem: whose work space and table the kernels write to.

    Attributes:
        block_ns, profiles: of the last plan, as `_score_kernels.score` has them.
    """

    def __init__(self, problem: Problem) -> None:
        stages = problem.num_stages
        self.block_ns = np.zeros((SEND, stages), dtype=np.int64)
        self.profiles = np.zeros((stages, 6), dtype=np.int64)
        self._dirty = np.full(stages, _score_kernels.REPLAY, dtype=np.int64)
        self._arrays = scored_arrays(problem)

    def of(self, choice: Ints) -> float:
        """Seconds of the step of some choices, more where a rank is over its memory."""
        return float(
            _score_kernels.score_plan(
                self._dirty, choice, self.block_ns, self.profiles, self._arrays
            )
        )


def beside_waiting(whole: Problem, now: Problem, memory: Sequence[DeviceMemory]) -> Problem | None:
    """A problem in the memory that is left beside gradients that wait for late links.

    Scores know of no such gradients. So a plan may be within the memory by its score and not when
    it is simulated: what waits in it is then taken off the memory that other plans may have.

    Args:
        whole: the problem in all memory.
        now: the same, in what was left of it until now.
        memory: of each rank, when a plan of the problem is simulated.

    Returns:
        One that the plan does not fit; None where it fits the whole memory, or not even what its
        score allows it.
    """
    peaks = np.array([rank.peak for rank in memory])
    scored = np.array([rank.without_waiting for rank in memory])
    if np.all(peaks <= whole.capacities) or np.any(scored > now.capacities):
        return None
    left = np.minimum(now.capacities, whole.capacities - (peaks - scored))
    return replace(now, capacities=np.maximum(left, 1))
