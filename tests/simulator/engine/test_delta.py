"""Delta re-simulation: every makespan and every time equal to those of a full simulation.

`STRATAGEM_DELTA_PROPOSALS` sets how many random proposals are tried (a million take ten minutes).
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.space.skeletons import operator_choices
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine._delta_state import MAX_DRIFT
from stratagem.simulator.engine.delta_engine import DeltaEngine
from stratagem.simulator.engine.event_engine import Times, simulate
from stratagem.simulator.engine.reference_engines import simulate_plain, simulate_simpy
from stratagem.simulator.engine.task_graph import TaskGraph, build_task_graph
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.stage.block_tasks import stage_blocks
from tests.support.examples import examples
from tests.support.plans import few

NUM_PROPOSALS = int(os.environ.get("STRATAGEM_DELTA_PROPOSALS", "24000"))
NUM_SEEDS = 24
FEW_SEEDS = 4
PER_GRAPH = 50


def assert_same(actual: Times, expected: Times) -> None:
    for name in ("ready", "start", "end"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    assert actual.makespan == expected.makespan


class Twin:
    """A delta engine, and the graph that it should be playing."""

    def __init__(self, graph: TaskGraph, *, patient: bool = True) -> None:
        self.engine = DeltaEngine(graph)
        self.graph = graph
        self.proposed = graph
        self.patient = patient
        assert_same(self.engine.times(), simulate(graph))

    def propose(
        self, tasks: Ints | list[int], durations: Ints | list[int], sets: Ints | list[int]
    ) -> Times:
        """Propose, compare with full simulation, and return the timeline."""
        new_durations, new_sets = self.graph.durations.copy(), self.graph.resource_sets.copy()
        new_durations[tasks], new_sets[tasks] = durations, sets
        self.proposed = dataclasses.replace(
            self.graph, durations=new_durations, resource_sets=new_sets
        )
        if self.patient:  # else it gives up after a quarter of the graph
            self.engine.state.book[0].limit = 2 * self.graph.num_tasks
        before = self.engine.makespan
        expected = simulate(self.proposed)
        assert self.engine.propose(tasks, durations, sets) == expected.makespan
        assert self.engine.makespan == before
        times = self.engine.times()
        assert_same(times, expected)
        return times

    def accept(self) -> None:
        self.engine.accept()
        self.graph = self.proposed
        assert_same(self.engine.times(), simulate(self.graph))
        assert self.engine.makespan == self.engine.times().makespan

    def reject(self) -> None:
        self.engine.reject()
        assert_same(self.engine.times(), simulate(self.graph))


def random_graph(rng: np.random.Generator, num_tasks: int) -> TaskGraph:
    """A graph with ties, gangs, idle tasks and pure delays, and with sets that no task holds.

    Half of them have rivals that slow each other down.
    """
    num_resources = int(rng.integers(1, 7))
    rank = rng.permutation(num_tasks) if rng.random() < 0.5 else np.arange(num_tasks)
    reach = int(rng.choice([3, 30, num_tasks]))
    after = np.repeat(np.arange(1, num_tasks), rng.integers(0, rng.integers(1, 5), num_tasks - 1))
    before = rng.integers(np.maximum(0, after - reach), after)
    sets = [
        rng.choice(num_resources, rng.integers(1, min(num_resources, 3) + 1), replace=False)
        for _ in range(8)
    ]
    graph = build_task_graph(
        np.ones(num_tasks, np.int64),
        np.stack([rank[before], rank[after]], axis=1),
        resource_sets=[()] * num_tasks,
        num_resources=num_resources,
        rivals=[p for p in itertools.combinations(range(num_resources), 2) if rng.random() < 0.4],
        slowdown=int(rng.choice([0, 0, 130, 1500])),
    )
    durations = rng.integers(0, rng.choice([2, 4, 20, 1000]), num_tasks)
    return dataclasses.replace(
        graph,
        durations=durations,
        resource_sets=np.where(durations > 0, rng.integers(0, 9, num_tasks), 0),
        set_offsets=np.cumsum([0, 0, *map(len, sets)]),
        set_resources=np.concatenate(sets).astype(np.int64),
    )


def random_change(rng: np.random.Generator, graph: TaskGraph) -> tuple[Ints, Ints, Ints]:
    """New durations, or sets, or both, of a few tasks; some become idle or busy."""
    longest = int(graph.durations.max()) + 1
    count = int(rng.integers(1, min(graph.num_tasks, 6) + 1))
    tasks = rng.choice(graph.num_tasks, count, replace=False)
    durations, sets = graph.durations[tasks], graph.resource_sets[tasks]
    kind = rng.random()
    if kind < 0.7:
        durations = rng.integers(0, longest + 1, count)
    if kind > 0.4:
        sets = rng.integers(0, graph.set_offsets.size - 1, count)
    sets = np.where(durations > 0, sets, 0)
    return tasks, durations, sets


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(NUM_SEEDS), FEW_SEEDS))
def test_random_walks_equal_full_simulation(seed):
    rng = np.random.default_rng(seed)
    for _ in range(NUM_PROPOSALS // NUM_SEEDS // PER_GRAPH):
        num_tasks = int(rng.choice([2, 10, 40, 150, 1200], p=[0.05, 0.2, 0.35, 0.35, 0.05]))
        twin = Twin(random_graph(rng, num_tasks), patient=rng.random() < 0.9)
        for _ in range(PER_GRAPH):
            twin.propose(*random_change(rng, twin.graph))
            fate = rng.random()
            if fate < 0.5:
                twin.accept()
            elif fate < 0.9:
                twin.reject()


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Small graphs that hypothesis can shrink, with edges from lower to higher ids."""
    num_tasks = draw(st.integers(1, 14))
    num_resources = draw(st.integers(1, 4))
    durations = draw(st.lists(DURATIONS_NS, min_size=num_tasks, max_size=num_tasks))
    resource = st.integers(0, num_resources - 1)
    sets = [draw(st.frozensets(resource, max_size=3)) if ns else () for ns in durations]
    task = st.integers(0, num_tasks - 1)
    pairs = draw(st.lists(st.tuples(task, task), max_size=2 * num_tasks))
    rivals = draw(st.lists(st.tuples(resource, resource), max_size=3))
    return build_task_graph(
        durations,
        [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]],
        resource_sets=sets,
        num_resources=num_resources,
        rivals=[pair for pair in rivals if pair[0] != pair[1]],
        slowdown=draw(st.sampled_from([0, 130, 1000])),
    )


