"""The choice of strategies: brute force as the truth, bounds, reductions, memory, files."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.ilp.explain import explain_infeasible
from stratagem.searcher.ilp.files.iopddl import read_iopddl, write_iopddl
from stratagem.searcher.ilp.problem.elimination import simplify
from stratagem.searcher.ilp.problem.incumbent import BestAssignment
from stratagem.searcher.ilp.problem.instance import CostEdge, Device, Instance, MemoryUse, limits
from stratagem.searcher.ilp.problem.memory_rows import MemoryWindow, Spans
from stratagem.searcher.ilp.problem.reductions import ReducedInstance, compact, copy
from stratagem.searcher.ilp.solutions.branch_and_bound import Branching, Subproblem, ascended
from stratagem.searcher.ilp.solutions.holder_branching import LevelBranching
from stratagem.searcher.ilp.solutions.large_neighbourhoods import NeighbourhoodSearch
from stratagem.searcher.ilp.solutions.priced_trees import PricedSearch
from stratagem.searcher.ilp.solutions.random_trees import TreeSearch
from stratagem.searcher.ilp.solve import IlpSolution, Status, reduced, solve
from tests.support.examples import examples


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Small instances with forbidden entries, parallel edges, ties of costs and memory."""
    seed = draw(st.integers(0, 2**32 - 1))
    num_nodes = draw(st.integers(1, 6))
    forbidden = draw(st.sampled_from([0.0, 0.1, 0.4, 0.7]))
    largest = draw(st.sampled_from([2, 5, 1000]))
    num_devices = draw(st.integers(0, 2))
    room = draw(st.floats(0.0, 1.1))
    return make_instance(seed, num_nodes, forbidden, largest, num_devices, room)


def make_instance(
    seed: int, num_nodes: int, forbidden: float, largest: int, num_devices: int, room: float
) -> Instance:
    rng = np.random.default_rng(seed)

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, largest, shape).astype(float)
        drawn[rng.random(shape) < forbidden] = np.inf
        return drawn

    counts = rng.integers(1, 5, num_nodes)
    nodes = tuple(
        rng.integers(0, largest, count).astype(float) if rng.random() < 0.7 else costs(count)
        for count in counts
    )
    edges = []
    for _ in range(rng.integers(0, 2 * num_nodes + 1)):
        if num_nodes < 2:
            break
        first, second = rng.choice(num_nodes, 2, replace=False)
        edges.append(CostEdge(int(first), int(second), costs(counts[first], counts[second])))
    uses = []
    for device in range(num_devices):
        for node in range(num_nodes):
            start, end = sorted(rng.integers(0, 6, 2).tolist())
            uses.append(MemoryUse(node, start, end, rng.integers(0, 10, counts[node]), device))
    total = 5 * num_nodes
    devices = tuple(
        Device(
            f"device {number}",
            int(room * total)
            if number == 0
            else np.asarray(room * total * (0.5 + rng.random(6)), np.int64),
        )
        for number in range(num_devices)
    )
    return Instance(nodes, tuple(edges), tuple(uses), devices)


def brute_force(instance: Instance, tied: tuple[tuple[int, ...], ...] = ()) -> float:
    """The least cost of all choices that are allowed, infinity if none is."""
    best = np.inf
    for choice in itertools.product(*(range(len(costs)) for costs in instance.costs)):
        if any(len({choice[node] for node in group}) > 1 for group in tied):
            continue
        cost = instance.objective(choice)
        if cost < best and instance.excess(choice) == 0:
            best = cost
    return best


def check(instance: Instance, solution: IlpSolution, best: float) -> None:
    if not np.isfinite(best):
        assert solution.status is Status.INFEASIBLE
        assert solution.choice is None
        return
    assert solution.status is Status.OPTIMAL
    assert solution.choice is not None
    assert solution.objective == best == instance.objective(solution.choice)
    assert instance.excess(solution.choice) == 0
    assert solution.bound <= best


