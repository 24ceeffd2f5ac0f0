"""The best choices on a skeleton: integer programs, Markov chains from the best starts, windows.

Chains alone come within 0.01 % of all three from starts that are near the best, in 53 to 72 % of
the time, bounds and prices in it (Llama 3 8B on 32 H100s, GPT-2 on 16 A100s).

What they find is simulated. Where it then takes more memory than its score says, as gradients wait
for a late link, all are asked again for plans in the memory that is left beside those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stratagem.searcher.annealing.chains import SOFT, AnnealingChain, chain_seed, run_chains
from stratagem.searcher.improvement.choice_program import MOST_PARTS, IntraProgram
from stratagem.searcher.improvement.windows import improve_by_windows
from stratagem.searcher.problem._score_kernels import OVER_MEMORY
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.problem.scoring import beside_waiting
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.simulation.simulation import Simulation

WEIGHTS = (OVER_MEMORY, OVER_MEMORY, SOFT, SOFT)
"""Of what is over the memory when each chain begins. So many chains run on a skeleton: so many
cores can help, and one core makes the same plan."""
TWINS, TWIN_OPERATORS = (0.0, 0.3, 0.3, 0.0), 100
"""Of models of fewer operators the share of moves that change two operators in each of these: one
takes more memory where the other takes less, which single moves come to only by plans that do not
fit."""
FULL, LONGER, LONG = 0.9, 4, 32_000
"""Where the best start fills a rank to more than this, chains that cross plans that do not fit
take a longer way: they have so many times the evaluations of the others, but no more for it than
these if their share is less."""
STARTS = 2
"""Of all starts the best ones that chains go on from, in turn."""
WINDOWS = 24
"""Windows that are solved on a skeleton."""
LARGE_PROGRAM = 400_000
"""Operators times choices above which no integer program over a whole skeleton is tried."""
MOST_REGIONS = 8
"""Regions that such a program solves anew: its solution is a start for chains."""
MOST_CHANGED = 8
"""Changes of single operators from choices that constraints do not allow as a whole."""
MOST_TIGHTENED = 3
"""How often choices are looked for in less memory."""


@dataclass(frozen=True)
class Turn:
    """The turn of a skeleton in a search.

    Attributes:
        AGAIN: the number of the first skeleton that is searched again.
        evaluations: of its chains.
        number: which of the skeletons it is.
        of: how many there are.
        by_chains: whether chains search it alone, from starts that are near enough to the best.
    """

    AGAIN: ClassVar[int] = 2_000

    evaluations: int
    number: int
    of: int = 1
    by_chains: bool = False


@dataclass(frozen=True)
class ChoiceHooks:
    """What a search does while choices are looked for.

    Attributes:
        admits: whether constraints on plans as wholes allow choices.
        simulate: a plan of the problem.
        found: takes every simulation.
        after_round: told of the chains after each round; True ends them.
        stop: whether it is time to stop.
    """

    admits: Callable[[Ints], bool]
    simulate: Callable[[Ints], Simulation]
    found: Callable[[Simulation], object]
    after_round: Callable[[Sequence[AnnealingChain]], bool]
    stop: Callable[[], bool]


class SkeletonChoices:
    """Looks for the best choices on a skeleton.

    Args:
        seed: of the search.
        number: of the skeleton, by which its chains are numbered.
        num_threads: chains that run at the same time; all cores when left out.
        watch: what the search does meanwhile.
        by_chains: whether chains do it alone.

    Attributes:
        evaluations: of all chains until now.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        num_threads: int | None,
        watch: ChoiceHooks,
        *,
        by_chains: bool = False,
    ) -> None:
        self._seed, self._number, self._num_threads = seed, number, num_threads
        self._watch, self._is_by_chains = watch, by_chains
        self.evaluations = 0

    def look(self, problem: Problem, starts: Sequence[Ints], evaluations: int) -> Simulation:
        """The best plan found, simulated.

        Args:
            problem: the choices of a skeleton.
            starts: choices known to be good, at least one.
            evaluations: of all chains together, each time that they run; more where little fits
                (see `LONGER`).
        """
        known, tighter = list(starts), problem
        best: Simulation | None = None
        for _ in range(1 + MOST_TIGHTENED):
            choice = self._chosen(tighter, known, evaluations)
            choice = admitted(tighter, choice, self._watch.admits)
            simulation = self._watch.simulate(choice)
            self._watch.found(simulation)
            if best is None or simulation.fits:
                best = simulation
            left = beside_waiting(problem, tighter, simulation.memory)
            if left is None or self._watch.stop():
                break
            known, tighter = [*starts, choice], left
        assert best is not None  # there is at least one turn
        return best

    def _chosen(self, problem: Problem, starts: Sequence[Ints], evaluations: int) -> Ints:
        if self._is_by_chains:
            return self._by_chains(problem, starts, evaluations)
        program = IntraProgram(problem)
        choice = self._by_chains(problem, [*starts, *self._programmed(program)], evaluations)
        if self._watch.stop():
            return choice
        return improve_by_windows(program, choice, max_windows=WINDOWS, stop=self._watch.stop)

    def _programmed(self, program: IntraProgram) -> list[Ints]:
        """The best choices under a sum of costs, as OptCNN and Alpa have it."""
        choices = program.problem.choices
        if len(choices) * max(map(len, choices)) > LARGE_PROGRAM or self._watch.stop():
            return []
        solution = program.solve(
            program.sum_weights(),
            memory=True,
            alike=True,
            max_parts=MOST_PARTS,
            max_regions=MOST_REGIONS,
            tolerance=1e-3,
        )
        return [solution.choice] if solution.choice is not None else []

    def _by_chains(self, problem: Problem, starts: Sequence[Ints], evaluations: int) -> Ints:
        """The best choices that chains from the best starts come to."""
        ranked = sorted(
            (AnnealingChain(problem, start, 1, 0) for start in starts),
            key=lambda chain: chain.rank,
        )
        share, rest = divmod(evaluations, len(WEIGHTS))
        fullest = max(np.array(ranked[0].peaks()) / problem.capacities)
        extra = max(0, min(LONGER * share, LONG) - share) if fullest > FULL else 0
        is_small = len(problem.choices) < TWIN_OPERATORS
        chains = [
            AnnealingChain(
                problem,
                ranked[k % min(STARTS, len(ranked))].choice,
                share + (k < rest) + (extra if weight < OVER_MEMORY else 0),
                chain_seed(self._seed, self._number * len(WEIGHTS) + k),
                weight,
                twin if is_small else 0.0,
            )
            for k, (weight, twin) in enumerate(zip(WEIGHTS, TWINS, strict=True))
        ]
        try:
            run_chains(
                chains,
                num_threads=self._num_threads,
                after_round=lambda: self._watch.after_round(chains),
                stop=self._watch.stop,
            )
        except KeyboardInterrupt:
            best = min(chains, key=lambda chain: chain.rank)
            self._watch.found(self._watch.simulate(best.best))
            raise
        self.evaluations += sum(chain.done for chain in chains)
        return min([*chains, *ranked], key=lambda chain: chain.rank).best


def admitted(problem: Problem, choice: Ints, admits: Callable[[Ints], bool]) -> Ints:
    """Some choices, or, where no plan may make them, the best of what changes downhill come to.

    Chains, windows and programs choose for each operator what is allowed for it. That one of them
    has so many tensor ways, as `Constraints.tensor` asks for, is a matter of the plan.

    Args:
        problem: with lists of what is allowed.
        choice: what was chosen.
        admits: whether a plan may be made of choices.

    Returns:
        The same choices where no single change helps.
    """
    if admits(choice):
        return choice
    judge, limit = AnnealingChain(problem, choice, 1, 0), math.inf
    for _ in range(MOST_CHANGED):
        near = []
        for i, options in enumerate(problem.choices):
            for number in range(len(options)):
                judge.restart(_changed(choice, i, number))
                near.append((float(judge.scores[0]), i, number))
        better = (each for each in sorted(near) if each[0] < limit)
        found = next((each for each in better if admits(_changed(choice, *each[1:]))), None)
        if found is None:
            break
        limit, choice = found[0], _changed(choice, *found[1:])
    return choice


def _changed(choice: Ints, operator: int, number: int) -> Ints:
    other = choice.copy()
    other[operator] = number
    return other
