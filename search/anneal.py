"""Markov chains over the choices of one problem: Metropolis–Hastings with falling temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stratagem.search import _anneal, _kernels
from stratagem.search._random import seeded
from stratagem.search.chain_arrays import begin_plays, own_arrays
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
    course: np.ndarray[Any, np.dtype[np.float64]] | None = None
    scores: np.ndarray[tuple[int], np.dtype[np.float64]] = field(init=False)
    best: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self._rng = seeded(self.seed)
        self._arrays = own_arrays(self.problem.arrays)
        if self.course is None:
            self.course = np.array([[self.total, 0.75, HOT, COLD]])
        self.restart(self.choice)
        self.best = self.choice.copy()
        self.scores[1] = self.scores[0]

    def restart(self, choice: IntArray) -> None:
        """Go on from other choices; what was best stays."""
        self.choice = choice.copy()
        begin_plays(self._arrays.plays, self.choice)
        now = float(_anneal.begin(self._arrays, self.choice))
        if not hasattr(self, "scores"):
            self.scores = np.full(2, now)
        self.scores[0] = now

    def score(self) -> float:
        """The score of the present choices, from scratch."""
        p = self.problem
        block_ns = np.zeros((6, p.num_stages), dtype=np.int64)
        profiles = np.zeros((p.num_stages, 6), dtype=np.int64)
        return float(
            _kernels.score_plan(
                np.full(p.num_stages, _kernels.REPLAY, dtype=np.int64),
                self.choice,
                block_ns,
                profiles,
                *arguments_of(p),
            )
        )

    def peaks(self) -> list[int]:
        """Bytes per device of each rank at its peak, under the present choices."""
        return peaks_of(self.problem, self._arrays.tensors.profiles)

    def advance(self, num_evaluations: int) -> None:
        """Run the next proposals (fewer when the chain ends before)."""
        count = min(num_evaluations, self.total - self.done)
        self.accepted += _anneal.anneal(
            self._rng,
            self.done,
            count,
            self.course,
            self.scores,
            self.choice,
            self.best,
            self._arrays,
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
