"""Long runs against closed forms: Daly's, availability, and queues with as many servers as needed.

Means are compared within five standard errors of their own; seeds are fixed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from stratagem.simulator.forecast.checkpoint_intervals import (
    Checkpoints,
    best_interval,
    expected_seconds,
)
from stratagem.simulator.forecast.hazards import Hazards
from stratagem.simulator.forecast.training_run import RunPlan, Spent, TrainingRun
from tests.support.examples import examples

CALM = RunPlan(
    steps=10_000,
    step_seconds=10.0,
    steps_between=100,
    checkpoint_seconds=30.0,
    write_seconds=0.0,
    num_nodes=16,
)
UNSAVED = replace(CALM, checkpoint_seconds=0.0)
"""What disturbs steps has mean effects that are known where nothing comes between them."""


def played(plan: RunPlan, hazards: Hazards, runs: int) -> list[TrainingRun]:
    found = [TrainingRun(plan, hazards, seed) for seed in range(runs)]
    for run in found:
        assert run.play(until=1e12) == pytest.approx(sum(run.spent.values()), rel=1e-9)
    return found


def seconds(runs: list[TrainingRun]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([sum(run.spent.values()) for run in runs])


def assert_mean(values: np.ndarray[tuple[int], np.dtype[np.float64]], expected: float) -> None:
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - expected) < 5 * error + 1e-9 * expected


@pytest.mark.parametrize(
    ("hours", "checkpoint", "restart", "between"),
    [(100.0, 30.0, 200.0, 100), (20.0, 5.0, 900.0, 30), (8.0, 120.0, 60.0, 60)],
)
def test_failures_take_what_daly_says(
    hours: float, checkpoint: float, restart: float, between: int
) -> None:
    plan = RunPlan(
        steps=6_000,
        step_seconds=10.0,
        steps_between=between,
        checkpoint_seconds=checkpoint,
        write_seconds=0.0,
        num_nodes=16,
    )
    hazards = Hazards(node_mtbf_hours=hours, restart_seconds=restart)
    expected = expected_seconds(
        60_000.0,
        between * 10.0,
        mtbf=hazards.mtbf(16),
        checkpoint=checkpoint,
        restart=restart,
    )
    assert_mean(seconds(played(plan, hazards, 200)), expected)


@given(st.floats(1e2, 1e8), st.floats(0, 1e4))
def test_the_best_interval_is_that_of_a_search(mtbf: float, checkpoint: float) -> None:
    best = best_interval(mtbf, checkpoint)
    assert best <= math.sqrt(2 * mtbf * checkpoint) * (1 + 1e-9)
    if checkpoint < 1e-3:
        return  # The formula's own exponential knows too few digits there.

    def wall(interval: float) -> float:
        return expected_seconds(1.0, interval, mtbf=mtbf, checkpoint=checkpoint, restart=0.0)

    found = minimize_scalar(wall, bounds=(best / 20, best * 20 + 1), method="bounded").fun
    assert wall(best) <= found * (1 + 1e-6)


def test_short_checkpoints_are_written_as_often_as_young_says() -> None:
    assert best_interval(1e6, 1.0) == pytest.approx(math.sqrt(2e6), rel=1e-3)
    assert Checkpoints(seconds=60).interval(math.inf) == math.inf
    assert Checkpoints(seconds=1, write_seconds=9000).interval(1e6) == 9000
    assert Checkpoints().interval(1e6) == 1000
    assert Checkpoints(seconds=60, every_seconds=5.0).interval(1e6) == 5.0


def test_without_hazards_only_checkpoints_take_time() -> None:
    (run,) = played(CALM, Hazards(), 1)
    assert run.spent[Spent.USEFUL] == 100_000.0
    assert run.spent[Spent.CHECKPOINTS] == 100 * 30.0
    assert sum(run.spent.values()) == 103_000.0


def test_steps_vary_as_sums_of_independent_steps_do() -> None:
    runs = played(CALM, Hazards(step_variation=0.5), 300)
    useful = np.array([run.spent[Spent.USEFUL] for run in runs])
    assert_mean(useful, 100_000.0)
    assert useful.std(ddof=1) == pytest.approx(0.5 * 10.0 * math.sqrt(10_000), rel=0.2)


def test_slow_nodes_are_as_many_as_served_at_once_by_a_queue_without_waiting() -> None:
    """Slow times of all nodes overlap: the share without any is exp(−rate · length)."""
    hazards = Hazards(node_slow_hours=20.0, slow_minutes=10.0, slow_factor=1.5)
    runs = played(UNSAVED, hazards, 200)
    calm = math.exp(-16 / (20 * 3600) * 600)
    assert_mean(seconds(runs), 100_000.0 / (calm + (1 - calm) / 1.5))


@pytest.mark.slow
def test_stalls_that_overlap_stop_training_once() -> None:
    hazards = Hazards(stalls_per_day=200.0, stall_seconds=120.0)
    runs = played(UNSAVED, hazards, 200)
    stalled = np.array([run.spent[Spent.STALLED] for run in runs]) / seconds(runs)
    assert_mean(stalled, 1 - math.exp(-200 * 120 / 86400))


def test_a_node_without_a_spare_is_there_as_often_as_alternating_renewal_says() -> None:
    """One node: up for a mean of MTBF, then away for a mean of its repair."""
    plan = RunPlan(
        steps=20_000,
        step_seconds=100.0,
        steps_between=1,
        checkpoint_seconds=0.0,
        write_seconds=0.0,
        num_nodes=1,
    )
    runs = played(plan, Hazards(node_mtbf_hours=5.0, repair_hours=1.0), 5)
    waiting = np.array([run.spent[Spent.NODES] for run in runs])
    up = seconds(runs) - waiting
    assert (up / seconds(runs)).mean() == pytest.approx(5 / 6, rel=0.02)


def test_spare_nodes_shorten_the_wait_for_nodes() -> None:
    waits = []
    for spares in (0, 1, 4):
        hazards = Hazards(
            node_mtbf_hours=50.0, repair_hours=6.0, spare_nodes=spares, restart_seconds=60.0
        )
        waits.append(np.mean([r.spent[Spent.NODES] for r in played(CALM, hazards, 40)]))
    assert waits[0] > waits[1] > waits[2]


def test_a_checkpoint_counts_once_it_is_written() -> None:
    """Written beside training for as long as a whole interval, two intervals may be lost."""
    hazards = Hazards(node_mtbf_hours=40.0, restart_seconds=100.0)
    lost = []
    for write in (0.0, 500.0, 1000.0):
        plan = RunPlan(
            steps=10_000,
            step_seconds=10.0,
            steps_between=100,
            checkpoint_seconds=0.0,
            write_seconds=write,
            num_nodes=16,
        )
        runs = played(plan, hazards, 60)
        lost.append(sum(r.spent[Spent.LOST] for r in runs) / sum(r.failures for r in runs))
    assert lost[0] == pytest.approx(500, rel=0.15)
    assert lost[1] == pytest.approx(500 + 500, rel=0.15)
    assert lost[2] == pytest.approx(500 + 1000, rel=0.15)


def test_the_same_seed_is_the_same_run() -> None:
    hazards = Hazards(node_mtbf_hours=50.0, restart_seconds=60.0, step_variation=0.1)
    one, other = (TrainingRun(CALM, hazards, 7) for _ in range(2))
    assert one.play(until=1e12) == other.play(until=1e12)
    assert one.spent == other.spent


@settings(max_examples=examples(100))
@given(st.floats(5, 1e3), st.floats(0, 30), st.floats(0, 100), st.integers(0, 40), st.data())
def test_rounds_that_nothing_disturbs_are_passed_at_once(
    mtbf: float, checkpoint: float, write: float, stalls: int, data: st.DataObject
) -> None:
    """A forecast with a checkpoint a minute took twelve seconds, most of a million such rounds."""
    hazards = Hazards(
        node_mtbf_hours=mtbf,
        restart_seconds=90.0,
        repair_hours=1.0,
        node_slow_hours=20.0,
        slow_minutes=5.0,
        slow_factor=1.5,
        stalls_per_day=stalls,
        stall_seconds=20.0 if stalls else 0.0,
    )
    between = data.draw(st.integers(1, 60))
    plan = replace(CALM, steps_between=between, checkpoint_seconds=checkpoint, write_seconds=write)
    quick, slow = (TrainingRun(plan, hazards, seed=between) for _ in range(2))
    slow._undisturbed = lambda: 0  # type: ignore[method-assign]
    wall = quick.play(until=1e6)
    assert wall == pytest.approx(slow.play(until=1e6), rel=1e-9)
    assert quick.failures == slow.failures
    for each, seconds in slow.spent.items():
        assert quick.spent[each] == pytest.approx(seconds, rel=1e-9, abs=1e-5), each


@given(
    st.floats(20, 1e4),
    st.floats(0, 600),
    st.floats(0, 4),
    st.integers(0, 3),
    st.floats(1.01, 3),
    st.floats(0, 50),
    st.floats(0, 400),
    st.integers(0, 1000),
)
def test_all_seconds_of_any_run_are_spent_on_something(
    mtbf: float,
    restart: float,
    repair: float,
    spares: int,
    factor: float,
    stalls: float,
    write: float,
    seed: int,
) -> None:
    hazards = Hazards(
        node_mtbf_hours=mtbf,
        restart_seconds=restart,
        repair_hours=repair,
        spare_nodes=spares if repair else 0,
        node_slow_hours=30.0,
        slow_minutes=5.0,
        slow_factor=factor,
        stalls_per_day=stalls,
        stall_seconds=20.0 if stalls else 0.0,
        step_variation=0.2,
    )
    plan = RunPlan(
        steps=2_000,
        step_seconds=10.0,
        steps_between=50,
        checkpoint_seconds=10.0,
        write_seconds=write,
        num_nodes=16,
    )
    run = TrainingRun(plan, hazards, seed)
    wall = run.play(until=1e9)
    assert wall == pytest.approx(sum(run.spent.values()), rel=1e-9)
    assert min(run.spent.values()) > -1e-6
    assert run.spent[Spent.USEFUL] == pytest.approx(20_000, rel=0.2)
    assert wall >= run.spent[Spent.USEFUL] + 40 * 10 - 1e-6
