"""When a training run will end and what it will cost: many possible runs, played one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import ClassVar

import msgspec
import numpy as np

from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.hostile_texts import check_numbers
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_duration, readable_unit
from stratagem.simulator.forecast.checkpoint_intervals import Checkpoints, expected_seconds
from stratagem.simulator.forecast.hazards import DAY, HOUR, Hazards
from stratagem.simulator.forecast.training_run import RunPlan, Spent, TrainingRun
from stratagem.simulator.simulation.simulation import Simulation

FORECAST_FORM = FileForm(version=1, remedy="make the forecast again", format="stratagem forecast")

LONGEST = 100.0
"""A run that lasts longer than this times its steps does not come to an end in practice."""
LOW, HIGH = 0.1, 0.9
"""Of a hundred runs, eighty end between these quantiles."""


@dataclass(frozen=True, eq=False)
class RunForecast(SavedValue):
    """Possible courses of one training run, equally likely.

    Example:
        >>> forecast.save("run.json")  # doctest: +SKIP
        >>> RunForecast.load("run.json")  # doctest: +SKIP
        <RunForecast of 100 runs: 41.2 days (80 %: 40.1 to 42.5), goodput 93 %>

    Attributes:
        plan: steps, step time and checkpoints.
        hazards: what may go wrong.
        step_error: relative standard deviation of the predicted step time; every run draws one
            error for all of its steps.
        price_per_hour: of all nodes and the spare ones; 0 without a price.
        seconds: [runs], wall time.
        spent: [runs, kinds of `Spent`], seconds.
        failures: [runs].
    """

    FILE: ClassVar[str] = "forecast file"

    plan: RunPlan
    hazards: Hazards
    step_error: float
    price_per_hour: float
    seconds: Floats
    spent: Floats
    failures: Floats

    @property
    def goodputs(self) -> Floats:
        """[runs], the share of the wall time that goes to steps that count."""
        useful: Floats = self.spent[:, list(Spent).index(Spent.USEFUL)] / self.seconds
        return useful

    @property
    def costs(self) -> Floats:
        """[runs], money; 0 without a price."""
        paid: Floats = self.seconds / HOUR * self.price_per_hour
        return paid

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which four of five runs end."""
        low, high = np.quantile(self.seconds, [LOW, HIGH])
        return float(low), float(high)

    def ends(self, start: datetime) -> tuple[datetime, datetime, datetime]:
        """When the run ends that begins then: early, in the median and late.

        Example:
            >>> forecast.ends(datetime(2026, 1, 1))[1]  # doctest: +SKIP
            datetime.datetime(2026, 2, 11, 4, 48)
        """
        low, high = self.interval
        early, middle, late = (
            start + timedelta(seconds=s) for s in (low, float(np.median(self.seconds)), high)
        )
        return early, middle, late

    @property
    def in_words(self) -> str:
        """How long, at what goodput and for how much, in a few words."""
        unit, length = _unit(float(np.median(self.seconds)))
        low, middle, high = (
            f"{s / length:,.1f}"
            for s in (self.interval[0], np.median(self.seconds), self.interval[1])
        )
        money = ""
        if self.price_per_hour:
            money = f", {np.median(self.costs):,.0f} in money"
        return (
            f"{middle} {unit} (80 %: {low} to {high}), goodput "
            f"{100 * np.median(self.goodputs):.1f} %{money}"
        )

    def __repr__(self) -> str:
        return f"<RunForecast of {len(self.seconds)} runs: {self.in_words}>"

    def __str__(self) -> str:
        return f"{self.in_words}\n{self.table}"

    @property
    def table(self) -> Table:
        """Where the time goes: the mean of all runs, and the range of four of five."""
        columns = {
            "time": Unit.TEXT,
            "hours": Unit.TEXT,
            "share": Unit.SHARE,
            "from": Unit.SHARE,
            "to": Unit.SHARE,
        }
        shares = self.spent / self.seconds[:, None]
        lows, highs = np.quantile(shares, [LOW, HIGH], axis=0)
        rows = tuple(
            (
                kind.value,
                f"{self.spent[:, k].mean() / HOUR:,.1f}",
                float(shares[:, k].mean()),
                float(lows[k]),
                float(highs[k]),
            )
            for k, kind in enumerate(Spent)
            if self.spent[:, k].any()
        )
        return Table(f"{len(self.seconds)} possible runs: {self.in_words}", columns, rows)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def to_json(self) -> str:
        """The text of a forecast file."""
        hazards = {
            field.name: getattr(self.hazards, field.name)
            for field in fields(Hazards)
            if getattr(self.hazards, field.name) != field.default
        }
        spent = {kind.name: self.spent[:, k].tolist() for k, kind in enumerate(Spent)}
        kept = _KeptForecast(
            self.plan,
            hazards,
            self.step_error,
            self.price_per_hour,
            self.seconds.tolist(),
            spent,
            self.failures.tolist(),
        )
        return encode({**FORECAST_FORM.head, "forecast": kept})

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> RunForecast:
        """Read the text of a forecast file.

        Raises:
            ValueError: names the file, the field and what was expected there.
        """
        what = what or cls.FILE
        kept = FORECAST_FORM.read(text, _ForecastFile, what).forecast
        with reading(what):
            check_numbers(msgspec.to_builtins(kept), "its forecast", least=1e-30, most=1e30)
            return kept.forecast()


