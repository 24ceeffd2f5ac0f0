"""A problem as the arrays that annealing works on: what is shared, and one chain's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from stratagem.searcher.annealing._block_replays import (
    BOOKS,
    PLAY,
    STARTS,
    TOUCH,
    Changes,
    Plays,
    state_of,
)
from stratagem.searcher.annealing._chain_kernels import NUM_ITEMS, NUM_NUMBERS, Arrays
from stratagem.searcher.annealing._memory_tree import Tensors
from stratagem.searcher.annealing._pipeline_play import CLOSED, ORDERED, QUEUED, Pipeline
from stratagem.searcher.annealing.move_lists import moves_of
from stratagem.searcher.problem._score_kernels import QueuedPipeline
from stratagem.searcher.problem.priced_skeleton import Problem, pool_starts
from stratagem.searcher.problem.tensors_touched import gate_owners, tensors_touched
from stratagem.simulator.base.arrays import Ints, Records, records
from stratagem.simulator.engine._delta_replay import play_changes
from stratagem.simulator.engine._delta_state import DeltaState
from stratagem.simulator.engine._event_queue import TaskArrays
from stratagem.simulator.engine.delta_engine import allocate_delta
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.idle_tasks import contract
from stratagem.simulator.engine.task_graph import TaskGraph
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.schedules.macro_graph import MacroGraph
from stratagem.simulator.stage._shut_gates import all_shut
from stratagem.simulator.stage.shared_conversions import OPEN, Sharing, joined_sharing
from stratagem.simulator.stage.stage_blocks import Block, StageBlocks


def own_arrays(shared: Arrays) -> Arrays:
    """The arrays of a new chain: what it writes to is its own, all else is shared."""
    plays, tensors, pipeline = shared.plays, shared.tensors, shared.pipeline
    fresh = {name: getattr(plays, name).copy() for name in _OF_PLAYS}
    changes = _copied(plays.changes)
    return shared._replace(
        plays=plays._replace(states=_own_states(plays.states), changes=changes, **fresh),
        tensors=tensors._replace(**{n: getattr(tensors, n).copy() for n in _OF_TENSORS}),
        pipeline=pipeline._replace(**{n: getattr(pipeline, n).copy() for n in _OF_PIPELINE}),
        macro=_own_queue(shared.macro),
        **{name: getattr(shared, name).copy() for name in _OF_CHAIN},
    )


def _own_queue(shared: QueuedPipeline) -> QueuedPipeline:
    return shared._replace(graph=_own_graph(shared.graph), space=_copied(shared.space))


def _own_graph(graph: TaskArrays) -> TaskArrays:
    filled = graph.durations.copy(), graph.resource_sets.copy()
    return graph._replace(durations=filled[0], resource_sets=filled[1])


def _copied(shared: Any) -> Any:
    """Copies of all arrays of a named tuple, and of those in it."""
    if isinstance(shared, np.ndarray):
        return shared.copy()
    return type(shared)(*map(_copied, shared))


def _own_states(states: DeltaState) -> DeltaState:
    return states._replace(
        graph=_own_graph(states.graph),
        space=_copied(states.space),
        **{name: getattr(states, name).copy() for name in _OF_STATES},
    )


_OF_STATES = ("tasks", "places", "changes", "windows", "book", "latest", "held", "known")
_OF_PLAYS = ("seen", "on_path", "books", "loads", "new_loads")
_OF_TENSORS = ("nbytes", "sums", "tops", "profiles", "undo")
_OF_PIPELINE = ("bounds", "end", "because", "free", "holder", "now", "table", "proposed")
_OF_CHAIN = ("changed", "before", "numbers")


def begin_plays(plays: Plays, choice: Ints) -> None:
    """Play every block under `choice` from nothing, and index it."""
    for k in range(plays.which.size):
        low, high = plays.touch_starts[k, [0, -1]]
        touches = plays.touches[low:high]
        where = touches["offset"] + choice[touches["first"]] * touches["stride"]
        where += choice[touches["second"]] * touches["second_stride"]
        where[all_shut(touches["gate"], choice, *plays.gates)] = 0
        state = state_of.py_func(plays, k)
        ns, sets = plays.pool_ns[where], plays.pool_sets[where]
        tasks = touches["task"]
        state.tasks["duration"][tasks] = state.graph.durations[tasks] = ns
        state.tasks["resources"][tasks] = state.graph.resource_sets[tasks] = sets
        for resource in range(NUM_RESOURCES):
            held = state.graph.resource_sets >> resource & 1
            plays.loads[k, resource] = int((state.graph.durations * held).sum())
        plays.books[k] = records(1, BOOKS)[0]
        plays.books[k].ns = play_changes(state)


def shared_arrays(problem: Problem) -> Arrays:
    """The arrays of a problem, with work space that no chain has written to; made once."""
    return problem.derive(_shared_arrays)


def _shared_arrays(problem: Problem) -> Arrays:
    num_operators = len(problem.choices)
    crosses = np.zeros(num_operators, dtype=np.int64)
    crosses[problem.crossings[:, [2, 4]].ravel()] = 1
    numbers = np.zeros(NUM_NUMBERS, dtype=np.int64)
    numbers[NUM_ITEMS] = problem.table.shape[1]
    return Arrays(
        plays=_plays(problem),
        tensors=_tensors(problem),
        pipeline=_pipeline(problem.macro_graph, problem.table.shape),
        moves=moves_of(problem),
        pool_ns=problem.blocks.pool_ns,
        crossings=problem.crossings,
        arrivals=problem.arrivals,
        crosses=crosses,
        capacities=problem.capacities,
        ranks=problem.ranks,
        macro=problem.macro,
        changed=np.zeros(num_operators, dtype=np.int64),
        before=np.zeros(num_operators, dtype=np.int64),
        numbers=numbers,
    )


# -- blocks -------------------------------------------------------------------------------------


def _plays(problem: Problem) -> Plays:
    blocks = [
        problem.stage_blocks[stage].of_kind(kind) for stage, kind in problem.plays[:, :2].tolist()
    ]
    stages, pools = problem.plays[:, 0].tolist(), pool_starts(problem.stage_blocks)
    num_operators = len(problem.choices)
    sharing, gates = joined_sharing([blocks.sharing for blocks in problem.stage_blocks])
    contracted: dict[int, tuple[TaskGraph, Ints]] = {}
    states, touched = [], []
    for stage, (block, last) in zip(stages, blocks, strict=True):
        key = id(block.bases(last))  # equal stages share these
        if key not in contracted:
            contracted[key] = _contracted(problem.stage_blocks[stage], block, last)
        graph, kept = contracted[key]
        states.append(allocate_delta(graph))
        touched.append(
            _touches(block, last, kept, (pools[stage], gates[stage]), num_operators, sharing)
        )
    before = np.cumsum([0, *(rows.shape[0] for _, rows in touched)])[:-1]
    total, num_plays = sum(state.places.size for state in states), len(states)
    return Plays(
        pool_ns=problem.blocks.pool_ns,
        pool_sets=problem.blocks.pool_mask,
        which=_entries(tuple(problem.plays.T), PLAY),
        stages=np.searchsorted(problem.plays[:, 0], np.arange(problem.num_stages + 1)),
        starts=_state_starts(states),
        states=_joined(states),
        touch_starts=np.stack(
            [starts + b for (starts, _), b in zip(touched, before, strict=True)]
        ),
        touches=np.concatenate([rows for _, rows in touched]).view(np.recarray),
        gates=sharing.arrays,
        seen=np.zeros(total, dtype=np.int64),
        on_path=np.zeros(total, dtype=np.int64),
        changes=Changes(*(np.zeros(total, dtype=np.int64) for _ in Changes._fields)),
        books=records(num_plays, BOOKS),
        loads=np.zeros((num_plays, NUM_RESOURCES), dtype=np.int64),
        new_loads=np.zeros((num_plays, NUM_RESOURCES), dtype=np.int64),
    )


def _joined(states: Sequence[DeltaState]) -> DeltaState:
    """Each array of the states one after the other, in one dimension."""

    def joined(parts: Sequence[NamedTuple]) -> Iterator[Any]:
        for each in zip(*parts, strict=True):
            if isinstance(each[0], np.ndarray):
                yield np.concatenate([array.ravel() for array in each]).view(type(each[0]))
            else:
                yield type(each[0])(*joined(each))

    return DeltaState(*joined(states))


def _state_starts(states: Sequence[DeltaState]) -> Records:
    """Where each begins in what is joined."""
    starts = records(len(states) + 1, STARTS)
    starts["tasks"] = _starts([state.places.size for state in states])
    starts["words"] = _starts([state.latest.shape[1] for state in states])
    starts["levels"] = _starts([state.levels.size for state in states])
    starts["edges"] = _starts([state.predecessors.size for state in states])
    starts["sets"] = _starts([state.graph.set_offsets.size for state in states])
    starts["members"] = _starts([state.graph.set_resources.size for state in states])
    starts["rivals"] = _starts([state.graph.contention.size for state in states])
    return starts


def _entries(columns: Sequence[Ints], names: np.dtype[np.void]) -> Records:
    """Records of some columns."""
    found = records(len(columns[0]), names)
    for name, column in zip(names.names or (), columns, strict=True):
        found[name] = column
    return found


def _contracted(blocks: StageBlocks, block: Block, last: bool) -> tuple[TaskGraph, Ints]:
    """A block without tasks that never have anything to do, and the ids of those that stay.

    Under the first choices; `begin_plays` looks everything up.
    """
    graph = blocks.task_graph(block, np.zeros(len(block.operators), dtype=np.int64), last=last)
    return contract(graph, block.bases(last) == 0)


def _touches(
    block: Block,
    last: bool,
    kept: Ints,
    begins: tuple[int, int],
    num_operators: int,
    sharing: Sharing,
) -> tuple[Ints, Records]:
    """By operator, the tasks whose look-up it takes part in: where they begin, and columns.

    The pool and the gates of the stage begin at `begins` among those of all.
    """
    pool, gates = begins
    gate = np.where(block.gate[kept] < 0, OPEN, block.gate[kept] + gates)
    base = block.bases(last)[kept]
    first, stride = block.first[kept], block.stride[kept]
    second, second_stride = block.second[kept], block.second_stride[kept]
    busy = np.flatnonzero(base > 0)
    both = np.flatnonzero((base > 0) & (second_stride > 0) & (second != first))
    gated, rivals = gate_owners(gate, sharing, base > 0)
    tasks = np.concatenate([busy, both, gated])
    owners = np.concatenate([first[busy], second[both], rivals])
    order = np.argsort(owners, kind="stable")
    tasks = tasks[order]
    columns = (
        tasks,
        base[tasks] + pool,
        first[tasks],
        stride[tasks],
        second[tasks],
        second_stride[tasks],
        gate[tasks],
    )
    starts = np.searchsorted(owners[order], np.arange(num_operators + 1))
    return starts.astype(np.int64), _entries(columns, TOUCH)


# -- memory -------------------------------------------------------------------------------------


def _tensors(problem: Problem) -> Tensors:
    held = problem.tensors
    touched = tensors_touched(problem)
    leaves = [1 << max(0, int(n) - 1).bit_length() for n in held.sizes]
    trees = _starts([6 * size for size in leaves])
    num_nodes = int(trees[-1])
    return Tensors(
        starts=held.starts,
        sizes=held.sizes,
        stage=touched.stage,
        base=held.base,
        first=held.first,
        stride=held.stride,
        second=held.second,
        second_stride=held.second_stride,
        birth=held.birth,
        death=held.death,
        gate=held.gate,
        gates=problem.tensor_sharing.arrays,
        pool=held.pool,
        touch_starts=touched.starts,
        touches=touched.tensors,
        trees=trees,
        nbytes=np.zeros(held.base.size, dtype=np.int64),
        sums=np.zeros(num_nodes, dtype=np.int64),
        tops=np.zeros(num_nodes, dtype=np.int64),
        profiles=np.zeros((held.sizes.size, 6), dtype=np.int64),
        undo=np.zeros((2, held.base.size), dtype=np.int64),
    )


# -- pipeline -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Macro:
    """The macro graph as the builders below read it."""

    graph: TaskGraph
    entry: Ints
    less: Ints
    held: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, ...], ...]


def _pipeline(macro: MacroGraph, shape: tuple[int, ...]) -> Pipeline:
    graph, num_entries = macro.graph, int(np.prod(shape))
    entry = macro.kind * shape[1] + macro.item
    less = np.where(macro.less >= 0, macro.less * shape[1] + macro.item, -1)
    columns = np.unique(entry)
    places = np.zeros(num_entries, dtype=np.int64)
    places[columns] = np.arange(columns.size)
    read = _Macro(graph, entry, less, _held(graph), _before(graph))
    order = _fixed_order(read)
    if macro.schedule.num_ranks == 1 and all(read.held):
        how, order = CLOSED, np.arange(graph.num_tasks)
    else:
        how = QUEUED if order is None else ORDERED
    visits = np.arange(graph.num_tasks) if order is None else order
    number = np.empty_like(visits)
    number[visits] = np.arange(visits.size)
    before = [[int(number[b]) for b in read.before[t]] for t in visits.tolist()]
    held = [read.held[t] for t in visits.tolist()]
    return Pipeline(
        how=np.array([how], dtype=np.int64),
        columns=columns,
        places=places,
        bounds=_bounds(macro, read, places, columns.size),
        entry=entry[visits],
        less=less[visits],
        before_starts=_starts([len(found) for found in before]),
        before=_flat(before),
        held_starts=_starts([len(found) for found in held]),
        held=_flat(held),
        end=np.zeros(graph.num_tasks, dtype=np.int64),
        because=np.zeros(graph.num_tasks, dtype=np.int64),
        free=np.zeros(graph.num_resources, dtype=np.int64),
        holder=np.zeros(graph.num_resources, dtype=np.int64),
        now=np.zeros(1, dtype=np.int64),
        table=np.zeros(num_entries, dtype=np.int64),
        proposed=np.zeros(num_entries, dtype=np.int64),
    )


def _fixed_order(macro: _Macro) -> Ints | None:
    """An order in which every resource serves its tasks under all durations; None if unproven.

    Tasks are taken in the order of (ready time, id). Of two tasks on a resource, a goes first
    under all durations if b comes behind a in the graph: then b is ready when a has ended. Or if
    both read the same entries of the table (so both are idle or none is), a has the lower id, and
    every predecessor of a is, or comes before, a predecessor of b: then a is ready no later. Both
    are checked for tasks that follow each other on a resource when all durations are 1; the rest
    follows, as (ready time, id) is a total order.
    """
    graph = macro.graph
    if graph.contention.size:
        return None
    times = simulate(replace(graph, durations=np.ones(graph.num_tasks, dtype=np.int64)))
    order = np.lexsort((np.arange(graph.num_tasks), times.ready))
    above = _ancestors(macro, order)
    last: dict[int, int] = {}
    for b in order.tolist():
        for resource in macro.held[b]:
            a = last.get(resource, -1)
            last[resource] = b
            if a < 0 or above[b] >> a & 1:
                continue
            behind = above[b] | sum(1 << each for each in set(macro.before[b]))
            waits = all(behind >> each & 1 for each in macro.before[a])
            alike = macro.entry[a] == macro.entry[b] and macro.less[a] == macro.less[b]
            if not (waits and a < b and alike):
                return None
    return order


def _ancestors(macro: _Macro, order: Ints) -> list[int]:
    """Per task all tasks before it in the graph, as the bits of a number."""
    above = [0] * macro.graph.num_tasks
    for task in order.tolist():
        for before in macro.before[task]:
            above[task] |= above[before] | 1 << before
    return above


def _bounds(macro: MacroGraph, read: _Macro, places: Ints, num_columns: int) -> Ints:
    """Coefficients of lower bounds, two a rank, and a last row for the longest path.

    Everything that holds the rank; and a path through the graph along all actions of the rank,
    which goes on with what the last one sends.
    """
    schedule = macro.schedule
    rows = np.zeros((2 * schedule.num_ranks + 1, num_columns), dtype=np.int64)
    after = _after(read.graph)
    for rank, actions in enumerate(schedule.orders):
        mine = [task for task, held in enumerate(read.held) if rank in held]
        _count(rows[2 * rank], mine, read, places)
        first, last = (macro.number[actions[place]] for place in (0, -1))
        chain = [t for a in actions[:-1] for t in _tasks_of(macro, macro.number[a])]
        path = [*_path(read.before, first), *chain, last, *_path(after, last)]
        _count(rows[2 * rank + 1], path, read, places)
    return rows


def _tasks_of(macro: MacroGraph, task: int) -> list[int]:
    """The tasks of the block that begins with a task."""
    return [task, macro.rests[task]] if task in macro.rests else [task]


def _count(row: Ints, tasks: Sequence[int], read: _Macro, places: Ints) -> None:
    """Add the entries of tasks to a bound, and take off those that they are less."""
    less = read.less[list(tasks)]
    np.add.at(row, places[read.entry[list(tasks)]], 1)
    np.add.at(row, places[less[less >= 0]], -1)


def _path(next_of: Sequence[Sequence[int]], task: int) -> list[int]:
    """The tasks of a path that begins next to `task` and goes on as long as it can."""
    found: list[int] = []
    while next_of[task]:
        task = next_of[task][-1]
        found.append(task)
    return found


def _held(graph: TaskGraph) -> tuple[tuple[int, ...], ...]:
    offsets, resources = graph.set_offsets.tolist(), graph.set_resources.tolist()
    sets = graph.resource_sets.tolist()
    return tuple(tuple(resources[offsets[held] : offsets[held + 1]]) for held in sets)


def _after(graph: TaskGraph) -> tuple[tuple[int, ...], ...]:
    offsets, successors = graph.successor_offsets.tolist(), graph.successors.tolist()
    return tuple(
        tuple(successors[offsets[task] : offsets[task + 1]]) for task in range(graph.num_tasks)
    )


def _before(graph: TaskGraph) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    for task, after in enumerate(_after(graph)):
        for each in after:
            found[each].append(task)
    return tuple(tuple(each) for each in found)


def _starts(sizes: Sequence[int]) -> Ints:
    return np.cumsum([0, *sizes]).astype(np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> Ints:
    return np.array([each for found in lists for each in found], dtype=np.int64)
