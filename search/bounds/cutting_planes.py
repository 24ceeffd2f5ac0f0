"""A lower bound on the simulated step of every plan of a problem, whatever its choices.

**Claim.** Let c be the choices of a plan on a skeleton and T(c) its simulated step. Then

    T(c) ≥ Σ_b Σ_q y_bq · f_bq(c) + Σ_p μ_p · s_p(c) + Σ_m ν_m · (bytes_m(c) / capacity_m − 1)

for every plan that fits, where p are paths of the macro graph, b blocks (a stage and a direction),
q measures of a block, m moments of a rank, all multipliers are at least 0, Σ_p μ_p = 1, and
Σ_q y_bq = Σ_p μ_p · n_pb with n_pb the number of times that path p runs block b.

**Proof.** Tasks start after their predecessors end and contention only makes them longer. So a
play is at least as long as the tasks along any path: T(c) ≥ Σ_b n_pb · t_b(c) + s_p(c), t_b the
makespan of a block and s_p the transfers on the path. (A backward and the rest of it, with its
sync, where a path has both, are as long as that block: n_pb counts it and not the backward. The
rest is never on a path without the backward. What links do of a block, played alone, is one of its
own.) The same holds with weights μ. A rank runs
its blocks in the order of its schedule, which is in the macro graph, so paths know of it. A
block's makespan is at least the tasks along a path of *its* graph, less waits that only some plans
have (`sure_waits`), and at least the busy time of each of its resources, which serve one task at a
time: that is each f_bq, whatever overlaps; and so is a path that is left for what a resource has
to do meanwhile (`block_measures`).
(Readers of a tensor may have a conversion or a copy in common, which only one of n edges then has.
As a load, and in memory, each counts with 1/n. On a path it counts once whoever has it, as all of
them wait for it from the same tensor on.) So
t_b ≥ Σ_q λ_q f_bq for weights λ that sum to 1. The last sum is at most 0 where a plan fits. ∎

The right side is a sum of look-ups by the choices of one or two operators (`linear_measures`), so
its minimum over *all* choices can be bounded by a dynamic program along a spanning forest
(`spanning_forest`), for any multipliers. The best multipliers are found by cutting planes (Kelley
1960): each round adds the choices found to a linear program, and with them what binds there: the
paths that are longest under them and the moments at which they are over the memory. Every round
yields a valid bound, the best one counts. Cuts are per rank (Birge and Louveaux 1988): what each
rank takes is at most what its part of any choices met makes of it, so a plan need not be met as a
whole. Choices met on the way are plans too, and often good ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from stratagem.searcher.bounds.block_measures import BlockMeasures, MeasureForm
from stratagem.searcher.bounds.multipliers import Multipliers, scaled
from stratagem.searcher.bounds.spanning_forest import Pair, minimise_forest, spanning_forest
from stratagem.searcher.problem import _score_kernels
from stratagem.searcher.problem.linear_measures import (
    BlockLookups,
    LinearMeasure,
    Lookups,
    MeasureTables,
    crossing_lookups,
    longest_path,
)
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.problem.scoring import WholeScores
from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.schedules.work_kinds import SEND

MAX_PATHS = 12
"""Paths that are kept of the macro graph."""
MOST_MEASURES = {MeasureForm.PATH: 12, MeasureForm.PASSAGE: 24}
"""Measures that are kept of a block."""
FIT_ROUNDS = 8
"""Cutting planes that are spent on proving that no plan fits."""
STEP = 0.5
"""How far a round's multipliers go from the best ones towards the linear program's."""


@dataclass(frozen=True, eq=False)
class Bound:
    """No plan of the problem that fits takes less than `seconds` a step.

    Infinite where no plan fits at all. `choice` is the best plan met on the way and `score` what
    the annealer would score it. `binding` names what the bound is made of, in shares of it.
    `is_full` says whether some choices met were over the memory, which then counts in the bound.
    """

    seconds: float
    choice: Ints
    score: float
    rounds: int
    binding: tuple[tuple[str, float], ...]
    is_full: bool


def lower_bound(
    problem: Problem,
    choice: Ints,
    *,
    rounds: int = 20,
    tolerance: float = 0.005,
    target: float = np.inf,
    least: float = 0.0,
    wanted: float = 0.0,
    memory: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Bound:
    """Bound the simulated step of every plan of `problem` from below.

    Example:
        >>> from stratagem.searcher.problem.priced_skeleton import make_problem
        >>> from stratagem.searcher.space.skeletons import skeletons
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
        >>> skeleton = next(skeletons(graph, cluster))
        >>> problem = make_problem(graph, skeleton, cluster, Training(), default_costs(), (0, 2))
        >>> start = np.zeros(len(problem.choices), dtype=np.int64)
        >>> bound = lower_bound(problem, start)
        >>> 0 < bound.seconds <= bound.score
        True

    Args:
        problem: a skeleton with its prices.
        choice: a good plan, whose paths come first.
        rounds: how many cutting planes at most.
        tolerance: relative gap to the best plan met at which it stops.
        target: seconds; it stops as soon as the bound is above.
        least: seconds below which a bound is of no use; it stops where none that is made of the
            paths, loads and moments known can be above, and the last round found no others.
        wanted: seconds that it is to come to: as long as it is below, and may come there, it takes
            up to twice the rounds.
        memory: False bounds plans that do not fit, too, and plans that recompute more: that only
            adds tasks and time.
        check: called before every round; what it raises ends the work.
    """
    relaxation = _Relaxation(problem, memory)
    relaxation.learn(choice)
    if choice.any():
        # A poor plan alone would know none of the paths that bind in better ones.
        relaxation.learn(np.zeros_like(choice))
    relaxation.span()
    number = 0
    if relaxation.is_full and not relaxation.may_fit():
        relaxation.seconds = np.inf

    def is_done() -> bool:
        best = min(relaxation.score * (1.0 - tolerance), target)
        ended = relaxation.has_converged or relaxation.limit < least
        return relaxation.seconds >= best or ended

    def may_go_on() -> bool:
        short = relaxation.seconds < wanted <= relaxation.limit
        return number < (2 * rounds if short else rounds)

    while may_go_on() and not is_done():
        check()
        number += 1
        relaxation.round()
    return Bound(
        seconds=relaxation.seconds,
        choice=relaxation.choice,
        score=relaxation.score,
        rounds=number,
        binding=relaxation.binding(),
        is_full=relaxation.is_full,
    )


@dataclass(frozen=True, eq=False)
class _Moment:
    """The share of a rank's memory that tensors (rows of look-ups) take in a situation."""

    name: tuple[int, int, int]
    rows: Ints
    share: LinearMeasure