DURATIONS_NS = st.one_of(st.integers(0, 3), st.integers(0, 3000))


@settings(max_examples=examples(300))
@given(graph=graphs(), data=st.data())
def test_all_engines_agree_on_any_walk(graph, data):
    """Proposals, accepted or not, each equal to SimPy and plain Python on the proposed graph."""
    twin = Twin(graph)
    for _ in range(data.draw(st.integers(1, 5), label="proposals")):
        task = st.integers(0, graph.num_tasks - 1)
        tasks = data.draw(st.lists(task, max_size=4, unique=True), label="tasks")
        durations = [data.draw(DURATIONS_NS, label="duration") for _ in tasks]
        resources = st.integers(0, graph.set_offsets.size - 2)
        sets = [data.draw(resources, label="set") if ns else 0 for ns in durations]
        times = twin.propose(tasks, durations, sets)
        assert_same(times, simulate_simpy(twin.proposed))
        assert_same(times, simulate_plain(twin.proposed))
        fate = data.draw(st.sampled_from([twin.accept, twin.reject, lambda: None]), label="fate")
        fate()


def test_random_walks_replay_in_several_windows():
    """Changes far apart in a long graph are replayed one by one, also after many acceptances.

    The second time round resources slow each other down.
    """
    replay_in_windows(slowdown=0)
    replay_in_windows(slowdown=130)


