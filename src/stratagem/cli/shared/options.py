"""What the verbs of the command line share: options, exit codes, and how they answer.

Every verb takes ``--json``: one object on standard output and nothing else there. Progress and
errors go to standard error in any case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stratagem.cli.shared.rich_tables import result_table
from stratagem.searcher.methods.registry import METHODS
from stratagem.simulator.base.files import write_text
from stratagem.simulator.base.precision import PRECISIONS
from stratagem.simulator.base.tables import Table
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES
from stratagem.simulator.hardware.cluster import preset_names
from stratagem.simulator.kernel_times.training import OPTIMIZER_STATES, Training
from stratagem.simulator.plan.plan import Plan

ANSWER_IS_NO = 1
"""Exit code where the work was done and its answer is no: no plan fits, a machine cannot train."""
WRONG_INPUT = 2
"""Exit code where the input, a file or the machine does not allow what was asked."""

MAX_ROWS = 20
"""Rows of a table that are printed; its title counts the others, and --tables writes them."""


def among(names: Callable[[], Sequence[str]] | Sequence[str]) -> Callable[[str], list[str]]:
    """What a shell may complete to some names.

    Example:
        >>> among(["adam", "sgd"])("a")
        ['adam']
    """

    def complete(incomplete: str) -> list[str]:
        known = names() if callable(names) else names
        return [name for name in known if name.startswith(incomplete)]

    return complete


Model = Annotated[
    str, typer.Argument(help="module:function, a graph file, or sg.models:gpt(batch=64)")
]
PlanFile = Annotated[Path, typer.Argument(help="plan file, from search")]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="preset (see clusters) or cluster file",
        autocompletion=among(preset_names),
    ),
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="number of nodes")]
Devices = Annotated[int | None, typer.Option("--devices", help="devices per node")]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(PRECISIONS)}; left out, that of a plan given, else float32",
        autocompletion=among(tuple(PRECISIONS)),
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help="adam, adam8bit, adafactor, sgd, lion, lamb or muon; else that of a plan, or adam",
        autocompletion=among(tuple(OPTIMIZER_STATES)),
    ),
]
ExpertLoads = Annotated[
    str | None,
    typer.Option(
        "--expert-loads",
        help="share of choices that each expert gets, as 0.4,0.3,0.2,0.1; else that of a plan, or "
        "all alike",
    ),
]
Recompute = Annotated[
    list[str] | None,
    typer.Option(
        help="policies of which every stage follows one: none, selective, full; repeatable",
        autocompletion=among(RECOMPUTE_POLICIES),
    ),
]
Baselines = Annotated[
    list[str] | None,
    typer.Option(
        "--baseline",
        help="method to compare with, as Alpa or FlexFlow; repeatable",
        autocompletion=among(tuple(METHODS)),
    ),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="time operators on this machine, not the device model")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="picture of the timeline to write")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Perfetto trace to write (.json.gz)")]
Tables = Annotated[Path | None, typer.Option("--tables", help="JSON file of the tables to write")]
AsJson = Annotated[
    bool, typer.Option("--json", help="print one JSON object instead of words and tables")
]


def training_of(
    precision: str | None, optimizer: str | None, plan: Plan | None, loads: str | None = None
) -> Training:
    """The training that options ask for; what they leave out is a plan's, if one is given."""
    base = Training() if plan is None else plan.training
    return with_expert_loads(
        replace(
            base, precision=precision or base.precision, optimizer=optimizer or base.optimizer
        ),
        loads,
    )


def with_expert_loads(training: Training, loads: str | None) -> Training:
    """The training with the loads of experts that an option says.

    Raises:
        ValueError: they are no numbers with commas between them.
    """
    if loads is None:
        return training
    try:
        shares = tuple(float(each) for each in loads.split(","))
    except ValueError as error:
        raise ValueError(
            f"--expert-loads {loads}: give a number for each expert, with commas between them"
        ) from error
    return replace(training, expert_loads=shares)


def speaker(as_json: bool) -> Console:
    """Where a verb prints words and tables as they are: nowhere if it is to print JSON."""
    return Console(highlight=False, markup=False, emoji=False, quiet=as_json)


def print_json(answer: dict[str, Any]) -> None:
    """Print the one JSON object of a verb."""
    typer.echo(json.dumps(plain(answer), ensure_ascii=False, indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """A value with what JSON has not as text or null: paths, and numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def print_tables(say: Console, *tables: Table) -> None:
    """Print tables, their first rows only, and how to read them."""
    for table in tables:
        say.print()
        say.print(result_table(table, most=MAX_ROWS))
        if table.note:
            say.print(table.note, soft_wrap=True)


def write_json(say: Console, path: Path, columns: dict[str, Any]) -> None:
    """Write the file of ``--tables``."""
    write_text(path, json.dumps(columns, ensure_ascii=False, indent=1) + "\n")
    say_written(say, path)


def say_written(say: Console, *paths: Path | None) -> None:
    """Name the files that were written."""
    for path in paths:
        if path is not None:
            say.print(f"Written to {path}", soft_wrap=True)
