"""Forecasts of runs on predicted steps: what they say, cost, keep and refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import stratagem as sg
from stratagem.cli.app import app
from stratagem.simulator.forecast.training_run import Spent

GRAPH = sg.models.mlp([1024, 1024], batch=1024)
CLUSTER = replace(sg.Cluster.preset("dgx-a100", num_nodes=4), node_price_per_hour=10.0)
SIMULATION = replace(sg.simulate(sg.TrainingSetup().plan(GRAPH, CLUSTER), GRAPH), step_time=10.0)
SURE = replace(SIMULATION, relative_error=0.0)
HAZARDS = sg.forecasts.Hazards(
    node_mtbf_hours=200, restart_seconds=300, spare_nodes=1, repair_hours=5, step_variation=0.05
)
SAVING = sg.forecasts.Checkpoints(seconds=30)


def test_a_quiet_run_takes_its_steps_and_its_last_checkpoint() -> None:
    forecast = sg.forecasts.forecast_run(SURE, steps=1000, checkpoints=SAVING, runs=3)
    assert forecast.seconds.tolist() == [10_030.0] * 3
    assert forecast.interval == (10_030.0, 10_030.0)
    assert forecast.costs.tolist() == [pytest.approx(10_030 / 3600 * 40)] * 3
    begin = datetime(2026, 1, 1)
    assert forecast.ends(begin) == (begin + timedelta(seconds=10_030),) * 3


def test_spare_nodes_are_paid_for() -> None:
    forecast = sg.forecasts.forecast_run(SURE, steps=1000, hazards=HAZARDS, runs=2)
    assert forecast.price_per_hour == 50.0


def test_nodes_that_a_plan_leaves_idle_do_not_end_it() -> None:
    """Each of two nodes fails as often as one of four, so half as often as the four together."""
    half = sg.TrainingSetup().plan(GRAPH, CLUSTER.resized(num_nodes=2))
    on_two = replace(SURE, plan=replace(half, cluster=CLUSTER))
    hazards = sg.forecasts.Hazards(node_mtbf_hours=100, restart_seconds=60)
    two, four = (
        sg.forecasts.forecast_run(
            each, steps=100_000, hazards=hazards, checkpoints=SAVING, runs=30
        )
        for each in (on_two, SURE)
    )
    assert two.plan.num_nodes == 2
    assert two.price_per_hour == four.price_per_hour
    assert two.failures.mean() == pytest.approx(four.failures.mean() / 2, rel=0.2)


def test_the_error_of_the_step_is_that_of_the_run() -> None:
    """Without mishaps the spread is that of the prediction: its logarithm is normal."""
    unsure = replace(SIMULATION, relative_error=0.2)
    forecast = sg.forecasts.forecast_run(unsure, steps=1000, runs=2000)
    logs = np.log(forecast.seconds / 10_000)
    assert logs.mean() == pytest.approx(0, abs=0.02)
    assert logs.std() == pytest.approx(np.log(1.2), rel=0.05)
    low, high = forecast.interval
    assert np.mean((forecast.seconds >= low) & (forecast.seconds <= high)) == pytest.approx(0.8)


def test_seconds_are_all_in_the_table() -> None:
    forecast = sg.forecasts.forecast_run(
        SURE, steps=200_000, hazards=HAZARDS, checkpoints=SAVING, runs=30
    )
    np.testing.assert_allclose(forecast.spent.sum(axis=1), forecast.seconds)
    assert sum(forecast.table.column("share")) == pytest.approx(1)  # type: ignore[arg-type]
    assert forecast.failures.sum() > 30
    named = {kind.value for kind in (Spent.USEFUL, Spent.LOST, Spent.CHECKPOINTS, Spent.RESTARTS)}
    assert named <= set(forecast.table.column("time"))


def test_other_plans_meet_the_same_misfortunes() -> None:
    """With one seed, a quicker step never ends later, run by run."""
    slow, quick = (
        sg.forecasts.forecast_run(
            replace(SURE, step_time=seconds),
            steps=50_000,
            hazards=sg.forecasts.Hazards(node_mtbf_hours=100, restart_seconds=600),
            checkpoints=sg.forecasts.Checkpoints(seconds=30, every_seconds=1200),
            runs=20,
        )
        for seconds in (12.0, 6.0)
    )
    assert (quick.seconds < slow.seconds).all()


def test_the_best_interval_is_taken() -> None:
    hazards = sg.forecasts.Hazards(node_mtbf_hours=40, restart_seconds=60)

    def goodput(every: float | None) -> float:
        checkpoints = sg.forecasts.Checkpoints(seconds=60, every_seconds=every)
        found = sg.forecasts.forecast_run(
            SURE, steps=30_000, hazards=hazards, checkpoints=checkpoints, runs=60
        )
        return float(found.goodputs.mean())

    best = goodput(None)
    assert best >= max(goodput(seconds) for seconds in (300.0, 600.0, 4000.0, 9000.0)) - 2e-3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, "steps is 0; forecast one or more"),
        ({"runs": 0}, "runs is 0; forecast one or more"),
        (
            {"hazards": sg.forecasts.Hazards(node_mtbf_hours=0.01, restart_seconds=600)},
            "fails every 9.00 s in the mean",
        ),
        (
            {"hazards": sg.forecasts.Hazards(node_mtbf_hours=2, repair_hours=500)},
            "waiting for nodes: make that rarer or shorter",
        ),
    ],
)
def test_runs_that_do_not_end_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        sg.forecasts.forecast_run(SURE, **{"steps": 2000, "runs": 2, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"node_mtbf_hours": -1.0}, "node_mtbf_hours is -1.0; it is above 0"),
        ({"node_mtbf_hours": float("nan")}, "node_mtbf_hours is nan"),
        ({"stall_seconds": 5.0}, "no effect while stalls_per_day is 0"),
        ({"restart_seconds": 5.0}, "no effect while node_mtbf_hours is inf"),
        ({"spare_nodes": 1, "node_mtbf_hours": 5.0}, "no effect while repair_hours is 0"),
        ({"spare_nodes": 1.5, "node_mtbf_hours": 5.0, "repair_hours": 1.0}, "a whole number"),
        ({"slow_factor": 0.5, "node_slow_hours": 5.0, "slow_minutes": 1.0}, "slow_factor is 0.5"),
        ({"node_slow_hours": 5.0}, "node_slow_hours has no effect"),
        ({"stalls_per_day": 5.0}, "stalls_per_day has no effect"),
    ],
)
def test_hazards_that_cannot_be_are_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        sg.forecasts.Hazards(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seconds": -1.0}, "seconds is -1.0; it is 0 or more"),
        ({"every_seconds": 0.0}, "every_seconds is 0.0; it is above 0, or left out"),
        ({"write_seconds": float("inf")}, "write_seconds is inf"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(given: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        sg.forecasts.Checkpoints(**given)


@pytest.mark.slow
@given(st.integers(0, 50), st.floats(50, 400))
def test_more_failures_never_help_in_the_mean(seed: int, hours: float) -> None:
    """Twice as many failures lengthen the mean of many runs."""

    def mean(mtbf: float) -> float:
        hazards = sg.forecasts.Hazards(node_mtbf_hours=mtbf, restart_seconds=600)
        found = sg.forecasts.forecast_run(
            SURE, steps=5_000, hazards=hazards, checkpoints=SAVING, runs=20, seed=seed
        )
        return float(found.seconds.mean())

    assert mean(hours / 8) > mean(hours * 8)


def test_the_command_line_forecasts_and_keeps(tmp_path: Path) -> None:
    plan, graph = tmp_path / "plan.json", tmp_path / "graph.json"
    SIMULATION.plan.save(plan)
    GRAPH.save(graph)
    out, picture = tmp_path / "run.json", tmp_path / "run.png"
    hazards = ["--hazard", "node_mtbf_hours=0.5", "--hazard", "restart_seconds=2"]
    asked = ["forecast", str(plan), str(graph), "--steps", "1000000", "--runs", "5", *hazards]
    found = CliRunner().invoke(app, [*asked, "--json", "--out", str(out), "--plot", str(picture)])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    loaded = sg.forecasts.RunForecast.load(out)
    assert answer["seconds"] == np.median(loaded.seconds)
    assert answer["spent"]["restarts"] == pytest.approx(2 * answer["failures"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--hazard", "mtbf=3"], "node_mtbf_hours"),
        (["--hazard", "node_mtbf_hours=x"], "--hazard node_mtbf_hours=12"),
        (["--checkpoint", "seconds=3", "--checkpoint", "seconds=4"], "seconds is given twice"),
        (["--checkpoint", "seconds"], "with =, and a number"),
    ],
)
def test_what_the_command_line_does_not_understand(
    asked: list[str], words: str, tmp_path: Path
) -> None:
    SIMULATION.plan.save(tmp_path / "plan.json")
    GRAPH.save(tmp_path / "graph.json")
    files = [str(tmp_path / "plan.json"), str(tmp_path / "graph.json")]
    found = CliRunner().invoke(app, ["forecast", *files, "--steps", "10", *asked])
    assert found.exit_code == 2
    assert words in found.output
