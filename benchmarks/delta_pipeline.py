"""One move of one operator of a pipelined GPT-3, for `benchmarks.delta`.

8 stages of 12 layers on 16 GPUs each, 64 microbatches, 1F1B. A move gives one operator another
choice: its stage's forward, backward and last backward blocks are played by delta, and with their
new lengths the *macro graph*: stages × microbatches of blocks, joined by transfers. Operators that
an edge between stages touches are left alone, so the transfers stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from benchmarks.delta_cases import Proposals, change_of, join
from stratagem.searcher.space.skeletons import operator_choices, stage_meshes
from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import tensor_parallel
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine._delta_replay import play_in_full, propose_changes, reject_changes
from stratagem.simulator.engine._delta_state import DeltaState
from stratagem.simulator.engine.delta_engine import DeltaEngine
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.schedules.macro_graph import MacroGraph
from stratagem.simulator.schedules.work_kinds import BACKWARD, FORWARD, LAST_BACKWARD
from stratagem.simulator.simulation.priced_plan import PlanModel, macro_durations, plan_model
from stratagem.simulator.stage.block_tasks import stage_blocks
from stratagem.simulator.stage.stage_blocks import StageBlocks

NUM_STAGES, NUM_MICROBATCHES, NUM_LAYERS = 8, 64, 96
KINDS = (FORWARD, BACKWARD, LAST_BACKWARD)
NUM_MOVES = 300
DELTA, DELTA_MACRO, STAGE, PLAN = range(4)
"""What is played by delta: blocks; blocks and macro graph. Or what is played in full: the blocks
of the stage, or those of all stages; and the macro graph."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A plan that was played, and moves of single operators.

    Attributes:
        graphs: of each stage its forward, backward and last backward block.
        macro: stages × microbatches of blocks.
        table: the macro graph's durations in ns, [6, items].
        stages: the stage of each move.
        changes: of each move the changes of its stage's three blocks, one after the other.
    """

    graphs: tuple[TaskGraph, ...]
    macro: MacroGraph
    table: Ints
    stages: Ints
    changes: Proposals

    @property
    def num_tasks(self) -> int:
        """Tasks of all blocks and of the macro graph."""
        return sum(graph.num_tasks for graph in self.graphs) + self.macro.graph.num_tasks

    def members(self) -> tuple[Ints, Ints]:
        """Macro tasks of each stage and kind of block, and where those of each begin."""
        found = [
            np.flatnonzero((self.macro.item == s) & (self.macro.kind == kind))
            for s in range(NUM_STAGES)
            for kind in KINDS
        ]
        starts = np.cumsum([0, *(each.size for each in found)])
        return np.concatenate(found), starts.astype(np.int64)

    def makespan(self, k: int) -> int:
        """The step in ns after move k, all of it simulated in full."""
        table = self.table.copy()
        for stage in range(NUM_STAGES):
            for kind in KINDS:
                graph = self.graphs[3 * stage + kind]
                durations, sets = graph.durations.copy(), graph.resource_sets.copy()
                if stage == self.stages[k]:
                    tasks, *new = self.changes.proposal(3 * k + kind)
                    durations[tasks], sets[tasks] = new
                table[kind, stage] = simulate(
                    dataclasses.replace(graph, durations=durations, resource_sets=sets)
                ).makespan
        return simulate(self.macro.with_durations(table)).makespan


def pipelined_gpt3() -> Pipeline:
    """GPT-3 175B (Brown et al. 2020): tensor parallel in a node, data parallel between two."""
    graph = gpt(
        num_layers=NUM_LAYERS,
        hidden=12288,
        num_heads=96,
        sequence=2048,
        batch=24 * NUM_MICROBATCHES,
        tied=False,
    )
    cluster = Cluster.preset("dgx-a100", num_nodes=16, devices_per_node=8)
    model = plan_model(_plan(graph, cluster), graph, default_costs())
    table = macro_durations(model)
    blocks, base, counts = _blocks(model)
    graphs = tuple(
        each.task_graph(block, base, last=last)
        for each in blocks
        for block, last in ((each.forward, True), (each.backward, False), (each.backward, True))
    )
    stages, changes = _moves(model, blocks, graphs, base, counts)
    return Pipeline(graphs, model.macro, table, stages, changes)


def _plan(graph: OperatorGraph, cluster: Cluster) -> Plan:
    stages = []
    for s, names in enumerate(balanced_stages(graph, cluster, NUM_STAGES)):
        mesh = stage_meshes(range(16 * s, 16 * s + 16), cluster)[0]
        chosen = tensor_parallel(graph, mesh.shape, 1)
        stages.append(Stage(names, mesh, {name: chosen[name] for name in names}))
    return Plan(
        name="GPT-3",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        training=Training(),
        stages=tuple(stages),
        num_microbatches=NUM_MICROBATCHES,
    )


def _blocks(model: PlanModel) -> tuple[list[StageBlocks], Ints, Ints]:
    """Blocks of all stages with all choices; of each operator its choice, and how many it has."""
    operators = model.graph.operators
    base, counts = np.zeros((2, len(operators)), np.int64)
    blocks = []
    for stage in model.stages:
        choices = {}
        for i in stage.table.operators:
            wanted = model.plan.choice(operators[i].name)
            shape = stage.table.mesh.shape
            choices[i] = operator_choices(model.graph, operators[i], shape, (0, 2, 3))
            if wanted not in choices[i]:
                choices[i] = (wanted, *choices[i])
            base[i], counts[i] = choices[i].index(wanted), len(choices[i])
        blocks.append(stage_blocks(stage.builder.build(stage.table.operators, choices)))
    return blocks, base, counts


def _moves(
    model: PlanModel,
    blocks: Sequence[StageBlocks],
    graphs: Sequence[TaskGraph],
    base: Ints,
    counts: Ints,
) -> tuple[Ints, Proposals]:
    rng = np.random.default_rng(0)
    crossing = {i for edge, _ in model.priced.boundaries for i in (edge.producer, edge.consumer)}
    movable = [i for i in range(counts.size) if counts[i] > 1 and i not in crossing]
    stages: list[int] = []
    changes: list[tuple[Ints, Ints, Ints]] = []
    while len(stages) < NUM_MOVES:
        operator = int(rng.choice(movable))
        stage = model.plan.stage_of[model.graph.operators[operator].name]
        choices = base.copy()
        choices[operator] = rng.integers(counts[operator])
        forward, backward = blocks[stage].forward, blocks[stage].backward
        found = [
            change_of(
                blocks[stage], block, graphs[3 * stage + kind], choices, [operator], last=last
            )
            for kind, block, last in (
                (FORWARD, forward, True),
                (BACKWARD, backward, False),
                (LAST_BACKWARD, backward, True),
            )
        ]
        if any(tasks.size for tasks, _, _ in found):
            stages.append(stage)
            changes += found
    return np.array(stages), join(changes)


@njit()
def change_and_play(state: DeltaState, tasks: Ints, durations: Ints, sets: Ints) -> int:
    """Play a graph in full with changes, and undo them; return the makespan in ns."""
    graph = state.graph
    for j in range(tasks.size):
        graph.durations[tasks[j]] = durations[j]
        graph.resource_sets[tasks[j]] = sets[j]
    makespan = play_in_full(state)
    for j in range(tasks.size):
        graph.durations[tasks[j]] = state.tasks[tasks[j]].duration
        graph.resource_sets[tasks[j]] = state.tasks[tasks[j]].resources
    return makespan


class Moves(NamedTuple):
    """Moves, and what each changes: see `Pipeline`.

    Attributes:
        members: macro tasks of each block of a stage, one after the other.
        member_starts: where those of each begin.
        stages: of the moves.
        starts, tasks, durations, sets: of each move the changes of its stage's three blocks.
    """

    members: Ints
    member_starts: Ints
    stages: Ints
    starts: Ints
    tasks: Ints
    durations: Ints
    sets: Ints


class MacroChanges(NamedTuple):
    """Room for what changes in the macro graph, one entry a macro task."""

    tasks: Ints
    durations: Ints
    sets: Ints


@njit()
def play_changed(
    by_delta: bool, state: DeltaState, tasks: Ints, durations: Ints, sets: Ints
) -> tuple[int, int]:
    """Play a changed graph; return its makespan in ns, and how many tasks were played."""
    if not by_delta:
        return change_and_play(state, tasks, durations, sets), state.places.size
    ns = propose_changes(state, tasks, durations, sets)
    played = state.book[0].replayed
    reject_changes(state)
    return ns, played


@njit()
def play_moves(
    how: int,
    states: tuple[DeltaState, ...],
    macro: DeltaState,
    moves: Moves,
    work: MacroChanges,
    makespans: Ints,
) -> int:
    """Play all moves, each on its own; fill in makespans; return how many tasks were played."""
    played = 0
    for k in range(moves.stages.size):
        count = 0
        for kind in range(3):
            block = 3 * moves.stages[k] + kind
            lo, hi = moves.starts[3 * k + kind], moves.starts[3 * k + kind + 1]
            new = (moves.tasks[lo:hi], moves.durations[lo:hi], moves.sets[lo:hi])
            ns, more = play_changed(how <= DELTA_MACRO, states[block], *new)
            played += more
            for index in range(moves.member_starts[block], moves.member_starts[block + 1]):
                work.tasks[count] = moves.members[index]
                work.durations[count] = ns
                work.sets[count] = macro.tasks[moves.members[index]].resources
                count += 1
        if how == PLAN:
            for block in range(len(states)):
                if block // 3 != moves.stages[k]:
                    played += states[block].places.size
                    play_in_full(states[block])
        joined = (work.tasks[:count], work.durations[:count], work.sets[:count])
        makespans[k], more = play_changed(how == DELTA_MACRO, macro, *joined)
        played += more
    return played


@dataclass(frozen=True, eq=False)
class Player:
    """A pipeline in the arrays that `play_moves` takes."""

    pipeline: Pipeline
    states: tuple[DeltaState, ...]
    macro: DeltaState
    members: tuple[Ints, Ints]
    makespans: Ints
    work: MacroChanges

    @classmethod
    def of(cls, pipeline: Pipeline) -> Player:
        """Play a pipeline, and index it."""
        macro = DeltaEngine(pipeline.macro.with_durations(pipeline.table))
        return cls(
            pipeline=pipeline,
            states=tuple(DeltaEngine(graph).state for graph in pipeline.graphs),
            macro=macro.state,
            members=pipeline.members(),
            makespans=np.zeros(pipeline.stages.size, np.int64),
            work=MacroChanges(*np.zeros((3, pipeline.macro.graph.num_tasks), np.int64)),
        )

    def play(self, how: int, num_moves: int) -> float:
        """Play some moves in one of four ways; return how many tasks were played a move."""
        p, changes = self.pipeline, self.pipeline.changes
        flat = (changes.starts, changes.tasks, changes.durations, changes.sets)
        moves = Moves(*self.members, p.stages[:num_moves], *flat)
        played = play_moves(how, self.states, self.macro, moves, self.work, self.makespans)
        return played / num_moves