@settings(max_examples=examples(300))
@given(instances())
def test_the_solution_is_that_of_brute_force(instance: Instance) -> None:
    check(instance, solve(instance), brute_force(instance))


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(instances())
def test_tied_nodes_choose_alike(instance: Instance) -> None:
    groups: dict[int, list[int]] = {}
    for node, costs in enumerate(instance.costs):
        groups.setdefault(len(costs), []).append(node)
    tied = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    check(instance, solve(instance, tied=tied), brute_force(instance, tied))


def test_a_file_reads_back_as_it_was_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    instance = make_instance(3, 6, 0.3, 1000, 0, 1.0)
    uses = tuple(
        MemoryUse(node, node, node + 2, np.arange(len(costs)))
        for node, costs in enumerate(instance.costs)
    )
    instance = Instance(instance.costs, instance.edges, uses, (Device("device", 7),))
    for name in ("a.json", "a.json.gz"):
        write_iopddl(instance, tmp_path / name)
        again = read_iopddl(tmp_path / name)
        assert again.devices == instance.devices
        assert all(map(np.array_equal, again.costs, instance.costs))
        for one, other in zip(again.edges, instance.edges, strict=True):
            assert (one.first, one.second) == (other.first, other.second)
            assert np.array_equal(one.costs, other.costs)
        for one, other in zip(again.uses, instance.uses, strict=True):
            assert (one.node, one.start, one.end) == (other.node, other.start, other.end)
            assert np.array_equal(one.nbytes, other.nbytes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not an IOPDDL problem"),
        (
            '{"problem": {"nodes": {"costs": [[1, 2]], "usages": [], "intervals": [[0, 1]]},'
            ' "edges": {"nodes": [], "costs": []}}}',
            "1 costs, 0 usages, 1 intervals",
        ),
        (
            '{"problem": {"nodes": {"costs": [[1, 2], [1]], "usages": [[0, 0], [1]],'
            ' "intervals": [[0, 1], []]}, "edges": {"nodes": [[0, 1]], "costs": [[1]]}}}',
            "has 1 costs; 2 × 1 strategies need 2",
        ),
    ],
)
def test_a_file_that_is_not_of_the_format_says_where(tmp_path, text, message) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_iopddl(path)


@settings(max_examples=examples(100))
@given(instances())
def test_no_solution_explains_itself(instance: Instance) -> None:
    if np.isfinite(brute_force(instance)):
        if instance.devices:
            with pytest.raises(ValueError, match="there is a solution"):
                explain_infeasible(instance)
        return
    explanation = explain_infeasible(instance)
    unlimited = Instance(instance.costs, instance.edges)
    if not np.isfinite(brute_force(unlimited)):
        assert explanation.stuck is not None
        return
    assert explanation.proved
    assert explanation.cost == brute_force(raised(instance, explanation.increase))
    assert sum(explanation.increase) == least_increase(instance)
    for shortage in explanation.shortages:
        assert f"{shortage.held - shortage.limit:,} less" in str(explanation)


def raised(instance: Instance, increase: tuple[int, ...]) -> Instance:
    devices = tuple(
        Device(device.label, device.limit + more)
        for device, more in zip(instance.devices, increase, strict=True)
    )
    return Instance(instance.costs, instance.edges, instance.uses, devices)


def least_increase(instance: Instance) -> int:
    """The least sum of increases that lets some choice in, by trying all choices."""
    best = None
    for choice in itertools.product(*(range(len(costs)) for costs in instance.costs)):
        if np.isfinite(instance.objective(choice)):
            over = sum(
                max(0, int((profile - limits(device, len(profile))).max(initial=0)))
                for device, profile in zip(instance.devices, instance.memory(choice), strict=True)
            )
            best = over if best is None else min(best, over)
    assert best is not None
    return best


