"""Every plan of a small problem, scored: the truth that a search and its bound are held to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.problem._exhaustive_kernels import Decided, PlanOrder, PlanWalk, try_plans
from stratagem.searcher.problem._score_kernels import MEASURE, REPLAY
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.scoring import scored_arrays
from stratagem.searcher.problem.tensors_touched import stages_touched
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import (
    ZERO_STAGES,
    Skeleton,
    operator_choices,
    skeletons,
)
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.work_kinds import SEND

BATCH = 1 << 15
"""Plans between two looks at the keyboard."""


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best of all plans of a problem.

    Attributes:
        choice: its choices, as positions in `Problem.choices`.
        score: seconds of its step, times more than 1 where it does not fit.
        fits: whether it fits; then it is the fastest that does. Else no plan fits, and it is the
            one whose fullest device is over its memory by the least share.
        num_plans: how many plans there are.
    """

    choice: Ints
    score: float
    fits: bool
    num_plans: int


def exhaustive(problem: Problem, *, limit: int = 1_000_000) -> Optimum:
    """Go through every plan of a problem with the kernel that scores all plans, and keep the best.

    Of equally good plans it is the first, counting the choices of the last operator fastest. Once
    a plan fits, those are passed over of which some resource alone is busy for longer than the
    best takes: none of them can be better.

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
        >>> best = exhaustive(problem)
        >>> best.fits, best.num_plans
        (True, 42)

    Args:
        problem: a skeleton with its prices.
        limit: how many plans there may be; a million take seconds.

    Raises:
        ValueError: there are more plans than `limit`.
    """
    num_choices = np.array([len(options) for options in problem.choices], dtype=np.int64)
    num_plans = math.prod(num_choices.tolist())
    if num_plans > limit:
        raise ValueError(
            f"{problem.graph.name!r} has {num_plans:.3g} plans on {problem.skeleton}, more than "
            f"the limit of {limit:.3g}: raise the limit, or anneal"
        )
    choice = np.zeros(num_choices.size, dtype=np.int64)
    order = PlanOrder(num_choices, np.flatnonzero(num_choices > 1), _touches(problem))
    walk = PlanWalk(
        choice=choice,
        dirty=np.full(problem.num_stages, REPLAY, dtype=np.int64),
        known=np.zeros(1, dtype=np.int64),
        best=choice.copy(),
        scores=np.full(2, np.inf),
        block_ns=np.zeros((SEND, problem.num_stages), dtype=np.int64),
        profiles=np.zeros((problem.num_stages, 6), dtype=np.int64),
    )
    decided, scored = _decided(problem, order.free), scored_arrays(problem)
    done = 0
    while done < num_plans:
        done += try_plans(BATCH, order, walk, decided, scored)
    return Optimum(walk.best, float(walk.scores[1]), bool(walk.scores[0] == 0.0), num_plans)


def exhaustive_plans(
    situation: Situation,
    *,
    schedule: str = "1f1b",
    zero_stages: Sequence[int] = ZERO_STAGES,
    limit: int = 1_000_000,
) -> Iterator[Plan]:
    """The best plan of every skeleton, by trying all; none where there are too many plans.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
        >>> given = Situation(mlp([64, 64], batch=8), cluster, Training(), default_costs())
        >>> [plan.num_microbatches for plan in exhaustive_plans(given)]
        [1, 2, 4, 8, 1, 2, 4, 8]

    Args:
        situation: the model, the cluster, the training and its prices.
        schedule: of the pipelines.
        zero_stages: that a choice may have.
        limit: how many plans all skeletons together may have.

    The skeletons are those of `skeletons`, nothing is recomputed.
    """
    s = situation
    listed = skeletons(s.graph, s.cluster, schedule=schedule, costs=s.costs, training=s.training)
    candidates = list(listed)
    if count_plans(situation.graph, candidates, zero_stages, limit=limit) > limit:
        return
    for skeleton in candidates:
        problem = make_problem(
            situation.graph,
            skeleton,
            situation.cluster,
            situation.training,
            situation.costs,
            zero_stages,
            situation.memory,
        )
        best = exhaustive(problem, limit=limit)
        fingerprint = situation.graph.fingerprint
        yield problem.plan(best.choice, name="exhaustive", seed=0, fingerprint=fingerprint)


