"""A Markov chain over the choices of one problem: Metropolis–Hastings with falling temperature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stratagem.search import _kernels
from stratagem.search.problem import Problem
from stratagem.simulator.resharding import IntArray

HOT, COLD = 0.05, 0.0005
"""Relative temperatures at the start and the end of a chain."""


@dataclass(eq=False)
class Chain:
    """A chain on `problem` that starts at `choice`; `advance` runs some of its `total` proposals.

    Attributes:
        scores: [score now, best score], seconds of a step (more where a stage is over its memory).
        best: the choices with the best score.
    """

    problem: Problem
    choice: IntArray
    total: int
    seed: int
    done: int = 0
    accepted: int = 0
    scores: np.ndarray[tuple[int], np.dtype[np.float64]] = field(init=False)
    best: IntArray = field(init=False)

    def __post_init__(self) -> None:
        stages = self.problem.num_stages
        self._rng = np.random.default_rng(self.seed)
        self._block_ns = np.zeros((6, stages), dtype=np.int64)
        self._profiles = np.zeros((stages, 6), dtype=np.int64)
        self.choice = self.choice.copy()
        self.best = self.choice.copy()
        self.scores = np.full(2, self.score())

    def score(self) -> float:
        """The score of the present choices, from scratch."""
        p = self.problem
        return float(
            _kernels.score_plan(
                np.full(p.num_stages, _kernels.REPLAY, dtype=np.int64),
                self.choice,
                self._block_ns,
                self._profiles,
                *arguments_of(p),
            )
        )

    def peaks(self) -> list[int]:
        """Bytes per device of each rank at its peak, under the present choices."""
        return peaks_of(self.problem, self._profiles)

    def advance(self, num_evaluations: int) -> None:
        """Run the next proposals (fewer when the chain ends before)."""
        count = min(num_evaluations, self.total - self.done)
        p = self.problem
        operators, stages = self.choice.size, p.num_stages
        self.accepted += _kernels.anneal(
            self._rng,
            count,
            self.done,
            self.total,
            HOT,
            COLD,
            self.scores,
            self.choice,
            self.best,
            p.stage_of,
            p.moves,
            self._block_ns,
            self._profiles,
            np.empty((6, stages), dtype=np.int64),
            np.empty((stages, 6), dtype=np.int64),
            np.empty(operators, dtype=np.int64),
            np.empty(operators, dtype=np.int64),
            np.empty(stages, dtype=np.int64),
            *arguments_of(p),
        )
        self.done += count


def peaks_of(p: Problem, profiles: IntArray) -> list[int]:
    """Bytes per device of each rank at its peak, from the `profiles` of its stages."""
    ranks = range(p.capacities.size)
    return [int(_kernels.rank_peak(rank, profiles, *p.ranks)) for rank in ranks]


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
