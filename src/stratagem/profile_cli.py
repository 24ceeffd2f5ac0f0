"""The command line's verb that measures.

stratagem profile examples.small_gpt:build --cluster local-cpu --seconds 60
stratagem profile examples.small_gpt:build --plan plan.json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stratagem.face import MAX_OPERATORS
from stratagem.model_spec import load_cluster, load_graph
from stratagem.simulator.files import encode, write_text
from stratagem.simulator.plan import Plan
from stratagem.simulator.training import Training
from stratagem.tables import result_table

if TYPE_CHECKING:
    from stratagem.profiling import Profiled

console = Console(highlight=False)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def profile(
    model: Annotated[
        str, typer.Argument(help="module:function returning (model, inputs), or a graph file")
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="preset (see clusters) or cluster file")
    ] = "local-cpu",
    nodes: Annotated[int | None, typer.Option("--nodes", help="number of nodes")] = None,
    devices: Annotated[int | None, typer.Option("--devices", help="devices per node")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="time what this plan runs on its cluster, not a search's space"
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adam or sgd")] = "adam",
    limit: Annotated[
        int, typer.Option(help="operators to time at most, the most valuable first")
    ] = MAX_OPERATORS,
    seconds: Annotated[float | None, typer.Option(help="begin no operator after so long")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache", help="cache file; that of STRATAGEM_CACHE or the user if left out"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="cluster file to write, with this machine's link"),
    ] = None,
) -> None:
    """Time on this machine the operators that a search or a plan asks for."""
    from stratagem import profiling

    graph = load_graph(model)
    if plan is None:
        place = load_cluster(cluster, nodes, devices)
        training = Training(precision, optimizer)
        wanted = profiling.space_operators(graph, place, training)
    else:
        loaded = Plan.load(plan)
        place, training = loaded.cluster, loaded.training
        wanted = profiling.planned_operators(graph, loaded)
    try:
        done = profiling.profile_wanted(
            wanted, place, training, cache=cache, limit=limit, seconds=seconds
        )
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ["interrupted"]):
            console.print(note, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    _print(done, training)
    if out is not None:
        found = profiling.measured_cluster(place.num_devices, cache=cache)
        write_text(out, encode(found.cluster))
        console.print()
        console.print(result_table(found.table))
        console.print(f"cluster of {place.num_devices} processes written to {out}")


def _print(done: Profiled, training: Training) -> None:
    """What was timed, what to beware of, and how well the rest can be estimated."""
    report = done.report
    console.print(
        f"{report.num_timed} operators timed in {report.seconds:.0f} s, {report.num_cached} were "
        f"there already, {done.num_left_out} left out; {report.num_outliers} runs were far off "
        f"their operator's median. Kept in {done.path}",
        soft_wrap=True,
    )
    for warning in done.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    console.print()
    console.print(result_table(done.costs.explain(done.device, training)))
