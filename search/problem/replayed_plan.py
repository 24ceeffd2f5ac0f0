"""A plan whose blocks are played again where choices change, by delta re-simulation.

The blocks of a plan are played once. A change of a few operators is played by delta re-simulation
of their stages' blocks (see `engine.delta_engine`), then the pipeline of blocks is played again:
two levels, the first by what changed only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stratagem.searcher.problem import _score_kernels
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.problem.scoring import peaks_of, scored_arrays
from stratagem.searcher.problem.tensors_touched import stages_touched
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine.delta_engine import DeltaEngine
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.plan.plan import Stage
from stratagem.simulator.schedules.work_kinds import SEND
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.stage.shared_conversions import Sharing
from stratagem.simulator.stage.stage_blocks import Block

Played = tuple[float, tuple[int, ...], bool]
"""Seconds of a step, bytes per device of each rank at its peak without gradients that wait for
links, whether all ranks fit."""


class ReplayedPlan:
    """The choices of a problem's operators, and what they make of a step.

    Args:
        problem: the pipeline and its prices.
        choice: where it begins, as positions in `Problem.choices`.

    Attributes:
        choice: the one that was proposed last, unless it was rejected.
        now: what was accepted does.
        replayed: tasks of blocks that the last proposal played again.
    """

    def __init__(self, problem: Problem, choice: Ints) -> None:
        self._problem, self.choice, stages = problem, choice, problem.num_stages
        self._touched = {
            (number, direction): _touched(block, stage.sharing)
            for number, stage in enumerate(problem.stage_blocks)
            for direction, block in enumerate(stage.all)
        }
        self._block_ns = np.zeros((SEND, stages), dtype=np.int64)
        self._profiles = np.zeros((stages, 6), dtype=np.int64)
        self.engines = [DeltaEngine(self._task_graph(k)) for k in range(self._num_plays)]
        self.now = self._outcome(np.full(stages, _score_kernels.REPLAY))
        self._before: tuple[Ints, Ints, Ints] | None = None
        self._played: list[DeltaEngine] = []
        self._proposed = self.now

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of the plan, with all that was accepted."""
        problem, choice = self._problem, self.choice if self._before is None else self._before[0]
        numbers = zip(problem.graph.names, problem.choices, choice.tolist(), strict=True)
        return problem.skeleton.staged({name: every[k] for name, every, k in numbers})

    def choices(self, i: int) -> tuple[Choice, ...]:
        """Those of an operator."""
        return self._problem.choices[i]

    def propose(self, changes: Mapping[int, Choice]) -> Played:
        """What a step would be if some operators had other choices, of those that they have."""
        self._before = self.choice.copy(), self._block_ns.copy(), self._profiles.copy()
        for i, choice in changes.items():
            self.choice[i] = self._problem.choices[i].index(choice)
        dirty = np.zeros(self._problem.num_stages, dtype=np.int64)
        dirty[[s for i in changes for s in stages_touched(self._problem, i)]] = (
            _score_kernels.MEASURE
        )
        self._played = self._play(changes, dirty)
        self._proposed = self._outcome(dirty)
        return self._proposed

    def accept(self) -> None:
        """Keep what was proposed."""
        for engine in self._played:
            engine.accept()
        self.now, self._before, self._played = self._proposed, None, []

    def reject(self) -> None:
        """Forget what was proposed, if anything."""
        if self._before is not None:
            self.choice, self._block_ns, self._profiles = self._before
            for engine in self._played:
                engine.reject()
            self._before, self._played = None, []

    @property
    def replayed(self) -> int:
        """How many tasks of blocks the last proposal had to play again."""
        return sum(engine.replayed for engine in self._played)

    def _play(self, changes: Mapping[int, Choice], dirty: Ints) -> list[DeltaEngine]:
        """Play the blocks of changed stages by delta; the engines with a proposal pending."""
        played: list[DeltaEngine] = []
        for k in range(self._num_plays):
            stage, kind = self._problem.plays[k, :2].tolist()
            if not dirty[stage]:
                continue
            blocks = self._problem.stage_blocks[stage]
            block, last = blocks.of_kind(kind)
            touched = self._touched[stage, blocks.all.index(block)]
            tasks = sorted({t for i in changes for t in touched.get(i, ())})
            if tasks:
                new = blocks.look_up(block, self.choice, np.array(tasks), last=last)
                self._block_ns[kind, stage] = self.engines[k].propose(tasks, *new)
                played.append(self.engines[k])
        return played

    def _outcome(self, dirty: Ints) -> Played:
        """Play the pipeline of blocks, and measure memory."""
        problem = self._problem
        score = float(
            _score_kernels.score_plan(
                dirty, self.choice, self._block_ns, self._profiles, scored_arrays(problem)
            )
        )
        peaks = peaks_of(problem, self._profiles)
        over = max(
            (peak - int(capacity)) / int(capacity)
            for peak, capacity in zip(peaks, problem.capacities, strict=True)
        )
        # The score of a plan over its memory is its time times more than 1.
        step = score / (1.0 + _score_kernels.OVER_MEMORY * max(over, 0.0))
        return step, tuple(peaks), over <= 0

    @property
    def _num_plays(self) -> int:
        return int(self._problem.plays.shape[0])

    def _task_graph(self, k: int) -> TaskGraph:
        stage, kind = (int(each) for each in self._problem.plays[k, :2])
        blocks = self._problem.stage_blocks[stage]
        block, last = blocks.of_kind(kind)
        return blocks.task_graph(block, self.choice, last=last)


def _touched(block: Block, sharing: Sharing) -> dict[int, list[int]]:
    """Per operator the tasks of a block whose look-up it takes part in."""
    found: dict[int, list[int]] = {}
    busy = (block.base > 0) | (block.inner_base > 0)
    for task in np.flatnonzero(busy).tolist():
        found.setdefault(int(block.first[task]), []).append(task)
        if block.second_stride[task]:
            found.setdefault(int(block.second[task]), []).append(task)
        for i in sharing.rivals(int(block.gate[task])).tolist() if block.gate[task] >= 0 else ():
            found.setdefault(i, []).append(task)
    return found
