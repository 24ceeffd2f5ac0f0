"""Markov chains over the choices of one problem: Metropolis–Hastings with falling temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from stratagem.searcher.annealing import _chain_kernels
from stratagem.searcher.annealing._splitmix import seeded
from stratagem.searcher.annealing.chain_state import begin_plays, own_arrays, shared_arrays
from stratagem.searcher.problem._score_kernels import OVER_MEMORY
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.problem.scoring import WholeScores, peaks_of
from stratagem.searcher.processes.worker_processes import usable_cores
from stratagem.simulator.base.arrays import Floats, Ints

WIDE_EVALUATIONS = 50_000
"""Each of the first two phases of a chain lasts at most so long, and at most half of it."""
PHASES = ((0.75, 0.03, 5e-4), (0.3, 5e-4, 1e-4), (0.005, 1e-4, 1e-5))
"""Of each phase the share of class moves, and the relative temperature at first and at last."""
SOFT = 0.2
"""Weight of what is over the memory at the begin of a chain that may cross plans that do not fit:
a twentieth of what scores count it with, to which it rises in the first phase."""
HARD = 64 * OVER_MEMORY
"""The same at the end of a chain: under the weight that scores count it with a plan that is a
little over the memory may be better than all that fit, and a chain stayed there."""
ROUND = 4000
"""Evaluations of each chain between two looks at the keyboard."""

ASKED = 100
"""Evaluations between questions of a chain whether it is time to stop: up to seconds of a large
pipeline."""


def chain_seed(seed: int, number: int) -> int:
    """The seed of a chain of a search, which numbers its chains.

    Example:
        >>> chain_seed(0, 3), chain_seed(1, 3)
        (3, 7922)
    """
    return seed * 7919 + number


def course_of(total: int, weight: float = OVER_MEMORY, twin: float = 0.0) -> Floats:
    """The phases of a chain of `total` evaluations: [phases, 7], see `_chain_kernels.TWIN`.

    Moves of classes come first: they find what all layers share. Those of single operators are
    many times cheaper to decide, and worth it when the rest has settled. `weight` is that of what
    is over the memory at the begin. It comes to what scores count in the first phase, and to
    `HARD` in the second.

    Example:
        >>> course_of(200_000)[:, 0].tolist()
        [50000.0, 100000.0, 200000.0]
    """
    ends = min(total / 2, WIDE_EVALUATIONS), min(total, 2 * WIDE_EVALUATIONS), total
    weights = (weight, OVER_MEMORY), (OVER_MEMORY, HARD), (HARD, HARD)
    rows = [
        (end, *phase, *over, twin) for end, phase, over in zip(ends, PHASES, weights, strict=True)
    ]
    return np.array(rows, dtype=np.float64)


@dataclass(eq=False)
class AnnealingChain:
    """A chain on `problem` that starts at `choice`; `advance` runs some of its `total` proposals.

    Equal arguments give equal chains, however the proposals are dealt out to calls of `advance`.
    Chains of one problem may run in threads of their own.

    Where little fits, a chain that counts what is over the memory fully from the first stays near
    its start: between two plans that fit lie others. One of a `weight` below comes to regions that
    fit by such plans, and leaves those that do not while the weight rises (simulated annealing
    with a growing penalty, as Michalewicz and Attia had it in 1994).

    Attributes:
        weight: of the relative excess over the memory in the chain's own scores, at its begin.
        twin: share of its moves of single operators that change another one, too.
        choice: the choices now.
        done: proposals that were decided.
        accepted: how many of them were accepted.
        scores: [score now, best score, whether the best fits], scores in seconds of a step (more
            where a stage is over its memory; the score now is under the weight of now).
        best: the best choices: of those that fit, or else of all, those with the least score.
    """

    problem: Problem
    choice: Ints
    total: int
    seed: int
    weight: float = OVER_MEMORY
    twin: float = 0.0
    done: int = field(init=False, default=0)
    accepted: int = field(init=False, default=0)
    scores: Floats = field(init=False)
    best: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._rng = seeded(self.seed)
        self._arrays = own_arrays(shared_arrays(self.problem))
        self._course = course_of(self.total, self.weight, self.twin)
        self.scores = np.array([np.inf, np.inf, 0.0])
        self.best = self.choice.copy()
        self.restart(self.choice)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts chains by their best choices: those that fit come before the others."""
        return not self.scores[_chain_kernels.BEST_FITS], float(self.scores[_chain_kernels.BEST])

    def restart(self, choice: Ints) -> None:
        """Go on from other choices; the best so far stays the best unless these are better."""
        self.choice = choice.copy()
        begin_plays(self._arrays.plays, self.choice)
        _chain_kernels.begin(self._arrays, self.scores, self.choice, self.best)

    def advance(self, num_evaluations: int) -> None:
        """Decide the next proposals (fewer when the chain ends before)."""
        count = min(num_evaluations, self.total - self.done)
        self.accepted += _chain_kernels.anneal(
            self._rng,
            self.done,
            count,
            self._course,
            self.scores,
            self.choice,
            self.best,
            self._arrays,
        )
        self.done += count

    def finish(self, check: Callable[[], None]) -> None:
        """Decide all proposals that are left.

        Args:
            check: asked now and then; what it raises ends the chain where it is.
        """
        while self.done < self.total:
            check()
            self.advance(ASKED)

    def score(self) -> float:
        """The score of the present choices, from scratch."""
        return WholeScores(self.problem).of(self.choice)

    def peaks(self) -> list[int]:
        """Bytes per device of each rank at its peak, under the present choices."""
        return peaks_of(self.problem, self._arrays.tensors.profiles)


