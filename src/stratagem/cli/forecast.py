"""The command line's verb on whole runs.

stratagem forecast plan.json examples.gpt2:build --steps 500000 --hazard node_mtbf_hours=6000 \
    --hazard restart_seconds=600 --checkpoint seconds=30
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from stratagem.cli.shared.named_models import load_graph
from stratagem.cli.shared.options import (
    AsJson,
    Measure,
    Model,
    PlanFile,
    among,
    print_json,
    print_tables,
    say_written,
    speaker,
)
from stratagem.cli.shared.simulations import simulated
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.drawing.forecast_plot import plot_forecast
from stratagem.simulator.forecast.checkpoint_intervals import Checkpoints
from stratagem.simulator.forecast.hazards import Hazards
from stratagem.simulator.forecast.run_forecast import forecast_run
from stratagem.simulator.forecast.training_run import Spent
from stratagem.simulator.plan.plan import Plan

Record = TypeVar("Record", Hazards, Checkpoints)

HAZARDS = tuple(field.name for field in fields(Hazards))
CHECKPOINTS = tuple(field.name for field in fields(Checkpoints))


def forecast(
    plan: PlanFile,
    model: Model,
    steps: Annotated[int, typer.Option(help="steps of the whole run")],
    hazard: Annotated[
        list[str] | None,
        typer.Option(
            help=f"what goes wrong, as NAME=NUMBER, any number of times: {', '.join(HAZARDS)}",
            autocompletion=among([f"{name}=" for name in HAZARDS]),
        ),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help=f"when checkpoints are written, as NAME=NUMBER: {', '.join(CHECKPOINTS)}",
            autocompletion=among([f"{name}=" for name in CHECKPOINTS]),
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="possible runs to play")] = 200,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    measure: Measure = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="picture to write")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="forecast file to write")] = None,
    as_json: AsJson = False,
) -> None:
    """Say when a whole run will end and what it will cost, with failures and restarts.

    Example: stratagem forecast plan.json examples.gpt2:build --steps 500000
    --hazard node_mtbf_hours=6000 --hazard restart_seconds=600 --checkpoint seconds=30
    """
    check_outputs(plot, out, read=(plan, model))
    simulation = simulated(Plan.load(plan), load_graph(model), measure)
    found = forecast_run(
        simulation,
        steps=steps,
        hazards=_record(Hazards, "--hazard", hazard or []),
        checkpoints=_record(Checkpoints, "--checkpoint", checkpoint or []),
        runs=runs,
        seed=seed,
    )
    say = speaker(as_json)
    print_tables(say, found.table)
    if plot is not None:
        plot_forecast(found, plot)
    if out is not None:
        found.save(out)
    say_written(say, plot, out)
    if as_json:
        (low, high), means = found.interval, found.spent.mean(axis=0).tolist()
        print_json(
            {
                "seconds": float(np.median(found.seconds)),
                "interval": [low, high],
                "goodput": float(np.median(found.goodputs)),
                "cost": float(np.median(found.costs)) or None,
                "failures": float(found.failures.mean()),
                "steps_between_checkpoints": found.plan.steps_between,
                "spent": {kind.name.lower(): x for kind, x in zip(Spent, means, strict=True)},
            }
        )


def _record(kind: type[Record], option: str, given: list[str]) -> Record:
    names = [field.name for field in fields(kind)]
    values: dict[str, Any] = {}
    for each in given:
        name, equals, number = each.partition("=")
        if name not in names:
            raise unknown(f"name in {option}", name, names)
        if name in values:
            raise ValueError(f"{option} {name} is given twice; give it once")
        try:
            values[name] = float(number)
        except ValueError:
            raise ValueError(
                f"{option} {each!r} is no {name}{'=' if equals else ' with =,'} and a number; "
                f"write {option} {name}=12"
            ) from None
    return kind(**values)
