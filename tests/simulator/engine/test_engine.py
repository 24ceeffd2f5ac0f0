"""The event simulator: literal timelines, and agreement with two independent references."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.simulator.engine import _event_queue
from stratagem.simulator.engine.event_engine import Times, allocate, simulate
from stratagem.simulator.engine.idle_tasks import contract
from stratagem.simulator.engine.reference_engines import simulate_plain, simulate_simpy
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from tests.support.examples import examples

_QUEUE = ("push_task", "pop_task", "enqueue", "dequeue", "is_queued", "slowed_by", "lost_beside")
_PLAY = ("begin_tasks", "pass_through", "hold_resources")


def interpreted(name: str) -> Callable[..., Any]:
    """A kernel of the engine as plain Python."""
    kernel = getattr(_event_queue, name)
    return getattr(kernel, "py_func", kernel)


def simulate_interpreted(graph: TaskGraph) -> Times:
    """The engine's kernels as plain Python."""
    space = allocate(graph)
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        for name in (*_QUEUE, *_PLAY):
            context.setattr(_event_queue, name, interpreted(name))
        makespan = interpreted("simulate_tasks")(graph.arrays(), space)
    return Times(space.ready, space.start, space.end, int(makespan))


ENGINES = [simulate, simulate_interpreted, simulate_plain, simulate_simpy]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)


def random_graph(seed: int) -> TaskGraph:
    """A small graph full of ties, gangs and idle tasks, with edges from lower to higher ranks.

    Three in four have rivals that slow each other down.
    """
    rng = np.random.default_rng(seed)
    num_tasks = int(rng.integers(1, 40))
    num_resources = int(rng.integers(1, 5))
    durations = rng.integers(0 if seed % 3 else 1, 4, num_tasks)
    rank = rng.permutation(num_tasks)  # so that ids are no topological order
    density = rng.choice([0.02, 0.1, 0.3])
    before, after = np.nonzero(np.triu(rng.random((num_tasks, num_tasks)) < density, 1))
    sets = [
        rng.choice(num_resources, rng.integers(0, num_resources + 1), replace=False).tolist()
        if duration
        else []
        for duration in durations
    ]
    edges = np.stack([rank[before], rank[after]], axis=1)
    pairs = itertools.combinations(range(num_resources), 2)
    return build_task_graph(
        durations * (100 if seed % 2 else 1),
        edges,
        resource_sets=sets,
        num_resources=num_resources,
        rivals=[pair for pair in pairs if rng.random() < 0.5],
        slowdown=int(rng.choice([0, 130, 1000, 2500])),
    )


@settings(max_examples=examples(200, few=50), deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=60), st.randoms())
def test_a_queue_gives_back_the_earliest_of_what_it_holds(steps, random):
    """Numbers are ready times of tasks that come in any order; at None the first one leaves."""
    tasks = list(range(len(steps)))
    random.shuffle(tasks)
    queue = _event_queue.QueueArrays(*np.empty((4, len(steps)), np.int64))
    queued, expected = _event_queue.Queued(0, 0, 0), []
    enqueue, dequeue, is_queued = map(interpreted, ("enqueue", "dequeue", "is_queued"))
    for ready, task in zip(steps, tasks, strict=True):
        if ready is not None:
            queued = enqueue(queue, queued, ready, task)
            heapq.heappush(expected, (ready, task))
        elif expected:
            queued, *first = dequeue(queue, queued)
            assert tuple(first) == heapq.heappop(expected)
        assert bool(is_queued(queued)) == bool(expected)


def assert_same(actual: Times, expected: Times) -> None:
    assert actual.ready.tolist() == expected.ready.tolist()
    assert actual.start.tolist() == expected.start.tolist()
    assert actual.end.tolist() == expected.end.tolist()
    assert actual.makespan == expected.makespan


