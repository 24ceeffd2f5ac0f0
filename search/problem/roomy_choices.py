"""Choices that only save memory, left out where there is room for everything.

`ChoiceOption.saves` says of which options: to gather inputs again in backward (`Choice.regather`)
adds a conversion and frees a copy. It makes twice as many choices of an operator with weights,
four times as many pairs, and is of no use on a skeleton on which no plan can be over its memory.
That is proved by the plan that no choices make: every tensor at the largest that any pair of
choices gives it.

The lower bound of what is left (`cutting_planes`) holds for all: a plan that gathers again has
every task of the one that does not, and more, and memory binds neither. So it is with ZeRO stage 1
where 2 takes as long (see `distinct_stages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from stratagem.searcher.problem import _score_kernels
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, distinct_stages
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.operators.operator import shape_of
from stratagem.simulator.sharding.choice import OPTIONS
from stratagem.simulator.stage.shared_conversions import OPEN


def roomy_problem(
    situation: Situation,
    skeleton: Skeleton,
    options: Options,
    zero_stages: Sequence[int],
    make: Callable[[Options, Sequence[int]], Problem],
    least: float,
) -> tuple[Problem, str]:
    """The problem of a skeleton, and what was left out of it, if anything.

    Args:
        situation: model, cluster and training.
        skeleton: of the problem.
        options: of the search.
        zero_stages: that its choices may have.
        make: the problem under some options and ZeRO stages.
        least: plans from which on choices are left out; fewer are better counted through.
    """
    without = options.without_savers()
    stages = distinct_stages(zero_stages, skeleton.num_microbatches)
    left_out = _savers(options) + ["ZeRO-1 of one microbatch"] * (stages != tuple(zero_stages))
    if left_out and may_always_fit(situation, skeleton):
        problem = make(without, stages)
        if problem.num_plans > least and always_fits(problem):
            return problem, f"{' and '.join(left_out)}: every plan fits without"
    return make(options, zero_stages), ""


def _savers(options: Options) -> list[str]:
    """What only saves memory of what a search tries, as its notes have it."""
    return [each.saves for each in OPTIONS if each.saves and len(each.values(options)) > 1]


def may_always_fit(situation: Situation, skeleton: Skeleton) -> bool:
    """Whether the results of all operators of each stage, unsharded, are within its memory.

    A quick look before `always_fits`, which needs a problem with its prices.
    """
    small = situation.graph.microbatch(skeleton.num_microbatches)
    bytes_of = situation.training.bytes_of

    def result_bytes(name: str) -> int:
        operator = small.operator(name)
        return sum(
            math.prod(shape_of(made.layout, operator.sizes)) * bytes_of(made.dtype)
            for made in operator.outputs
        )

    return all(
        sum(map(result_bytes, names)) <= mesh.memory_bytes(situation.cluster)
        for names, mesh in zip(skeleton.stages, skeleton.meshes, strict=True)
    )


def always_fits(problem: Problem) -> bool:
    """Whether every plan of a problem is within its memory.

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
        >>> always_fits(problem)
        True
    """
    most, idle = _largest(problem), np.zeros_like(problem.tensors.base)
    largest = problem.tensors._replace(
        base=np.arange(len(most)),
        stride=idle,
        second_stride=idle,
        pool=most,
        gate=np.full_like(problem.tensors.gate, OPEN),
    )
    profiles = np.zeros((problem.num_stages, 6), dtype=np.int64)
    nobody = np.zeros(len(problem.choices), dtype=np.int64)
    _score_kernels.measure_stages(nobody, profiles, largest)
    return all(
        _score_kernels.rank_peak.py_func(rank, profiles, problem.ranks) <= capacity
        for rank, capacity in enumerate(problem.capacities.tolist())
    )


def _largest(problem: Problem) -> Ints:
    """The most bytes of each tensor under any choices of the operators that decide it."""
    counts = np.array([len(listed) for listed in problem.choices])
    tensors = problem.tensors
    first, second, second_stride = tensors.first, tensors.second, tensors.second_stride
    theirs = np.where((second == first) | (second_stride == 0), 1, counts[second])
    strides = tensors.stride + np.where(second == first, second_stride, 0)
    rows = np.stack([tensors.base, counts[first], strides, theirs, second_stride], axis=1)
    distinct, number = np.unique(rows, axis=0, return_inverse=True)
    most = [
        tensors.pool[at + np.arange(n)[:, None] * step + np.arange(m)[None, :] * other].max()
        for at, n, step, m, other in distinct.tolist()
    ]
    found: Ints = np.array(most, dtype=np.int64)[number.ravel()]
    return found