@dataclass(frozen=True)
class _KeptForecast:
    """A forecast as its file has it; of hazards those that there are."""

    plan: RunPlan
    hazards: dict[str, float]
    step_error: float
    price_per_hour: float
    seconds: list[float]
    spent: dict[str, list[float]]
    failures: list[float]

    def forecast(self) -> RunForecast:
        """What was kept.

        Raises:
            ValueError: if parts do not belong together.
        """
        names = [kind.name for kind in Spent]
        if list(self.spent) != names:
            raise ValueError(f"its spent has {', '.join(self.spent)}; {', '.join(names)} expected")
        strange = set(self.hazards) - {field.name for field in fields(Hazards)}
        if strange:
            raise unknown("hazard", min(strange), [field.name for field in fields(Hazards)])
        lengths = {len(each) for each in (self.seconds, self.failures, *self.spent.values())}
        if len(lengths) > 1 or not self.seconds:
            raise ValueError(
                f"its runs are {sorted(lengths)} in number; one number of them, above 0"
            )
        if min(self.seconds) <= 0:
            raise ValueError(f"its seconds are {min(self.seconds)}; they are above 0")
        return RunForecast(
            self.plan,
            Hazards(**self.hazards),  # type: ignore[arg-type]
            self.step_error,
            self.price_per_hour,
            np.array(self.seconds),
            np.array([self.spent[name] for name in names]).T,
            np.array(self.failures),
        )


@dataclass(frozen=True)
class _ForecastFile:
    version: int
    forecast: _KeptForecast
    format: str = FORECAST_FORM.format