@every_engine
class TestLiteralTimelines:
    """Each asserts the interval of every task, written out by hand."""

    def play(
        self,
        engine: Callable[[TaskGraph], Times],
        durations: list[int],
        edges: list[tuple[int, int]],
        sets: list[tuple[int, ...]],
    ) -> list[tuple[int, int]]:
        graph = build_task_graph(durations, edges, resource_sets=sets, num_resources=3)
        times = engine(graph)
        assert times.makespan == times.end.max()
        return list(zip(times.start.tolist(), times.end.tolist(), strict=True))

    def test_one_task(self, engine):
        assert self.play(engine, [7], [], [(0,)]) == [(0, 7)]

    def test_a_chain_on_two_resources(self, engine):
        played = self.play(engine, [3, 2, 4], [(0, 1), (1, 2)], [(0,), (1,), (0,)])
        assert played == [(0, 3), (3, 5), (5, 9)]

    def test_without_resources_all_overlap(self, engine):
        assert self.play(engine, [3, 2, 4], [], [(), (), ()]) == [(0, 3), (0, 2), (0, 4)]

    def test_ties_go_by_id(self, engine):
        assert self.play(engine, [2, 3, 1], [], [(0,)] * 3) == [(0, 2), (2, 5), (5, 6)]

    def test_the_first_ready_goes_first(self, engine):
        # 2 is ready at 1, 1 at 3: both wait for 3, which holds their resource until 5.
        played = self.play(engine, [3, 1, 1, 5, 1], [(0, 1), (4, 2)], [(), (0,), (0,), (0,), ()])
        assert played == [(0, 3), (6, 7), (5, 6), (0, 5), (0, 1)]

    def test_a_gang_reserves_its_resources(self, engine):
        # 1 needs both and waits for 0; 2 came later and may not slip in on resource 1.
        played = self.play(engine, [5, 2, 1], [], [(0,), (0, 1), (1,)])
        assert played == [(0, 5), (5, 7), (7, 8)]

    def test_idle_tasks_pass_time_on(self, engine):
        # 0 ─▶ 1 (idle) ─▶ 2 (idle) ─▶ 3; 4 is idle from the beginning.
        played = self.play(
            engine, [4, 0, 0, 2, 0], [(0, 1), (1, 2), (2, 3), (4, 3)], [(0,), (), (), (0,), ()]
        )
        assert played == [(0, 4), (4, 4), (4, 4), (4, 6), (0, 0)]

    def test_a_task_behind_idle_ones_ties_with_its_instant(self, engine):
        # 1 gets ready through two idle tasks in the instant in which 4 does: 1 has the lower id.
        played = self.play(
            engine,
            [2, 3, 0, 0, 3],
            [(0, 2), (2, 3), (3, 1), (0, 4)],
            [(0,), (1,), (), (), (1,)],
        )
        assert played == [(0, 2), (2, 5), (2, 2), (2, 2), (5, 8)]

    def test_only_idle_tasks(self, engine):
        assert self.play(engine, [0, 0], [(1, 0)], [(), ()]) == [(0, 0), (0, 0)]

    def test_an_edge_given_twice(self, engine):
        assert self.play(engine, [2, 1], [(0, 1), (0, 1)], [(0,), (0,)]) == [(0, 2), (2, 3)]