def run_chains(
    chains: Sequence[AnnealingChain],
    *,
    num_threads: int | None = None,
    exchange_every: int = 0,
    after_round: Callable[[], bool] | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Run chains to their ends, each in a thread of its own, as many at once as there are cores.

    Chains meet after rounds of a fixed number of evaluations. What they find depends on their
    number, seeds and `exchange_every`, never on the number of threads or on their speed.

    Example:
        >>> from stratagem.searcher.problem.priced_skeleton import make_problem
        >>> from stratagem.searcher.space.skeletons import skeletons
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
        >>> skeleton = next(skeletons(graph, cluster))
        >>> costs = default_costs()
        >>> problem = make_problem(graph, skeleton, cluster, Training(), costs, (0, 2))
        >>> start = np.zeros(len(problem.choices), dtype=np.int64)
        >>> chains = [AnnealingChain(problem, start, 1000, seed) for seed in range(2)]
        >>> run_chains(chains)
        >>> [chain.done for chain in chains]
        [1000, 1000]

    Args:
        chains: of one problem or of several.
        num_threads: how many run at once; as many as the process may use cores when left out.
        exchange_every: evaluations of a chain between exchanges, in which the chain with the worst
            score goes on from the best choices of the chain that has the best; 0 for never. Only
            chains of one problem exchange.
        after_round: called between rounds; True ends the run, as an exception from it does.
        stop: asked now and then by each chain; if it is time, rounds end where they are.

    Raises:
        ValueError: if there are fewer threads than one, or an exchange is asked for between chains
            of several problems.
    """
    if exchange_every and len({id(chain.problem) for chain in chains}) > 1:
        raise ValueError(
            f"{len(chains)} chains of several problems cannot exchange choices: run those of each "
            "problem on their own, or leave out exchange_every"
        )
    threads = usable_cores() if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads is {threads}; it must be at least 1")
    length = min(ROUND, exchange_every) if exchange_every else ROUND
    since = 0
    with ThreadPoolExecutor(threads) as pool:
        while any(chain.done < chain.total for chain in chains):
            step = min(length, exchange_every - since) if exchange_every else length
            for _ in pool.map(lambda chain: _advance(chain, step, stop), chains):  # noqa: B023
                pass
            since += step
            if exchange_every and since == exchange_every:
                since = 0
                _exchange(chains)
            if (after_round is not None and after_round()) or (stop is not None and stop()):
                return


def _advance(chain: AnnealingChain, count: int, stop: Callable[[], bool] | None) -> None:
    """Go on for so many evaluations, unless it is time to stop."""
    if stop is None:
        chain.advance(count)
        return
    for begin in range(0, count, ASKED):
        if stop():
            return
        chain.advance(min(ASKED, count - begin))


def _exchange(chains: Sequence[AnnealingChain]) -> None:
    """The chain whose score is worst goes on from the best choices of all; ties by number."""
    open_ones = [chain for chain in chains if chain.done < chain.total]
    if not open_ones:
        return
    best = min(chains, key=lambda chain: chain.rank)
    worst = max(open_ones, key=lambda chain: float(chain.scores[0]))
    if worst is not best and worst.scores[0] > best.scores[1]:
        worst.restart(best.best)