def layers(seed: int, num_nodes: int, num_strategies: int) -> Instance:
    """A chain of layers with residual edges and memory that binds, as a plan's choices are."""
    rng = np.random.default_rng(seed)

    def table() -> np.ndarray:
        drawn = rng.integers(1, 100, (num_strategies, num_strategies)).astype(float)
        drawn[rng.random(drawn.shape) < 0.1] = np.inf
        np.fill_diagonal(drawn, 0.0)
        return drawn

    kinds = [table() for _ in range(4)]
    costs = tuple(rng.integers(1, 200, num_strategies).astype(float) for _ in range(num_nodes))
    edges = [CostEdge(node, node + 1, kinds[node % 3]) for node in range(num_nodes - 1)]
    edges += [CostEdge(node, node + 4, kinds[3]) for node in range(0, num_nodes - 4, 4)]
    nbytes = [rng.integers(0, 1000, num_strategies) for _ in range(num_nodes)]
    uses = tuple(
        MemoryUse(node, node, min(2 * num_nodes - node, node + 60), nbytes[node])
        for node in range(num_nodes)
    )
    return Instance(costs, tuple(edges), uses, (Device("device", 18_000),))


def test_equal_seeds_give_equal_solutions() -> None:
    instance = layers(1, 40, 5)
    one, other = (solve(instance, tolerance=0.02, seed=3) for _ in range(2))
    assert one.choice is not None
    assert other.choice is not None
    assert one.choice.tolist() == other.choice.tolist()
    assert (one.objective, one.bound) == (other.objective, other.bound)
    assert one.gap <= 0.02


def test_a_bound_holds_when_time_is_up() -> None:
    instance = layers(2, 40, 5)
    best = solve(instance).objective
    for seconds in (0.0, 0.05, 0.2):
        cut = solve(instance, seconds=seconds)
        assert cut.bound <= best <= cut.objective


def begun(instance: Instance, **known: Any) -> tuple[ReducedInstance, BestAssignment, Subproblem]:
    """A reduced problem, what is known of its solutions, and a simplified part: all of it."""
    core, _ = compact(reduced(instance))
    part = Subproblem(copy(core))
    simplify(part.problem)
    return core, BestAssignment(core, 1e-9, math.inf, integral=True, **known), part


@pytest.mark.slow
def test_random_trees_find_solutions_of_large_instances() -> None:
    instance = layers(4, 120, 8)
    core, incumbent, part = begun(instance)
    relaxed = ascended(part, incumbent)
    TreeSearch(part.problem, relaxed, incumbent, seed=0).run(4000, part.bound, math.inf)
    assert incumbent.choice is not None
    assert core.memory is not None
    assert core.memory.fits(incumbent.choice)
    assert relaxed.dual.bound() <= incumbent.cost <= 1.4 * relaxed.dual.bound()


@pytest.mark.slow
def test_random_trees_know_what_their_best_choice_costs() -> None:
    instance = layers(4, 120, 8)
    _, incumbent, part = begun(instance)
    relaxed = ascended(part, incumbent)
    search = TreeSearch(part.problem, relaxed, incumbent, seed=0)
    priced = PricedSearch(part.problem, relaxed, part.bound, incumbent, seed=0)
    search.run(2000, part.bound, math.inf)
    priced.run(2, math.inf)
    for best, cost in ((search.best, search.best_cost), (priced.best, priced.best_cost)):
        choice = np.zeros(len(part.problem.costs), np.int64)
        choice[part.problem.alive] = best
        whole, fits = part.problem.evaluate(choice)
        assert fits
        assert cost == pytest.approx(whole - part.problem.constant, rel=1e-12)
    assert priced.used.tolist() == part.problem.memory.held(priced.choice).tolist()


