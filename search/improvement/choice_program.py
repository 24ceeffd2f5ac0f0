"""Integer programs over the choices of a skeleton: all of them, or a window with the rest fixed.

The objective is a weighted sum of the look-ups that the simulator reads (see `linear_measures`).
With the number of times that each task runs as its weight it is the objective of OptCNN (Jia et
al. 2018) and of Alpa (Zheng et al. 2022), in which nothing overlaps. With weights from the
simulated critical path it is what a step waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratagem.searcher.annealing.move_lists import moves_of
from stratagem.searcher.ilp.problem.instance import CostEdge, Device, Instance, MemoryUse
from stratagem.searcher.ilp.solve import IlpSolution, solve
from stratagem.searcher.problem.linear_measures import (
    BlockLookups,
    MeasureTables,
    crossing_lookups,
)
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.engine.critical_path import critical_path
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.schedules.work_kinds import NUM_KINDS

OFF_PATH = 0.05
"""Weight in a window of a task that the step does not wait for, where one that it does has 1."""

MOST_PARTS = 8
"""Relaxations that a program may take where it is one step of many, over a skeleton or a window:
a limit that is the same on every machine."""


_Combined = tuple[Sequence[Floats], list[Floats], dict[tuple[int, int], Floats]]
"""Weights, and the nodes and pairs under them."""


@dataclass(eq=False)
class IntraProgram:
    """The choices of a problem as an integer program, its objective a weighted sum of tasks.

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
        >>> program = IntraProgram(problem)
        >>> program.solve(program.sum_weights()).status.value
        'optimal'
    """

    problem: Problem

    def __post_init__(self) -> None:
        self._last: _Combined | None = None
        played = sorted({(int(s), int(k)) for s, k in self.problem.plays[:, :2]})
        self.blocks = [BlockLookups(self.problem, *key) for key in played]
        self._tables = MeasureTables(
            [len(c) for c in self.problem.choices],
            [*(block.lookups() for block in self.blocks), crossing_lookups(self.problem)],
        )

    def sum_weights(self) -> list[Floats]:
        """Every task as often as a step runs it: nothing overlaps, no stage waits.

        What several readers may share they pay for in equal parts.
        """
        macro = self.problem.macro_graph
        works = ~macro.repeats
        rests = works & (macro.less >= 0)
        times = np.zeros((NUM_KINDS, self.problem.table.shape[1]))
        np.add.at(times, (macro.kind[works], macro.item[works]), 1.0)
        np.add.at(times, (macro.less[rests], macro.item[rests]), -1.0)
        rows = self.problem.crossings
        return [
            *(b.share * times[b.kind, b.stage] for b in self.blocks),
            times[rows[:, 0], rows[:, 1]],
        ]

    def path_weights(self, choice: Ints) -> list[Floats]:
        """The same, tasks that blocks do not wait for under `choice` at `OFF_PATH`."""
        weights = self.sum_weights()
        for k, block in enumerate(self.blocks):
            stage = self.problem.stage_blocks[block.stage]
            graph = stage.task_graph(block.block, choice, last=block.last)
            path = [step.task for step in critical_path(graph, simulate(graph))]
            weights[k] *= np.where(np.isin(block.tasks, path), 1.0, OFF_PATH)
        return weights

    def solve(
        self,
        weights: Sequence[Floats],
        *,
        fixed: Ints | None = None,
        window: Sequence[int] = (),
        memory: bool = False,
        alike: bool = False,
        max_parts: int | None = None,
        max_regions: int | None = None,
        tolerance: float = 1e-6,
        seconds: float | None = None,
    ) -> IlpSolution:
        """Choose for all operators, or for those of a `window` beside choices that are `fixed`.

        Args:
            weights: of the rows of tasks, from `sum_weights` or `path_weights`; a list that was
                given before is taken as unchanged.
            fixed: choices of the operators that are not in the window.
            window: indices of the operators to choose for; all if nothing is fixed.
            memory: whether what is kept from forward to backward, and state, must fit.
            alike: whether operators of repeated layers choose alike, which makes large models
                small; the optimum among such choices.
            max_parts, max_regions: limits of the branch and bound, and of the search for better
                solutions (see `ilp.solve`).
            tolerance: relative gap that is good enough.
            seconds: that it may take; as many as it takes when left out.

        Returns:
            The solution; its choices are numbers in `problem.choices` of all operators.
        """
        nodes, pairs = self._combined(weights)
        kept = [np.arange(len(c)) for c in self.problem.choices]
        if fixed is not None:
            inside = set(window)
            kept = [k if i in inside else fixed[i : i + 1] for i, k in enumerate(kept)]
        costs = tuple(node[k] for node, k in zip(nodes, kept, strict=True))
        cut: dict[tuple[int, bytes, bytes], Floats] = {}
        edges: list[CostEdge] = []
        for (i, j), matrix in pairs.items():
            if fixed is not None and len(kept[i]) * len(kept[j]) == 1:
                continue
            key = (id(matrix), kept[i].tobytes(), kept[j].tobytes())
            if key not in cut:
                cut[key] = matrix[np.ix_(kept[i], kept[j])]
            edges.append(CostEdge(i, j, cut[key]))
        uses, devices = self._memory(kept) if memory else ((), ())
        names = tuple(op.name for op in self.problem.graph.operators)
        instance = Instance(costs, tuple(edges), uses, devices, names)
        found = solve(
            instance,
            seconds=seconds,
            tolerance=tolerance,
            max_parts=max_parts,
            max_regions=max_regions,
            tied=self._classes() if alike else (),
        )
        if found.choice is not None:
            full = [int(k[c]) for k, c in zip(kept, found.choice.tolist(), strict=True)]
            found.choice[:] = full
        return found

    def _combined(
        self, weights: Sequence[Floats]
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Nodes and pairs, kept for the next call: windows come under the same weights."""
        if self._last is None or self._last[0] is not weights:
            self._last = weights, *self._tables.combine(weights)
        return self._last[1:]

    def _classes(self) -> list[list[int]]:
        """Operators of one stage that are priced alike and fed alike."""
        found: dict[tuple[int, int, int], list[int]] = {}
        classes, stages = moves_of(self.problem).class_of, self.problem.stage_of
        for i, options in enumerate(self.problem.choices):
            key = (int(stages[i]), int(classes[i]), len(options))
            found.setdefault(key, []).append(i)
        return [group for group in found.values() if len(group) > 1]

    def _memory(self, kept: Sequence[Ints]) -> tuple[tuple[MemoryUse, ...], tuple[Device, ...]]:
        """One row a rank: state, and what waits for backward in its fullest situation.

        Tensors that two operators decide count with the least that the first one's choice leaves.
        """
        p = self.problem
        rank_stages, starts, situations, held_starts, held = p.ranks
        tensors, sizes, pool = p.tensors, p.tensors.sizes, p.tensors.pool
        base, first, stride, second = tensors.base, tensors.first, tensors.stride, tensors.second
        step, birth, death = tensors.second_stride, tensors.birth, tensors.death
        stage_of = np.repeat(np.arange(len(sizes)), np.diff(tensors.starts))
        uses: list[MemoryUse] = []
        for rank in range(p.capacities.size):
            waiting = np.zeros(p.num_stages)
            for k in range(starts[rank], starts[rank + 1]):
                held_now = np.zeros(p.num_stages)
                held_now[situations[k, 0]] += 1
                for stage, count, _ in held[held_starts[k] : held_starts[k + 1]]:
                    held_now[stage] += count
                waiting = np.maximum(waiting, held_now)
            copies = np.zeros(len(base))
            state = birth < 0
            copies[state] = rank_stages[rank][stage_of[state]]
            n = sizes[stage_of]
            kept_rows = ~state & (birth < n) & (n <= death)
            copies[kept_rows] = waiting[stage_of[kept_rows]]
            totals: dict[int, Floats] = {}
            for row in np.flatnonzero(copies).tolist():
                i, j = int(first[row]), int(second[row])
                mine = base[row] + kept[i] * stride[row]
                if step[row] == 0:
                    values = pool[mine]
                elif i == j:
                    values = pool[mine + kept[i] * step[row]]
                else:
                    values = pool[mine[:, None] + kept[j][None, :] * step[row]].min(axis=1)
                totals[i] = totals.get(i, np.zeros(len(kept[i]))) + copies[row] * values
            uses += [
                MemoryUse(i, 0, 1, total.astype(np.int64), rank)
                for i, total in sorted(totals.items())
            ]
        devices = tuple(
            Device(f"rank {rank}", int(capacity)) for rank, capacity in enumerate(p.capacities)
        )
        return tuple(uses), devices