def count_plans(
    graph: OperatorGraph,
    candidates: Iterable[Skeleton],
    zero_stages: Sequence[int] = ZERO_STAGES,
    *,
    limit: float = math.inf,
) -> int:
    """How many plans some skeletons have in all, without pricing them.

    Counting stops at the first skeleton with which they are more than `limit`.
    """
    counts: dict[tuple[int, str, tuple[int, ...]], int] = {}
    total = 0
    for skeleton in candidates:
        small = graph.microbatch(skeleton.num_microbatches)
        plans = 1
        for names, mesh in zip(skeleton.stages, skeleton.meshes, strict=True):
            for name in names:
                key = skeleton.num_microbatches, name, mesh.shape
                if key not in counts:
                    choices = operator_choices(
                        small, small.operator(name), mesh.shape, zero_stages
                    )
                    counts[key] = len(choices)
                plans *= counts[key]
        total += plans
        if total > limit:
            break
    return total


def _touches(problem: Problem) -> Ints:
    """Per operator and stage what is to be done anew when its choice changes."""
    found = np.zeros((len(problem.choices), problem.num_stages), dtype=np.int64)
    for i in range(len(problem.choices)):
        found[i, stages_touched(problem, i)] = MEASURE
        found[i, problem.stage_of[i]] = REPLAY
    return found


def _decided(problem: Problem, free: Ints) -> Decided:
    """Which tasks of the blocks that a step plays are decided with each `free` operator."""
    depth_of = np.zeros(len(problem.choices), dtype=np.int64)
    depth_of[free] = np.arange(free.size)
    blocks = problem.blocks
    offsets, (gate_starts, gate_operators, _, _) = blocks.task_offsets, blocks.gates
    looked_up = (blocks.first, blocks.stride, blocks.second, blocks.second_stride, blocks.gate)
    rows, depths = [], []
    for k, (_, _, block, inner) in enumerate(problem.plays.tolist()):
        tasks = np.arange(offsets[block], offsets[block + 1])
        where = (blocks.inner_base if inner else blocks.base)[tasks]
        tasks, where = tasks[where > 0], where[where > 0]
        columns = [c[tasks] for c in looked_up]
        rows.append(np.column_stack([np.full_like(tasks, k), where, *columns]))
        depth = np.maximum(depth_of[columns[0]], depth_of[columns[2]])
        for row in np.flatnonzero(columns[-1] >= 0).tolist():
            begin, end = gate_starts[columns[-1][row] : columns[-1][row] + 2]
            rivals = depth_of[gate_operators[begin:end]]
            depth[row] = max(int(depth[row]), int(rivals.max(initial=0)))
        depths.append(depth)
    depth = np.concatenate(depths)
    order = np.argsort(depth, kind="stable")
    return Decided(
        starts=np.searchsorted(depth[order], np.arange(free.size + 1)).astype(np.int64),
        tasks=np.concatenate(rows)[order],
        loads=_loads(problem),
        spent=np.zeros((free.size + 1, len(problem.plays), NUM_RESOURCES), dtype=np.int64),
    )


def _loads(problem: Problem) -> Ints:
    """Per resource of the macro graph how often it plays the block of each row of `plays`.

    A task that takes the time of another kind of block off its own counts that as played less
    often, or as nothing where that is not played so often.
    """
    macro, graph = problem.macro_graph, problem.macro_graph.graph
    row_of = {(kind, stage): k for k, (stage, kind, _, _) in enumerate(problem.plays.tolist())}
    whole = np.zeros((graph.num_resources, len(row_of)), dtype=np.int64)
    less = np.zeros_like(whole)
    for task in range(graph.num_tasks):
        item, held = int(macro.item[task]), int(graph.resource_sets[task])
        rows = [row_of.get((int(kind), item)) for kind in (macro.kind[task], macro.less[task])]
        resources = graph.set_resources[graph.set_offsets[held] : graph.set_offsets[held + 1]]
        if macro.less[task] < 0 and rows[0] is not None:
            whole[resources, rows[0]] += 1
        elif rows[0] is not None and rows[1] is not None:
            less[resources, rows[0]] += 1
            less[resources, rows[1]] -= 1
    both = whole + less
    return np.unique(np.concatenate([whole, both[(both >= 0).all(axis=1)]]), axis=0)