@dataclass(eq=False)
class _MacroPath:
    """How often each block is on a path of the macro graph, and the transfers on it."""

    tasks: bytes
    times: dict[tuple[int, int], int]
    sends: LinearMeasure


class _Relaxation:
    """The measures, the columns met so far, and the best bound."""

    def __init__(self, problem: Problem, memory: bool) -> None:
        self.problem, self._memory = problem, memory
        self.seconds, self.score = 0.0, np.inf
        self.choice = np.zeros(len(problem.choices), dtype=np.int64)
        self.has_converged = False
        self.limit = np.inf
        played = {(int(s), int(k)) for s, k in problem.plays[:, :2]}
        self._blocks = {key: BlockMeasures(BlockLookups(problem, *key)) for key in sorted(played)}
        self._measures = {key: block.loads() for key, block in self._blocks.items()}
        self._paths: list[_MacroPath] = []
        self._moments: list[_Moment] = []
        self._met: list[Ints] = []
        self._crossings = _sure_crossings(problem)
        self._tensors = _tensor_lookups(problem)
        self._rank_of = problem.ranks.stages.argmax(axis=0).tolist()
        self._best: Multipliers | None = None
        self._kept: tuple[Multipliers, tuple[list[Floats], dict[Pair, Floats]]] | None = None
        self._forest: tuple[Pair, ...] = ()
        self._scores = WholeScores(problem)

    @property
    def is_full(self) -> bool:
        """Whether some choices met were over the memory."""
        return bool(self._moments)

    # -- what a plan shows ---------------------------------------------------------------------

    def learn(self, choice: Ints, *, paths: bool = True) -> None:
        """Simulate a plan; remember the moments that bind under it and, if asked, the paths."""
        score = self._scores.of(choice)
        if score < self.score:
            self.score, self.choice = score, choice.copy()
        if paths:
            self._learn_macro()
            for key in sorted({key for path in self._paths for key in path.times}):
                self._learn_path(key, choice)
        if self._memory:
            self._learn_moments(choice)
        self._met.append(choice.copy())

    def _learn_macro(self) -> None:
        macro = self.problem.macro_graph
        durations = macro.task_ns(self.problem.table).astype(np.float64)
        tasks = longest_path(macro.graph.successor_offsets, macro.graph.successors, durations)
        if len(self._paths) >= MAX_PATHS or any(p.tasks == tasks.tobytes() for p in self._paths):
            return
        times: dict[tuple[int, int], int] = {}
        joins = np.zeros((self.problem.table.shape[0], self.problem.table.shape[1]))
        columns = (each[tasks].tolist() for each in (macro.kind, macro.item, macro.less))
        for k, i, before in zip(*columns, strict=True):
            if k < SEND:
                times[i, k] = times.get((i, k), 0) + 1
            else:
                joins[k, i] += 1
            if before >= 0:
                times[i, before] -= 1
        # What is not played takes nothing: what links do of a stage that has no sums to make.
        times = {key: count for key, count in times.items() if count and key in self._blocks}
        lookups, kinds, items = self._crossings
        sends = LinearMeasure(lookups, joins[kinds, items])
        self._paths.append(_MacroPath(tasks.tobytes(), times, sends))

    def _learn_path(self, key: tuple[int, int], choice: Ints) -> None:
        known = self._measures[key]
        left = {
            form: most - sum(measure.form is form for measure in known)
            for form, most in MOST_MEASURES.items()
        }
        if max(left.values()) <= 0:
            return
        for found in self._blocks[key].path_and_passage(choice):
            if left[found.form] > 0 and not any(found.is_like(measure) for measure in known):
                known.append(found)

    def _learn_moments(self, choice: Ints) -> None:
        """The moments at which ranks are over their memory."""
        problem = self.problem
        _, starts, situations, held_starts, held = problem.ranks
        for rank in range(problem.capacities.size):
            peak = int(_score_kernels.rank_peak(rank, self._scores.profiles, problem.ranks))
            if peak <= problem.capacities[rank]:
                continue
            totals = [
                self._scores.profiles[situations[k, 0], 3 + situations[k, 1]]
                + sum(
                    h[1] * self._scores.profiles[h[0], 1] + h[2] * self._scores.profiles[h[0], 2]
                    for h in held[held_starts[k] : held_starts[k + 1]]
                )
                for k in range(starts[rank], starts[rank + 1])
            ]
            worst = int(starts[rank] + int(np.argmax(totals)))
            place = self._fullest_place(choice, *(int(v) for v in situations[worst]))
            name = (rank, worst, place)
            if any(moment.name == name for moment in self._moments):
                continue
            copies = self._copies(rank, worst, place)
            rows = np.flatnonzero(copies)
            sharers = problem.tensor_sharing.share_of(problem.tensors.gate[rows])
            shares = copies[rows] / sharers / float(problem.capacities[rank])
            self._moments.append(
                _Moment(name, rows, LinearMeasure(self._tensors.some(rows), shares))
            )

    def _fullest_place(self, choice: Ints, stage: int, which: int) -> int:
        tensors = self.problem.tensors
        starts, sizes, birth, death = tensors.starts, tensors.sizes, tensors.birth, tensors.death
        rows = np.arange(starts[stage], starts[stage + 1])
        rows = rows[birth[rows] >= 0]
        nbytes = self._tensors.some(rows).values(choice)
        n = int(sizes[stage])
        change = np.zeros(3 * n + 1)
        np.add.at(change, birth[rows], nbytes)
        np.add.at(change, death[rows] + 1, -nbytes)
        alive = np.cumsum(change)[which * n : (which + 1) * n]
        return which * n + int(np.argmax(alive))

    def _copies(self, rank: int, situation: int, place: int) -> Floats:
        """How many copies of each tensor a rank holds at a moment."""
        rank_stages, _, situations, held_starts, held = self.problem.ranks
        tensors = self.problem.tensors
        starts, sizes, birth, death = tensors.starts, tensors.sizes, tensors.birth, tensors.death
        stage_of = np.repeat(np.arange(len(sizes)), np.diff(starts))
        weights = np.where((birth < 0) & (rank_stages[rank][stage_of] > 0), 1.0, 0.0)
        runs = situations[situation, 0]
        moving = birth >= 0
        weights[moving & (stage_of == runs) & (birth <= place) & (place <= death)] += 1.0
        for stage, waiting, late in held[held_starts[situation] : held_starts[situation + 1]]:
            n = sizes[stage]
            mine = moving & (stage_of == stage)
            weights[mine & (birth < n) & (n <= death)] += waiting
            weights[mine & (birth < 2 * n) & (2 * n <= death)] += late
        return weights

    # -- whether anything fits -----------------------------------------------------------------

    def may_fit(self) -> bool:
        """Whether some plan may fit; False is proved, by one rank that is over whatever it does.

        A rank that fits is at most at its capacity at every moment, hence in every mean of
        moments. So nothing fits if the least of such a mean, over all choices, is above.
        """
        for _ in range(FIT_ROUNDS):
            ranks = sorted({moment.name[0] for moment in self._moments})
            means = {rank: self._hardest_mean(rank) for rank in ranks}
            self._least_memory({k: v for mean in means.values() for k, v in mean.items()})
            if max(map(self._fullness, range(self.problem.capacities.size))) <= 1.0:
                return True
            worst = max(ranks, key=lambda rank: self._mean_met_last(means[rank]))
            if self._mean_met_last(means[worst]) > 1.0 and self._least_memory(means[worst]) > 1.0:
                return False
        return True

    def _fullness(self, rank: int) -> float:
        """What share of its memory a rank takes under the choices met last."""
        peak = int(_score_kernels.rank_peak(rank, self._scores.profiles, self.problem.ranks))
        return peak / float(self.problem.capacities[rank])

    def _mean_met_last(self, weights: dict[int, float]) -> float:
        last = self._met[-1]
        return sum(v * self._moments[k].share.value(last) for k, v in weights.items())

    def _hardest_mean(self, rank: int) -> dict[int, float]:
        """Weights of a rank's moments under which it is fullest for the best of choices met."""
        mine = [k for k, moment in enumerate(self._moments) if moment.name[0] == rank]
        shares = np.column_stack([self._moments[k].share.under(self._met) for k in mine])
        above = np.column_stack([-shares, np.ones(len(shares))])
        goal, total = np.zeros(len(mine) + 1), np.ones((1, len(mine) + 1))
        goal[-1], total[0, -1] = -1.0, 0.0
        most = [*[(0, None)] * len(mine), (None, None)]
        solved = scipy.optimize.linprog(
            goal, above, np.zeros(len(shares)), total, [1.0], most, method="highs-ds"
        )
        assert solved.status == 0, solved.message
        found = np.maximum(solved.x[:-1], 0.0)
        return dict(zip(mine, (found / found.sum()).tolist(), strict=True))

    def _least_memory(self, weights: dict[int, float]) -> float:
        """At most the least of a sum of moments, over all choices; learns those that reach it."""
        at = Multipliers(memory=[weights.get(k, 0.0) for k in range(len(self._moments))])
        value, choice = minimise_forest(*self._priced(at), self._forest)
        self.learn(choice, paths=False)
        return value

    # -- the dual ------------------------------------------------------------------------------

    def span(self) -> None:
        """Choose the pairs that the dynamic program follows: those that cost most on average."""
        start = self._start()
        self._tables = MeasureTables([len(c) for c in self.problem.choices], self._parts())
        self._forest = self._heaviest_forest(start)
        self._best = None
        self._try(start)

    def _heaviest_forest(self, at: Multipliers) -> tuple[Pair, ...]:
        """The pairs that cost most on average at some multipliers."""
        _, pairs = self._priced(at)
        # Repeated layers share their matrices.
        matrices = {id(matrix): matrix for matrix in pairs.values()}
        means = {number: float(matrix.mean()) for number, matrix in matrices.items()}
        heavy = {pair: means[id(matrix)] for pair, matrix in pairs.items()}
        light = {pair: 0.0 for pair in self._tables.pairs if pair not in heavy}
        return spanning_forest(len(self.problem.choices), {**light, **heavy})

    def _priced(self, at: Multipliers) -> tuple[list[Floats], dict[Pair, Floats]]:
        """Node vectors and pair matrices at some multipliers; those asked for last are kept."""
        if self._kept is None or self._kept[0] is not at:
            self._kept = None  # They may be large: not two of them at once.
            self._kept = at, self._tables.combine(self._weights(at))
        return self._kept[1]

    def _span_anew(self, at: Multipliers, known: float) -> None:
        """Choose the pairs by other multipliers, if what they bound with these grows so.

        A poor plan has pairs on its longest paths that cost little under good multipliers, and
        those that do are counted with their least.
        """
        forest = self._forest
        self._forest = self._heaviest_forest(at)
        if self._forest != forest and self._try(at) <= known:
            self._forest = forest

    def round(self) -> None:
        """Solve the linear program over the columns, and ask the dynamic program.

        Its optimum is above what any multipliers of the measures known come to, as it knows of
        some choices only: `limit`, where the round finds no more measures.
        """
        known = self._num_measures
        proposed = self._solve_master()
        assert self._best is not None
        before = self.seconds
        self._try(self._best.toward(proposed, STEP))
        if self.seconds <= before * (1.0 + 1e-4):
            found = self._try(proposed)
            if self.seconds <= before * (1.0 + 1e-4):
                self._span_anew(proposed, found)
        limit = self._master_value
        self.has_converged = self.seconds >= limit * (1.0 - 1e-3)
        self.limit = limit if self._num_measures == known else np.inf

    @property
    def _num_measures(self) -> int:
        measures = sum(map(len, self._measures.values()))
        return measures + len(self._paths) + len(self._moments)

    def binding(self) -> tuple[tuple[str, float], ...]:
        """What the best bound is made of."""
        if self._best is None or self.seconds <= 0 or not np.isfinite(self.seconds):
            return ()
        shares: dict[str, float] = {}
        names = {0: "computing", 1: "link in node", 2: "link between nodes", 3: "host"}
        for key, weight in self._best.block.items():
            found = self._measures[key[:2]][key[2]].by_resource(self._met[-1])
            for resource, ns in found.items():
                name = names.get(resource, "chain of tasks")
                shares[name] = shares.get(name, 0.0) + weight * ns
        total = sum(shares.values()) or 1.0
        ordered = sorted(shares.items(), key=lambda pair: -pair[1])
        return tuple((name, value / total) for name, value in ordered if value > 0)

    def _start(self) -> Multipliers:
        """All on the path that is longest under the plan given."""
        found = Multipliers({}, [1.0], [0.0] * len(self._moments))
        for key, times in self._paths[0].times.items():
            path = next(q for q, m in enumerate(self._measures[key]) if m.form is MeasureForm.PATH)
            found.block[*key, path] = float(times)
        return found

    def _parts(self) -> list[Lookups]:
        parts = [
            each.block.lookups(resource)
            for each in self._blocks.values()
            for resource in range(NUM_RESOURCES + 1)
        ]
        return [*parts, self._crossings[0], self._tensors]

    def _weights(self, at: Multipliers) -> list[Floats]:
        """Weights of the rows of `_parts`."""
        weights: list[Floats] = []
        for key, each in self._blocks.items():
            mine = [np.zeros(len(each.block.tasks)) for _ in range(NUM_RESOURCES + 1)]
            for q, measure in enumerate(self._measures[key]):
                weight = at.block.get((*key, q), 0.0)
                for part in measure.parts:
                    mine[part.resource][part.rows] += weight * part.weights
            weights += mine
        sends = np.zeros(len(self._crossings[1]))
        for mu, path in zip(at.path, self._paths, strict=False):
            sends += mu * path.sends.weights
        nbytes = np.zeros(len(self._tensors.base))
        for nu, moment in zip(at.memory, self._moments, strict=False):
            nbytes[moment.rows] += nu * moment.share.weights
        return [*weights, sends, nbytes]

    def _try(self, at: Multipliers) -> float:
        """The bound at some multipliers, in s; the choices that reach it are learnt from."""
        value, choice = minimise_forest(*self._priced(at), self._forest)
        seconds = (value - sum(at.memory)) * 1e-9
        if self._best is None or seconds > self.seconds:
            self.seconds, self._best = max(seconds, self.seconds), at
        self.learn(choice)
        return seconds

    def _solve_master(self) -> Multipliers:
        """Multipliers that are best against all choices met so far."""
        on_paths = sorted({key for path in self._paths for key in path.times})
        names = [(*key, q) for key in on_paths for q in range(len(self._measures[key]))]
        scale = max(self.score * 1e9, 1.0) if np.isfinite(self.score) else 1e9
        met, rank_of = self._met, self._rank_of
        values = [-self._measures[i, k][q].under(met) / scale for i, k, q in names]
        values += [-path.sends.under(met) / scale for path in self._paths]
        values += [1.0 - moment.share.under(met) for moment in self._moments]
        groups = [rank_of[i] for i, _, _ in names]
        groups += [len(self.problem.capacities)] * len(self._paths)
        groups += [moment.name[0] for moment in self._moments]
        parts = sorted(set(groups))
        above = scipy.sparse.vstack([_cuts(values, groups, parts, part) for part in parts])
        width, paths = len(values) + len(parts), range(len(names), len(names) + len(self._paths))
        equal = np.zeros((1 + len(on_paths), width))
        equal[0, paths] = 1.0
        for row, key in enumerate(on_paths, start=1):
            equal[row, [k for k, name in enumerate(names) if name[:2] == key]] = 1.0
            equal[row, paths] = [-float(path.times.get(key, 0)) for path in self._paths]
        right = np.zeros(1 + len(on_paths))
        right[0] = 1.0
        goal = np.zeros(width)
        goal[len(values) :] = -1.0
        most = [
            *[(0, None)] * paths.stop,
            *[(0, 1e4)] * len(self._moments),
            *[(None, 1e6)] * len(parts),
        ]
        solved = scipy.optimize.linprog(
            goal, above, np.zeros(above.shape[0]), equal, right, most, method="highs-ds"
        )
        assert solved.status == 0, solved.message
        x = np.maximum(solved.x[: len(values)], 0.0)
        self._master_value = -float(solved.fun) * scale * 1e-9
        y, mu, nu = x[: len(names)], x[paths], x[paths.stop :] * scale
        return scaled(
            dict(zip(names, y.tolist(), strict=True)), mu, nu, [p.times for p in self._paths]
        )


def _cuts(
    values: Sequence[Floats], groups: Sequence[int], parts: Sequence[int], part: int
) -> scipy.sparse.csr_array:
    """Rows by which what a part of the plan takes is at most what choices met make of it."""
    mine = [k for k, group in enumerate(groups) if group == part]
    rows = np.unique(np.column_stack([values[k] for k in mine]), axis=0)
    cuts = scipy.sparse.lil_array((len(rows), len(values) + len(parts)))
    cuts[:, mine] = rows
    cuts[:, len(values) + parts.index(part)] = 1.0
    return cuts.tocsr()


def _sure_crossings(problem: Problem) -> tuple[Lookups, Ints, Ints]:
    """What surely crosses between stages: each way, of tensors that may go together the first."""
    rows = problem.crossings
    _, first = np.unique(rows[:, [6, 0]], axis=0, return_index=True)
    first.sort()
    return crossing_lookups(problem).some(first), rows[first, 0], rows[first, 1]


def _tensor_lookups(problem: Problem) -> Lookups:
    held = problem.tensors
    looked_up = held.base, held.first, held.stride, held.second, held.second_stride
    return Lookups(held.pool, *looked_up)