def forecast_run(
    simulation: Simulation,
    *,
    steps: int,
    hazards: Hazards | None = None,
    checkpoints: Checkpoints | None = None,
    runs: int = 200,
    seed: int = 0,
) -> RunForecast:
    """Play a training run many times, with all that goes wrong on its days.

    Every run draws how wrong the predicted step time is, by its stated error, and when nodes fail,
    are slow or wait for data (see `Hazards`). Training goes back to the last checkpoint that was
    written whole, waits for nodes and starts again.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.simulation.simulation import simulate_plan
        >>> graph = mlp([4096, 4096], batch=1024)
        >>> plan = TrainingSetup().plan(graph, Cluster.preset("dgx-a100"))
        >>> forecast = forecast_run(
        ...     simulate_plan(plan, graph, default_costs()),
        ...     steps=100_000_000,
        ...     hazards=Hazards.published("bloom-176b", restart_seconds=600),
        ...     checkpoints=Checkpoints(seconds=20),
        ...     runs=20,
        ... )
        >>> bool(0.9 < forecast.goodputs.mean() < 1)
        True

    Args:
        simulation: of the plan that is to be run. Nodes that it uses may fail; those that it
            leaves idle are paid for as the others are.
        steps: that the run has.
        hazards: what may go wrong; nothing, if left out.
        checkpoints: when they are written and what that takes; if left out, that takes nothing.
        runs: to play.
        seed: of all that is drawn; with the same one the same misfortunes meet other plans.

    Raises:
        ValueError: an argument of another type, fewer than one step or run, a seed below 0, or a
            run that does not come to an end; the message says what keeps it.
    """
    check_arguments(
        "forecast_run",
        simulation=(simulation, Simulation),
        steps=(steps, int),
        hazards=(hazards, Hazards | None),
        checkpoints=(checkpoints, Checkpoints | None),
        runs=(runs, int),
        seed=(seed, int),
    )
    for name, count in (("steps", steps), ("runs", runs)):
        if count < 1:
            raise ValueError(f"{name} is {count}; forecast one or more")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")
    hazards, checkpoints = hazards or Hazards(), checkpoints or Checkpoints()
    cluster = simulation.plan.cluster
    num_nodes = len(simulation.plan.nodes)
    mtbf = hazards.mtbf(num_nodes)
    between = checkpoints.interval(mtbf) / simulation.step_time
    plan = RunPlan(
        steps=steps,
        step_seconds=simulation.step_time,
        steps_between=max(1, round(min(between, steps))),
        checkpoint_seconds=checkpoints.seconds,
        write_seconds=checkpoints.write_seconds,
        num_nodes=num_nodes,
    )
    _check_progress(plan, hazards, mtbf)
    played = [
        _play(plan, hazards, simulation.relative_error, sources)
        for sources in np.random.SeedSequence(seed).spawn(runs)
    ]
    nodes = cluster.num_nodes + hazards.spare_nodes
    return RunForecast(
        plan,
        hazards,
        simulation.relative_error,
        cluster.node_price_per_hour * nodes,
        np.array([sum(run.spent.values()) for run in played]),
        np.array([list(run.spent.values()) for run in played]),
        np.array([float(run.failures) for run in played]),
    )


def _check_progress(plan: RunPlan, hazards: Hazards, mtbf: float) -> None:
    """Refuse runs that failures keep from ending, before they are played."""
    work, interval = plan.steps * plan.step_seconds, plan.interval
    expected = expected_seconds(
        work,
        interval,
        mtbf=mtbf,
        checkpoint=plan.checkpoint_seconds,
        restart=hazards.restart_seconds,
    )
    if expected > LONGEST * (work + plan.checkpoint_seconds):
        raise ValueError(
            f"the job fails every {format_duration(mtbf)} in the mean, but only gets on when "
            f"{format_duration(hazards.restart_seconds + interval + plan.checkpoint_seconds)} of "
            "restart, steps and checkpoint pass without a failure: it would take more than "
            f"{LONGEST:.0f} times as long as its steps; write checkpoints more often, or use "
            "nodes that fail less"
        )


def _play(
    plan: RunPlan, hazards: Hazards, error: float, sources: np.random.SeedSequence
) -> TrainingRun:
    drawn, misfortunes = sources.spawn(2)
    off = math.exp(math.log1p(error) * np.random.default_rng(drawn).normal())
    mistaken = replace(plan, step_seconds=plan.step_seconds * off)
    run = TrainingRun(mistaken, hazards, misfortunes)
    work = plan.steps * mistaken.step_seconds + plan.checkpoint_seconds + plan.write_seconds
    if math.isinf(run.play(until=LONGEST * work)):
        most = max(run.spent, key=lambda kind: run.spent[kind])
        share = run.spent[most] / sum(run.spent.values())
        raise ValueError(
            f"a run was not at its end after {LONGEST:.0f} times as long as its steps take; "
            f"{100 * share:.0f} % of the time went to {most.value}: make that rarer or shorter "
            "(more spare nodes, quicker repairs or restarts)"
        )
    return run


def _unit(seconds: float) -> tuple[str, float]:
    """In what a person counts so long a time, and its length in seconds."""
    for unit, length in (("days", DAY), ("hours", HOUR)):
        if seconds >= 2 * length:
            return unit, length
    return readable_unit(seconds)