@every_engine
class TestContention:
    """Resources 0 (computing) and 1 (a link) are rivals, and so are 0 and 2."""

    def play(
        self,
        engine: Callable[[TaskGraph], Times],
        durations: list[int],
        edges: list[tuple[int, int]],
        sets: list[tuple[int, ...]],
        slowdown: int = 500,
    ) -> list[tuple[int, int]]:
        graph = build_task_graph(
            durations,
            edges,
            resource_sets=sets,
            num_resources=4,
            rivals=[(0, 1), (0, 2)],
            slowdown=slowdown,
        )
        times = engine(graph)
        return list(zip(times.start.tolist(), times.end.tolist(), strict=True))

    def test_a_task_inside_a_rival_is_slowed_throughout(self, engine):
        assert self.play(engine, [100, 20], [], [(1,), (0,)]) == [(0, 100), (0, 30)]

    def test_a_task_that_outlasts_its_rival_goes_on_at_full_speed(self, engine):
        # 30 ns at two thirds of the speed do 20 ns of work; 80 are left.
        assert self.play(engine, [30, 100], [], [(1,), (0,)]) == [(0, 30), (0, 110)]

    def test_whoever_comes_second_pays(self, engine):
        assert self.play(engine, [30, 100], [], [(0,), (1,)]) == [(0, 30), (0, 110)]

    def test_the_longest_of_several_rivals_counts(self, engine):
        # 0 and 1 are no rivals of each other.
        played = self.play(engine, [30, 60, 100], [], [(1,), (2,), (0,)])
        assert played == [(0, 30), (0, 60), (0, 120)]

    def test_a_rival_that_ended_is_none(self, engine):
        assert self.play(engine, [30, 100], [(0, 1)], [(1,), (0,)]) == [(0, 30), (30, 130)]

    def test_a_rival_in_the_future_counts_from_the_start(self, engine):
        # 1 waits for 0; 2, taken behind it, is beside 0 and then 1: computing goes on until 80.
        played = self.play(engine, [40, 40, 90], [], [(0,), (0,), (1,)])
        assert played == [(0, 40), (40, 80), (0, 116)]

    def test_a_task_that_holds_both_has_no_rival_in_itself(self, engine):
        assert self.play(engine, [10, 100], [], [(1,), (0, 1)]) == [(0, 10), (10, 110)]

    def test_others_are_no_rivals(self, engine):
        assert self.play(engine, [50, 50], [], [(0,), (3,)]) == [(0, 50), (0, 50)]

    def test_losses_are_rounded_down(self, engine):
        assert self.play(engine, [9, 9], [], [(1,), (0,)], slowdown=130) == [(0, 9), (0, 10)]
        assert self.play(engine, [9, 7], [], [(1,), (0,)], slowdown=130) == [(0, 9), (0, 7)]

    def test_years_do_not_overflow(self, engine):
        long = 2**60
        played = self.play(engine, [long, long], [], [(1,), (0,)], slowdown=1000)
        assert played == [(0, long), (0, long + long // 2)]


def test_all_slowed_down_as_much_as_can_be():
    """A task inside its rival loses slowdown / 1000 of its duration."""
    for slowdown in (1, 999, 10**6):
        graph = build_task_graph(
            [10**12, 12345],
            [],
            resource_sets=[(1,), (0,)],
            num_resources=2,
            rivals=[(1, 0)],
            slowdown=slowdown,
        )
        assert simulate(graph).end[1] == 12345 + 12345 * slowdown // 1000


@pytest.mark.parametrize("seed", range(400))
def test_all_engines_agree(seed):
    graph = random_graph(seed)
    expected = simulate_simpy(graph)
    assert_same(simulate_plain(graph), expected)
    assert_same(simulate(graph), expected)
    assert_same(simulate_interpreted(graph), expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_workspace_can_be_used_again(seed):
    graph = random_graph(seed)
    space = allocate(graph)
    expected = simulate(graph)
    for _ in range(3):
        makespan = _event_queue.simulate_tasks(graph.arrays(), space)
        assert_same(Times(space.ready, space.start, space.end, makespan), expected)


@pytest.mark.parametrize("seed", range(50))
def test_times_respect_predecessors_and_resources(seed):
    graph = random_graph(seed)
    times = simulate(graph)
    before = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_offsets))
    assert (times.end[before] <= times.ready[graph.successors]).all()
    assert (times.ready <= times.start).all()
    lost = times.end - times.start - graph.durations
    assert (lost >= 0).all()
    assert (lost <= graph.durations * graph.slowdown // 1000).all()
    for resource in range(graph.num_resources):
        users = [
            task
            for task, held in enumerate(graph.resource_sets)
            if resource
            in graph.set_resources[graph.set_offsets[held] : graph.set_offsets[held + 1]]
        ]
        users.sort(key=lambda task: times.start[task])
        for first, second in itertools.pairwise(users):
            assert times.end[first] <= times.start[second]


def critical_path(graph: TaskGraph) -> int:
    """The longest path, counted from its end."""
    lists = np.split(graph.successors, graph.successor_offsets[1:-1])
    rest: dict[int, int] = {}

    def longest(task: int) -> int:
        if task not in rest:
            after = max((longest(each) for each in lists[task].tolist()), default=0)
            rest[task] = int(graph.durations[task]) + after
        return rest[task]

    return max(longest(task) for task in range(graph.num_tasks))


def largest_load(graph: TaskGraph) -> int:
    """The most work of a resource."""
    sets = np.split(graph.set_resources, graph.set_offsets[1:-1])
    loads = [0] * (graph.num_resources + 1)
    for held, duration in zip(graph.resource_sets, graph.durations.tolist(), strict=True):
        for resource in sets[held]:
            loads[resource] += duration
    return max(loads)


@pytest.mark.parametrize("seed", range(200))
def test_no_makespan_is_below_what_can_be_proved(seed):
    graph = random_graph(seed)
    makespan = simulate(graph).makespan
    assert makespan >= max(critical_path(graph), largest_load(graph))
    alone = dataclasses.replace(graph, resource_sets=np.zeros_like(graph.resource_sets))
    assert simulate(alone).makespan == critical_path(graph)


@pytest.mark.parametrize("seed", range(300))
def test_without_tasks_that_are_never_busy_the_rest_is_played_the_same(seed):
    graph = random_graph(seed)
    rng = np.random.default_rng(seed)
    idle = (graph.durations == 0) & (rng.random(graph.num_tasks) < rng.choice([0.5, 1.0]))
    contracted, kept = contract(graph, idle)
    assert contracted.successors.size <= graph.successors.size
    assert (np.delete(idle, kept)).all()
    for engine in (simulate, simulate_plain):
        before, after = engine(graph), engine(contracted)
        for name in ("ready", "start", "end"):
            assert getattr(before, name)[kept].tolist() == getattr(after, name).tolist()
        assert before.makespan == after.makespan


def test_of_a_graph_without_work_one_task_is_left():
    graph = build_task_graph(
        [0, 0, 0], [(0, 1), (1, 2)], resource_sets=[(), (), ()], num_resources=1
    )
    contracted, kept = contract(graph, np.ones(3, dtype=bool))
    assert contracted.num_tasks == 1
    assert contracted.successors.size == 0
    assert kept.tolist() == [0]


def test_a_busy_task_cannot_be_taken_out():
    graph = build_task_graph([0, 7], [(0, 1)], resource_sets=[(), (0,)], num_resources=1)
    with pytest.raises(ValueError, match="task 1 takes 7 ns"):
        contract(graph, np.ones(2, dtype=bool))


@settings(max_examples=examples(100))
@given(
    machines=st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=5
    ),
    random=st.randoms(use_true_random=False),
)
def test_a_schedule_without_gaps_is_played_as_it_was_made(machines, random):
    """Its makespan is the load of every machine, so it is the optimum.

    As in the Standard Task Graph set (Tobita, Kasahara 2002), an optimum is known because the
    graph is made from a schedule: machines that are busy from 0 to the end, and edges from tasks
    to some that begin when these have ended.
    """
    length = max(map(sum, machines))
    placed = []
    for machine, durations in enumerate(machines):
        time = 0
        for duration in [*durations, length - sum(durations)]:
            if duration:
                placed.append((time, time + duration, machine))
                time += duration
    random.shuffle(placed)  # so that ids say nothing of the order
    pairs = list(itertools.permutations(range(len(placed)), 2))
    edges = [
        (a, b)
        for a, b in pairs
        if (placed[a][1] == placed[b][0] and placed[a][2] == placed[b][2])
        or (placed[a][1] <= placed[b][0] and random.random() < 0.3)
    ]
    graph = build_task_graph(
        [end - start for start, end, _ in placed],
        edges,
        resource_sets=[(machine,) for _, _, machine in placed],
        num_resources=len(machines),
    )
    times = simulate(graph)
    assert times.start.tolist() == [start for start, _, _ in placed]
    assert times.makespan == length == largest_load(graph)


@given(
    durations=st.lists(st.integers(1, 99), min_size=1, max_size=40),
    num_machines=st.integers(1, 5),
)
def test_independent_tasks_end_with_the_fullest_machine(durations, num_machines):
    graph = build_task_graph(
        durations,
        [],
        resource_sets=[(task % num_machines,) for task in range(len(durations))],
        num_resources=num_machines,
    )
    assert simulate(graph).makespan == largest_load(graph)


def test_scaling_durations_scales_times():
    graph = random_graph(4)
    graph = dataclasses.replace(graph, slowdown=0)
    scaled = dataclasses.replace(graph, durations=graph.durations * 10**15)
    np.testing.assert_array_equal(simulate(scaled).end, simulate(graph).end * 10**15)


class TestRefusals:
    """What is not a task graph is refused, with the task or array named."""

    @pytest.mark.parametrize(
        ("durations", "edges", "sets", "message"),
        [
            ([], [], [], "empty"),
            ([1, -2], [], [(), ()], "task 1 lasts -2 ns"),
            ([1, 0], [], [(), (0,)], "task 1 lasts 0 ns but holds resources"),
            ([1, 1], [], [(), (2,)], "task 1 holds resource 2, but resource ids go from 0 to 1"),
            ([1, 1], [], [(), (-1,)], "task 1 holds resource -1"),
            ([1, 1], [(0, 2)], [(), ()], r"edge \(0, 2\) names a task that is not there"),
            ([1, 1], [(-1, 0)], [(), ()], r"edge \(-1, 0\)"),
            ([1, 1], [], [()], "2 durations but 1 resource sets"),
            ([1.5, 1], [], [(), ()], "whole numbers"),
            ([2**64, 1], [], [(), ()], "whole numbers"),
            ([2**63, 1], [], [(), ()], "whole numbers"),
            ([2**61, 2**61, 1], [], [()] * 3, "sum to 4611686018427387905 ns, over the limit"),
            ([2**62, 2**62, 2**62], [], [()] * 3, "sum to 13835058055282163712 ns"),
            ([1, 1], [(1, 1)], [(), ()], "task 1 waits for itself"),
        ],
    )
    def test_build(self, durations, edges, sets, message):
        with pytest.raises(ValueError, match=message):
            build_task_graph(durations, edges, resource_sets=sets, num_resources=2)

    @pytest.mark.parametrize(
        ("rivals", "slowdown", "message"),
        [
            ([(0, 2)], 0, r"rivals \(0, 2\) name resource 2, but resource ids go from 0 to 1"),
            ([(-1, 0)], 0, r"rivals \(-1, 0\) name resource -1"),
            ([(1, 1)], 0, "resource 1 is named as its own rival"),
            ([(0, 1)], -1, "the slowdown is -1 per mille"),
            ([(0, 1)], 10**6 + 1, "the slowdown is 1000001 per mille"),
            ([(0, 1)], 1001, "slowed down by 1001 per mille, sum to 4613991861436601597 ns"),
        ],
    )
    def test_rivals(self, rivals, slowdown, message):
        with pytest.raises(ValueError, match=message):
            build_task_graph(
                [2**60, 2**60],
                [],
                resource_sets=[(0,), (1,)],
                num_resources=2,
                rivals=rivals,
                slowdown=slowdown,
            )

    @pytest.mark.parametrize("interpreted", [False, True])
    def test_a_cycle_names_a_task_on_it(self, interpreted, monkeypatch):
        if interpreted:
            kernel = _event_queue.find_cycle_task
            monkeypatch.setattr(
                "stratagem.simulator.engine.task_graph.find_cycle_task",
                getattr(kernel, "py_func", kernel),
            )
        # 0 ─▶ 1 ─▶ 2 ─▶ 3 ─▶ 1, and 3 ─▶ 4 ─▶ 5 behind the cycle.
        edges = [(0, 1), (1, 2), (2, 3), (3, 1), (3, 4), (4, 5)]
        with pytest.raises(ValueError, match=r"task [123] waits for itself: it is on a cycle"):
            build_task_graph([1] * 6, edges, resource_sets=[()] * 6, num_resources=0)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("durations", [1, 1], r"successor_offsets is int64 of shape \(4,\); a graph of 2"),
            ("num_predecessors", [0, 1], r"num_predecessors is int64 of shape \(2,\)"),
            ("num_predecessors", [0, 1, 0], "task 2 has 1 edges into it, but num_predecessors"),
            ("resource_sets", [0, 0], r"resource_sets is int64 of shape \(2,\)"),
            ("resource_sets", [0, 0, 9], "task 2 names resource set 9"),
            ("successors", [1], r"successors is int64 of shape \(1,\)"),
            ("successors", [1, 3], "successors names task 3"),
            ("successor_offsets", [0, 2, 1, 2], "must begin with 0 and never fall"),
            ("set_offsets", [0, 1], "set 0 of set_offsets must be the empty set"),
            ("set_offsets", [], "set_offsets is int64 of shape"),
            ("set_resources", [], r"set_resources is int64 of shape \(0,\)"),
        ],
    )
    def test_arrays_that_do_not_fit(self, field, value, message):
        graph = build_task_graph(
            [1] * 3, [(0, 1), (1, 2)], resource_sets=[(0,)] * 3, num_resources=1
        )
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(graph, **{field: np.array(value, np.int64)})

    def test_arrays_of_another_type(self):
        graph = build_task_graph([1], [], resource_sets=[()], num_resources=0)
        with pytest.raises(ValueError, match="durations is float64"):
            dataclasses.replace(graph, durations=np.ones(1))

    def test_the_kernel_says_that_tasks_were_not_reached(self):
        graph = build_task_graph([1, 1], [(0, 1)], resource_sets=[()] * 2, num_resources=0)
        graph.num_predecessors[0] = 1
        assert _event_queue.simulate_tasks(graph.arrays(), allocate(graph)) == -1


def test_equal_sets_are_stored_once():
    graph = build_task_graph(
        [1] * 4, [], resource_sets=[(1, 0), (), (0, 1, 1), (0,)], num_resources=2
    )
    assert graph.resource_sets.tolist() == [1, 0, 1, 2]
    assert graph.set_offsets.tolist() == [0, 0, 2, 3]
    assert graph.set_resources.tolist() == [0, 1, 0]
