"""The command line's verb that measures.

stratagem profile examples.small_gpt:build --cluster local-cpu --seconds 60
stratagem profile examples.small_gpt:build --plan plan.json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stratagem.basics.startup import INTERRUPTED
from stratagem.cli.shared.named_models import load_cluster, load_graph
from stratagem.cli.shared.options import (
    AsJson,
    Devices,
    Model,
    Nodes,
    Optimizer,
    PrecisionName,
    among,
    print_json,
    speaker,
    training_of,
)
from stratagem.cli.shared.rich_tables import result_table
from stratagem.face.verbs import MAX_OPERATORS
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.hardware.cluster import Cluster, preset_names
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan

if TYPE_CHECKING:
    from stratagem.calibration.profile_space import Profiled


def profile(
    model: Model,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            help="preset or cluster file, whose devices are here; local-cpu if left out",
            autocompletion=among(preset_names),
        ),
    ] = None,
    nodes: Nodes = None,
    devices: Devices = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", help="time what this plan runs, on its cluster, not a search's space"
        ),
    ] = None,
    precision: PrecisionName = None,
    optimizer: Optimizer = None,
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
        typer.Option(
            "--out",
            "-o",
            help="cluster file to write, the link in a node as measured here",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time on this machine the operators that a search or a plan asks for.

    Example: stratagem profile examples.small_gpt:build --seconds 60 --out here.json
    """
    from stratagem.calibration import profile_space
    from stratagem.calibration.measured_links import check_links, measured_links

    check_outputs(out, cache, read=(model, plan, cluster))
    graph = load_graph(model)
    loaded = Plan.load(plan) if plan is not None else None
    wanted = profile_space.wanted_operators(
        graph,
        _cluster(loaded, cluster, nodes, devices),
        plan=loaded,
        training=training_of(precision, optimizer, loaded),
    )
    place, training = wanted.cluster, wanted.training
    if out is not None:
        check_links(place)
    try:
        done = profile_space.profile_wanted(
            *(wanted.operators, place, training),
            cache=cache,
            touched=wanted.touched,
            limit=limit,
            seconds=seconds,
        )
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ["interrupted"]):
            Console(stderr=True, highlight=False, markup=False, emoji=False).print(
                note, soft_wrap=True
            )
        raise typer.Exit(INTERRUPTED) from None
    say = speaker(as_json)
    _print(say, done, training)
    if out is not None:
        found = measured_links(place, cache=cache)
        found.cluster.save(out)
        say.print()
        say.print(result_table(found.table))
        say.print(
            f"cluster {place.name} of {place.num_devices} devices written to {out}",
            soft_wrap=True,
        )
    if as_json:
        print_json({**_facts(done, training), "out": out})


def _cluster(
    plan: Plan | None, name: str | None, nodes: int | None, devices: int | None
) -> Cluster | None:
    """The cluster that was asked for; None where that is the plan's."""
    if plan is None:
        return load_cluster(name or "local-cpu", nodes, devices)
    if name is not None:
        return load_cluster(name, nodes, devices)
    if (nodes, devices) != (None, None):
        return plan.cluster.resized(num_nodes=nodes, devices_per_node=devices)
    return None


def _facts(done: Profiled, training: Training) -> dict[str, Any]:
    """What was timed, in numbers."""
    report = done.report
    return {
        "timed": report.num_timed,
        "cached": report.num_cached,
        "left_out": done.num_left_out,
        "outliers": report.num_outliers,
        "seconds": report.seconds,
        "cache": done.path,
        "warnings": done.warnings,
        "errors": done.costs.explain(done.device, training).to_dict(),
    }


def _print(say: Console, done: Profiled, training: Training) -> None:
    """What was timed, what to beware of, and how well the rest can be estimated."""
    report = done.report
    say.print(
        f"{report.num_timed} operators timed in {report.seconds:.0f} s, {report.num_cached} were "
        f"there already, {done.num_left_out} left out; {report.num_outliers} runs were far off "
        f"their operator's median. Kept in {done.path}",
        soft_wrap=True,
    )
    for warning in done.warnings:
        say.print(f"warning: {warning}", soft_wrap=True)
    say.print()
    say.print(result_table(done.costs.explain(done.device, training)))