def crowded(seed: int, num_nodes: int) -> Instance:
    """Weights that are held all the time and activations, three times what fits at the least
    cost: the less a strategy holds, the dearer it is, in every node at another rate."""
    rng = np.random.default_rng(seed)
    shares = np.array([1.0, 0.5, 0.25, 0.125, 0.0625])
    nbytes = [
        np.rint(rng.integers(1000, 9000) * shares).astype(np.int64) for _ in range(num_nodes)
    ]
    costs = tuple(np.rint(rng.integers(1, 500) * (1 / shares - 1)) for _ in range(num_nodes))
    disagree = [rng.integers(1, 900, (5, 5)).astype(float) for _ in range(4)]
    for table in disagree:
        np.fill_diagonal(table, 0.0)
    edges = [CostEdge(node, node + 1, disagree[node % 3]) for node in range(num_nodes - 1)]
    edges += [CostEdge(node, node + 7, disagree[3]) for node in range(0, num_nodes - 7, 3)]
    uses = tuple(
        MemoryUse(node, 0, 2 * num_nodes, each)
        if node % 2
        else MemoryUse(node, node, min(node + 40, 2 * num_nodes - node + 1), each)
        for node, each in enumerate(nbytes)
    )
    least_cost = sum(int(each.max()) for each in nbytes) // 2
    return Instance(costs, tuple(edges), uses, (Device("device", least_cost // 3),))


@pytest.mark.slow
def test_prices_find_solutions_where_memory_decides() -> None:
    instance = crowded(0, 400)
    core, incumbent, part = begun(instance)
    relaxed = ascended(part, incumbent)
    PricedSearch(part.problem, relaxed, part.bound, incumbent, seed=0).run(3, math.inf)
    assert incumbent.choice is not None
    assert core.memory is not None
    assert core.memory.fits(incumbent.choice)
    assert relaxed.dual.bound() <= incumbent.cost <= 1.1 * relaxed.dual.bound()


def test_settling_what_nodes_hold_loses_no_better_solution() -> None:
    num_split = 0
    for seed in range(150):
        instance = make_instance(seed, 6, 0.0, 1000, 1, 0.5)
        best = brute_force(instance)
        if not np.isfinite(best):
            continue
        _, incumbent, part = begun(instance, cost=best + 400)
        if not part.problem.alive:
            continue
        part.relaxed = ascended(part, incumbent)
        levels = LevelBranching(part, incumbent)
        parts = levels.run()
        num_split += levels.num_parts > 1
        assert all(each.bound <= incumbent.cutoff for each in parts)
        Branching(incumbent).run(parts)
        assert incumbent.cost == best
    assert num_split >= 20


@pytest.mark.slow
def test_a_limit_of_regions_ends_the_search_for_better_solutions() -> None:
    instance = crowded(1, 30)
    limited = [solve(instance, max_parts=2, max_regions=regions) for regions in (0, 1, 4)]
    objectives = [solution.objective for solution in limited]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[0] > objectives[-1] >= solve(instance).objective
    _, incumbent, part = begun(instance, cost=objectives[0], choice=limited[0].choice)
    improver = NeighbourhoodSearch(part.problem, {}, incumbent, seed=0)
    improver.run(40, math.inf, max_regions=3)
    assert improver.num_regions == 3


def hoarders(seed: int, num_nodes: int) -> Instance:
    """Eight of the nodes each hold up to most of what there is, and their neighbours like them to:
    a relaxation lets all of them hold a part of it."""
    rng = np.random.default_rng(seed)
    every = num_nodes // 8
    disagree = rng.integers(50, 300, (6, 6)).astype(float)
    np.fill_diagonal(disagree, 0.0)
    costs = tuple(
        np.array([900.0, 700.0, 400.0, 300.0, 100.0, 0.0]) + rng.integers(0, 60, 6)
        if node % every == 0
        else rng.integers(0, 120, 6).astype(float)
        for node in range(num_nodes)
    )
    edges = tuple(
        CostEdge(node, other, disagree + rng.integers(0, 9, (6, 6)))
        for node in range(num_nodes)
        for other in (node + 1, node + every)
        if other < num_nodes
    )
    shares = np.array([0, 30, 170, 360, 380, 700])
    uses = tuple(
        MemoryUse(node, 0, 2, shares + rng.integers(0, 9, 6))
        for node in range(0, num_nodes, every)
    )
    return Instance(costs, edges, uses, (Device("device", 1500),))


def test_few_parts_settle_what_nodes_hold() -> None:
    instance = hoarders(0, 40)
    core, exact, _ = begun(instance)
    Branching(exact).run([Subproblem(copy(core))])
    _, incumbent, part = begun(instance, choice=exact.choice, cost=exact.cost)
    part.relaxed = ascended(part, incumbent)
    levels = LevelBranching(part, incumbent)
    parts = levels.run()
    assert levels.settled
    assert not parts
    assert part.relaxed.dual.bound() < 0.99 * exact.cost == 0.99 * incumbent.cost


def test_spans_hold_what_windows_do() -> None:
    rng = np.random.default_rng(0)
    windows = [
        MemoryWindow(int(rng.integers(0, 5)), np.repeat(rng.integers(0, 3, (4, 6)), 2, axis=1)),
        MemoryWindow(3, np.zeros((2, 0), np.int64)),
        MemoryWindow(0, rng.integers(0, 9, (3, 1))),
    ]
    spans = Spans.of(windows)
    for node, window in enumerate(windows):
        held = np.zeros((len(window.nbytes), 20), np.int64)
        for span in range(spans.first[node], spans.first[node + 1]):
            place = spans.place[span]
            column = spans.pool[place : place + len(window.nbytes)]
            held[:, spans.begin[span] : spans.end[span]] += column[:, None]
        expected = np.zeros_like(held)
        expected[:, window.first : window.end] = window.nbytes
        assert held.tolist() == expected.tolist()
    assert len(spans.begin) <= 6 + 1


def test_wrong_instances_say_what_is_wrong() -> None:
    ones = np.ones(2)
    with pytest.raises(ValueError, match="names a node that is not one of 1"):
        Instance((ones,), (CostEdge(0, 1, np.ones((2, 2))),))
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*\(2, 2\)"):
        Instance((ones, ones), (CostEdge(0, 1, np.ones((2, 3))),))
    with pytest.raises(ValueError, match=r"costs -1\.0"):
        Instance((-ones,))
    with pytest.raises(ValueError, match="not a number"):
        Instance((ones * np.nan,))
    with pytest.raises(ValueError, match="0 devices"):
        Instance((ones,), (), (MemoryUse(0, 0, 1, np.array([1, 2])),))
    with pytest.raises(ValueError, match="2 strategies and node 1, tied to it, 3"):
        solve(Instance((ones, np.ones(3))), tied=[(0, 1)])


@pytest.mark.parametrize(
    ("name", "optimum"), [("G", 217_039), ("P", 651_833_115_436), ("V", 1_617_084)]
)
def test_contest_instances_are_proved_optimal(name: str, optimum: int) -> None:
    folder = os.environ.get("STRATAGEM_DATA")
    if folder is None:
        pytest.skip("STRATAGEM_DATA does not name a folder with iopddl/ in it")
    instance = read_iopddl(Path(folder) / "iopddl" / f"{name}.json.gz")
    solution = solve(instance, seconds=120)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == solution.bound == optimum
    assert solution.choice is not None
    assert instance.excess(solution.choice) == 0


@settings(max_examples=examples(300))
@given(instances(), st.sampled_from([0.05, 0.3, 0.6]))
def test_a_loose_tolerance_claims_no_more_than_it_proves(
    instance: Instance, tolerance: float
) -> None:
    best = brute_force(instance)
    solution = solve(instance, tolerance=tolerance)
    if not np.isfinite(best):
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.status is Status.OPTIMAL
    assert solution.bound <= best <= solution.objective
    assert solution.gap <= tolerance + 1e-9


def test_a_bound_is_under_the_optimum_where_the_search_stops_early() -> None:
    for seed in range(12):
        instance = layers(seed, 30, 5)
        best = solve(instance).objective
        solution = solve(instance, tolerance=0.2)
        assert solution.bound <= best <= solution.objective
        assert solution.gap <= 0.2 + 1e-9


@settings(max_examples=examples(200))
@given(instances(), st.integers(0, 2**32 - 1))
def test_costs_in_seconds_are_solved_as_well(instance: Instance, seed: int) -> None:
    rng = np.random.default_rng(seed)
    instance = Instance(
        tuple(costs * 1e-6 * rng.random(costs.shape) for costs in instance.costs),
        tuple(
            CostEdge(edge.first, edge.second, edge.costs * 1e-6 * rng.random(edge.costs.shape))
            for edge in instance.edges
        ),
        instance.uses,
        instance.devices,
    )
    best = brute_force(instance)
    solution = solve(instance)
    if not np.isfinite(best):
        assert solution.status is Status.INFEASIBLE
        return
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(best, rel=1e-9)
    assert solution.bound <= best * (1 + 1e-12)