def replay_in_windows(slowdown: int) -> None:
    rng = np.random.default_rng(7)
    num_tasks = 1500
    tasks = np.arange(1, num_tasks)
    graph = build_task_graph(
        rng.integers(1, 50, num_tasks),
        np.stack([np.maximum(0, tasks - rng.integers(1, 4, tasks.size)), tasks], axis=1),
        resource_sets=rng.integers(0, 3, (num_tasks, 1)).tolist(),
        num_resources=3,
        rivals=[(0, 1), (0, 2)],
        slowdown=slowdown,
    )
    twin = Twin(graph)
    windows, replayed = [], []
    for _ in range(300):
        changed = rng.choice(num_tasks, 4, replace=False)
        twin.propose(changed, rng.integers(1, 50, 4), graph.resource_sets[changed])
        windows.append(int(twin.engine.state.book[0].num_windows))
        replayed.append(twin.engine.replayed)
        if rng.random() < 0.8:
            twin.accept()
    assert np.mean(windows) > 2
    assert np.mean(replayed) < num_tasks / 5


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("last", [False, True])
def test_operators_of_a_gpt_block_change_their_choice(direction, last):
    model = gpt(num_layers=3, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
    cluster = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
    mesh = DeviceMesh((MeshAxis("node", 2), MeshAxis("device", 4)), tuple(range(8)))
    choices = [operator_choices(model, op, mesh.shape, (0, 2, 3)) for op in model.operators]
    builder = TableBuilder(model, mesh, cluster, Training(), RooflineCosts())
    blocks = stage_blocks(builder.build(range(len(choices)), dict(enumerate(choices))))
    block = getattr(blocks, direction)
    rng = np.random.default_rng(3)
    counts = [len(options) for options in choices]
    number = rng.integers(0, counts)
    twin = Twin(blocks.task_graph(block, number, last=last))
    num_flips = 0
    for _ in range(300):
        proposed = number.copy()
        for operator in rng.choice(len(counts), rng.integers(1, 4), replace=False):
            proposed[operator] = rng.integers(counts[operator])
        graph = blocks.task_graph(block, proposed, last=last)
        tasks = np.arange(graph.num_tasks)
        if rng.random() < 0.5:
            old, new = twin.graph, graph
            tasks = np.flatnonzero(
                (old.durations != new.durations) | (old.resource_sets != new.resource_sets)
            )
        twin.propose(tasks, graph.durations[tasks], graph.resource_sets[tasks])
        num_flips += int(((graph.durations == 0) != (twin.graph.durations == 0)).sum())
        if rng.random() < 0.5:
            twin.accept()
            number = proposed
        else:
            twin.reject()
    assert num_flips > 100


def test_list_scheduling_bounds_are_never_undercut():
    rng = np.random.default_rng(5)
    for _ in range(20):
        twin = Twin(random_graph(rng, 60))
        for _ in range(20):
            makespan = twin.propose(*random_change(rng, twin.graph)).makespan
            assert makespan >= longest_path(twin.proposed)
            assert makespan >= most_work(twin.proposed)
            twin.accept()


def longest_path(graph: TaskGraph) -> int:
    """The makespan with no resources to wait for."""
    free = np.zeros(graph.num_tasks, np.int64)
    return simulate(dataclasses.replace(graph, resource_sets=free)).makespan


def most_work(graph: TaskGraph) -> int:
    work = np.zeros(graph.num_resources, np.int64)
    for held, duration in zip(graph.resource_sets, graph.durations, strict=True):
        lo, hi = graph.set_offsets[held], graph.set_offsets[held + 1]
        work[graph.set_resources[lo:hi]] += duration
    return int(work.max())


def build(
    durations: list[int], edges: list[tuple[int, int]], sets: list[tuple[int, ...]]
) -> TaskGraph:
    return build_task_graph(durations, edges, resource_sets=sets, num_resources=4)


class TestReconvergence:
    """Where the rest is the old timeline, shifted; and where it only looks like it."""

    def test_a_chain_is_shifted_at_once(self):
        twin = Twin(build([5] * 100, [(k, k + 1) for k in range(99)], [(0,)] * 100))
        assert twin.propose([50], [9], [1]).makespan == 504
        assert twin.engine.replayed == 1

    def test_slack_absorbs_a_change(self):
        # 0 ─▶ 2 and 1 ─▶ 2: 0 ends at 3, then 6, but 1 at 10; a chain follows 2.
        edges = [(0, 2), (1, 2), *((k, k + 1) for k in range(2, 99))]
        twin = Twin(build([3, 10, *([5] * 98)], edges, [(0,), (1,), *([(0,)] * 98)]))
        assert twin.propose([0], [6], [1]).makespan == 500
        assert twin.engine.replayed == 2
        assert twin.propose([0], [11], [1]).makespan == 501
        # 2 gets ready just when 0 ends, later than ever: that is a tie, so 2 is played as well.
        assert twin.engine.replayed == 3

    def test_two_changes_are_two_windows(self):
        twin = Twin(build([5] * 100, [(k, k + 1) for k in range(99)], [(0,)] * 100))
        assert twin.propose([20, 80], [9, 4], [1, 1]).makespan == 503
        assert twin.engine.replayed == 2
        twin.accept()
        assert twin.propose([79], [1], [1]).makespan == 499
        assert twin.engine.replayed == 1

    def test_a_stream_that_stays_is_not_shifted(self):
        # Two chains side by side; only the first one moves.
        edges = [(k, k + 2) for k in range(98)]
        twin = Twin(build([5] * 100, edges, [(0,), (1,)] * 50))
        assert twin.propose([20], [9], [1]).makespan == 254
        assert twin.engine.replayed == 80

    def test_a_tie_with_a_changed_end_is_not_taken_for_agreement(self):
        # 3 ─▶ 1 and 2 ─▶ 0; 0 and 1 share a resource. 3 ends at 8, then at 10, when 0 gets ready:
        # 0 has the lower id, so it goes first. Its own times agree, but those of 1 do not follow.
        twin = Twin(
            build(
                [4, 4, 10, 8, *([1] * 40)],
                [(2, 0), (3, 1), (1, 4), *((k, k + 1) for k in range(4, 43))],
                [(0,), (0,), (1,), (2,), *([(3,)] * 40)],
            )
        )
        before = twin.engine.times()
        assert before.start[[1, 0]].tolist() == [8, 12]
        times = twin.propose([3], [10], [twin.graph.resource_sets[3]])
        assert times.start[[1, 0]].tolist() == [14, 10]

    def test_a_resource_that_is_still_held_is_not_agreement(self):
        # 0 holds resource 0 until 50; 1 lets go of resource 1 a little later than before, and only
        # 40 tasks on does a task need both.
        chain = [(k, k + 1) for k in range(1, 41)]
        sets = [(0,), *([(1,)] * 40), (0, 1)]
        twin = Twin(build([50, *([1] * 41)], chain, sets))
        assert twin.propose([1], [3], [2]).makespan == 51
        assert twin.propose([1], [30], [2]).makespan == 70

    def test_roots_are_not_shifted(self):
        # All are ready at 0: the second one does not get ready later as the first lasts longer.
        twin = Twin(build([5, 4, 3], [], [(0,), (1,), (0,)]))
        times = twin.propose([0], [7], [1])
        assert times.start.tolist() == [0, 0, 7]

    def test_a_task_moves_to_another_resource(self):
        twin = Twin(build([5] * 8, [(k, k + 2) for k in range(6)], [(0,), (1,)] * 4))
        assert twin.engine.makespan == 20
        # 1 goes to resource 0, behind 0.
        times = twin.propose([1], [5], [1])
        assert times.start.tolist() == [0, 5, 10, 10, 15, 15, 20, 20]
        twin.accept()
        times = twin.propose([1], [5], [2])
        assert times.start.tolist() == [0, 0, 5, 5, 10, 10, 15, 15]

    def test_a_task_becomes_busy_and_idle_again(self):
        twin = Twin(build([5, 0, 5, 5], [(0, 1), (1, 2), (2, 3)], [(0,), (), (0,), (0,)]))
        assert twin.propose([1], [7], [1]).makespan == 22
        twin.accept()
        assert twin.propose([1], [0], [0]).makespan == 15
        twin.accept()
        assert twin.engine.times().start.tolist() == [0, 5, 5, 10]

    def test_an_idle_task_goes_before_busy_ones_of_its_instant(self):
        # 2 and 3 get ready at 4; when 3 is idle, its successor 1 does so too, and goes before 2.
        edges = [(0, 2), (0, 3), (3, 1)]
        twin = Twin(build([4, 2, 3, 1], edges, [(0,), (1,), (1,), (1,)]))
        assert twin.engine.times().start.tolist() == [0, 8, 4, 7]
        assert twin.propose([3], [0], [0]).start.tolist() == [0, 4, 6, 4]
        twin.accept()
        assert twin.propose([3], [1], [2]).start.tolist() == [0, 8, 4, 7]

    def test_an_edge_given_twice(self):
        twin = Twin(build([2, 3, 1], [(0, 2), (0, 2), (1, 2)], [(0,), (1,), (0,)]))
        assert twin.propose([0], [9], [1]).makespan == 10


def test_a_hopeless_replay_is_given_up():
    edges = [(k, k + 2) for k in range(998)]
    twin = Twin(build([5] * 1000, edges, [(0,), (1,)] * 500), patient=False)
    played = []
    for k in range(20):
        twin.propose([k], [9], [twin.graph.resource_sets[k]])
        played.append(twin.engine.replayed)
        if k % 2:
            twin.accept()
    assert played[0] == 1250
    assert played[-1] == 1000 + 1000 // 4 // 64


def test_shifts_that_add_up_are_written_out():
    """Accepted shifts of years make the index be written anew before a sum could overflow."""
    twin = Twin(build([2**57, *([5] * 199)], [(k, k + 1) for k in range(199)], [(0,)] * 200))
    most = 0
    for k in range(30):
        twin.propose([k % 3], [2**59 if k % 2 else 7], [1])
        twin.accept()
        most = max(most, int(twin.engine.state.book[0].drift))
    assert 0 < most <= MAX_DRIFT


def test_a_proposal_replaces_a_pending_one():
    engine = DeltaEngine(build([3, 4], [(0, 1)], [(0,), (0,)]))
    assert engine.propose([0], [10]) == 14
    assert engine.propose([1], [10]) == 13
    engine.accept()
    assert engine.times().end.tolist() == [3, 13]
    assert engine.propose([], []) == 13


def test_the_graph_is_left_alone():
    graph = build([3, 4], [(0, 1)], [(0,), (0,)])
    engine = DeltaEngine(graph)
    engine.propose([0], [10], [0])
    engine.accept()
    assert graph.durations.tolist() == [3, 4]
    assert graph.resource_sets.tolist() == [1, 1]


class TestRefusals:
    def test_durations_that_overflow_when_slowed_down(self):
        graph = dataclasses.replace(build([3], [], [(0,)]), rivals=((0, 1),), slowdown=1000)
        with pytest.raises(ValueError, match="slowed down by 1000 per mille, would sum to"):
            DeltaEngine(graph).propose([0], [2**61 + 1])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([2], [1]), "there is no task 2: ids go from 0 to 1"),
            (([-1], [1]), "there is no task -1"),
            (([0, 0], [1, 2]), "task 0 is named twice"),
            (([0], [-4]), "task 0 would last -4 ns"),
            (([0], [0]), "task 0 would last 0 ns but hold resources"),
            (([0], None, [7]), "task 0 names resource set 7, of 2 sets"),
            (([0], None, [-1]), "task 0 names resource set -1"),
            (([1], None, [1]), "task 1 would last 0 ns but hold resources"),
            (([0, 1], [1]), "2 tasks but 1 durations"),
            (([0], None, [1, 1]), "1 tasks but 2 resource_sets"),
            (([0.5], [1]), "tasks must be whole numbers"),
            (([0], [1.5]), "durations must be whole numbers"),
            (([0], [2**64]), "durations must be whole numbers"),
            (([0], [2**62 + 1]), "sum to 4611686018427387905 ns, over the limit"),
            (([0, 1], [2**63 - 1, 2**63 - 1]), "sum to 18446744073709551614 ns"),
        ],
    )
    def test_propose(self, arguments, message):
        engine = DeltaEngine(build([3, 0], [(0, 1)], [(0,), ()]))
        engine.propose([0], [5])
        with pytest.raises(ValueError, match=message):
            engine.propose(*arguments)
        engine.accept()
        assert engine.makespan == 5

    @pytest.mark.parametrize("verb", ["accept", "reject"])
    def test_nothing_pending(self, verb):
        engine = DeltaEngine(build([3, 4], [(0, 1)], [(0,), (0,)]))
        with pytest.raises(ValueError, match=f"there is nothing to {verb}: propose a change"):
            getattr(engine, verb)()
        engine.propose([0], [5])
        engine.reject()
        with pytest.raises(ValueError, match="propose a change first"):
            getattr(engine, verb)()
