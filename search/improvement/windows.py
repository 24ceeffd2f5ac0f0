"""Windows: some operators chosen anew by integer programs, the rest fixed, judged by simulation.

Costs are weighted by what the simulated step waits for, so the program moves work off the critical
path instead of making sums small. The simulator decides whether a solution is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from stratagem.searcher.annealing.chains import AnnealingChain
from stratagem.searcher.annealing.move_lists import moves_of
from stratagem.searcher.improvement.choice_program import MOST_PARTS, IntraProgram
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.simulator.base.arrays import Ints

SIZES = (24, 8)
"""Operators in a window, pass after pass."""


def improve_by_windows(
    program: IntraProgram,
    choice: Ints,
    *,
    max_windows: int = 40,
    stop: Callable[[], bool] = lambda: False,
) -> Ints:
    """Solve windows of operators one after the other and keep what the simulator likes better.

    The solution of a window is tried for all stretches of equal operators too: layers repeat.

    Args:
        program: of the problem to choose for.
        choice: where to start.
        max_windows: how many windows to solve at most.
        stop: asked between windows.

    Returns:
        The best choices met.
    """
    problem = program.problem
    judge = AnnealingChain(problem, choice, total=1, seed=0)
    best, solved = choice.copy(), 0
    weights = program.path_weights(best)
    for size in SIZES:
        for window in _windows(problem, size):
            if solved >= max_windows or stop():
                return best
            solved += 1
            found = program.solve(weights, fixed=best, window=window, max_parts=MOST_PARTS).choice
            if found is None or np.array_equal(found, best):
                continue
            before = judge.rank
            for candidate in (found, _everywhere(problem, best, found, window)):
                judge.restart(candidate)
            if judge.rank < before:
                best = judge.best.copy()
                weights = program.path_weights(best)
    return best


def _windows(problem: Problem, size: int) -> Iterator[list[int]]:
    """Neighbouring operators with a choice, windows overlapping by half, stage after stage."""
    open_ones = [i for i, options in enumerate(problem.choices) if len(options) > 1]
    for begin in range(0, max(1, len(open_ones) - size // 2), size // 2):
        yield open_ones[begin : begin + size]


def _everywhere(problem: Problem, best: Ints, found: Ints, window: list[int]) -> Ints:
    """What changed in a window, done to all operators of the same class too."""
    classes = moves_of(problem).class_of
    changed = {int(classes[i]): int(found[i]) for i in window if found[i] != best[i]}
    wide = found.copy()
    for i, kind in enumerate(classes.tolist()):
        if kind in changed and best[i] != changed[kind]:
            wide[i] = changed[kind]
    return wide
