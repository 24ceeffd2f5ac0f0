"""The command line's verb that finds a plan.

stratagem search examples.gpt2:build --cluster dgx-a100 --precision bfloat16 --out plan.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from stratagem.cli.shared.named_models import load_cluster, load_graph
from stratagem.cli.shared.options import (
    ANSWER_IS_NO,
    AsJson,
    Baselines,
    ClusterName,
    Devices,
    ExpertLoads,
    Measure,
    Model,
    Nodes,
    Optimizer,
    Plot,
    PrecisionName,
    Recompute,
    Trace,
    among,
    print_json,
    say_written,
    speaker,
    training_of,
)
from stratagem.cli.shared.rich_tables import result_table, strategy_table
from stratagem.cli.shared.simulations import costs_for, show_simulation, simulation_facts
from stratagem.cli.shared.tried_options import takes_tried_options
from stratagem.face import verbs
from stratagem.searcher.driver.budget import EVALUATIONS, Budget
from stratagem.searcher.driver.result import FITTING, SearchResult
from stratagem.searcher.driver.search import PREFERENCES
from stratagem.searcher.improvement.simpler_plans import variety
from stratagem.searcher.methods.simple_strategies import with_experts
from stratagem.searcher.robustness.robust_choice import DRAWS, FOUND
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.schedule_traits import formed_schedules, searched_schedules
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.hardware.headroom import MEASURED
from stratagem.simulator.plan.plan import Plan


@takes_tried_options(behind="recompute")
def search(
    model: Model,
    cluster: ClusterName,
    out: Annotated[Path, typer.Option("--out", "-o", help="plan file to write")],
    nodes: Nodes = None,
    devices: Devices = None,
    precision: PrecisionName = None,
    optimizer: Optimizer = None,
    expert_loads: ExpertLoads = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help=f"that pipelines may have: {' or '.join(searched_schedules())}, and beside "
            f"these {' or '.join(formed_schedules())}, in which the best are tried; repeatable; "
            "left out, 1f1b is searched",
            autocompletion=among((*searched_schedules(), *formed_schedules())),
        ),
    ] = None,
    recompute: Recompute = None,
    on_parts: Annotated[
        bool,
        typer.Option("--place", help="try operators on parts of the meshes of the best plans"),
    ] = False,
    bucket_mib: Annotated[
        float | None,
        typer.Option(
            help="reduce gradients in buckets of at least so many MiB, 0 for none; those of the "
            "fastest baseline when left out"
        ),
    ] = None,
    tensor: Annotated[
        int | None, typer.Option(help="tensor-parallel ways at most (experts count)")
    ] = None,
    pipeline: Annotated[int | None, typer.Option(help="pipeline ranks, exactly")] = None,
    zero: Annotated[
        list[int] | None, typer.Option(help="ZeRO stages that are allowed; repeatable")
    ] = None,
    microbatches: Annotated[
        list[int] | None, typer.Option(help="numbers of microbatches allowed; repeatable")
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(help="DIM=AXIS: never shard a dim on an axis, as vocab=node; repeatable"),
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="DIM=AXIS: always shard a dim there; repeatable")
    ] = None,
    headroom: Annotated[
        str,
        typer.Option(
            help="what of each device's memory must stay free: a share, or measured: what "
            "measured runs took beside what is predicted",
        ),
    ] = MEASURED,
    compare_with: Baselines = None,
    rewrite: Annotated[
        int, typer.Option(help="search so many rewritten graphs too, that compute the same")
    ] = 0,
    start: Annotated[
        Path | None, typer.Option(help="plan file to go on from, perhaps edited")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="file that keeps finished parts, to go on from")
    ] = None,
    prefer: Annotated[
        str,
        typer.Option(
            help="the plan wanted: the simplest of those within 5 % of the fastest, or fastest",
            autocompletion=among(PREFERENCES),
        ),
    ] = "simplest",
    draws: Annotated[
        int,
        typer.Option(
            help="draw errors of the prices so often, to say how sure the choice is; 0 for never"
        ),
    ] = DRAWS,
    space: Annotated[
        bool, typer.Option("--space", help="list every skeleton and what became of it")
    ] = False,
    evaluations: Annotated[
        int | None,
        typer.Option(help=f"plans to evaluate: {EVALUATIONS:,} when left out"),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="stop after so long")] = None,
    gap: Annotated[
        float | None,
        typer.Option(
            help="stop once no plan is proved to take so much less, a share; where none of the "
            "three is given large models stop at what predictions tell apart"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of every random number")] = 0,
    measure: Measure = False,
    plot: Plot = None,
    trace: Trace = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="page to write (.html), with all that was found"),
    ] = None,
    as_json: AsJson = False,
    *,
    tried: dict[str, Any],
) -> None:
    """Find a plan for a model on a cluster.

    Exit code 1 says that the best plan found does not fit the devices' memory.

    Example: stratagem search examples.gpt2:build -c dgx-a100 --precision bfloat16 -o plan.json
    """
    if draws < 0:
        raise ValueError(f"--draws {draws}: draw errors of the prices 0 times or more")
    check_outputs(out, plot, trace, report, checkpoint, read=(model, cluster))
    begun = Plan.load(start) if start is not None else None
    training = training_of(precision, optimizer, begun, expert_loads)
    graph, place = load_graph(model), load_cluster(cluster, nodes, devices)
    costs = costs_for(graph, place, training, measure)
    allowed = Space(
        schedules=tuple(schedule) if schedule else None,
        recompute=tuple(recompute) if recompute else None,
        place=on_parts,
        bucket_bytes=None if bucket_mib is None else round(bucket_mib * 2**20),
        rewrites=rewrite,
        max_tensor=tensor,
        pipeline=pipeline,
        zero_stages=tuple(zero) if zero else None,
        microbatches=tuple(microbatches) if microbatches else None,
        forbid=_dims_on_axes("--forbid", forbid),
        require=_dims_on_axes("--require", require),
        headroom=_headroom(headroom),
        **tried,
    )
    result = verbs.search(
        graph,
        place,
        space=allowed,
        costs=costs,
        training=training,
        budget=Budget(evaluations, seconds, gap, seed=seed),
        baselines=compare_with,
        start=begun,
        checkpoint=checkpoint,
        prefer=prefer,
        draws=draws,
    )
    result.plan.save(out)
    say = speaker(as_json)
    _show(say, result, space)
    show_simulation(say, result.simulation, graph, plot, trace)
    if report is not None:
        verbs.report(result, report, costs=costs, space=allowed)
    say.print()
    say_written(say, report, out)
    if as_json:
        written = {"plan": out, "plot": plot, "trace": trace, "report": report}
        print_json({**_facts(result, space), "written": written})
    if not result.simulation.fits:
        raise typer.Exit(ANSWER_IS_NO)


def _show(say: Console, result: SearchResult, space: bool) -> None:
    plans = result.strategies
    shown = {name: with_experts(name, each.plan) for name, each in plans.items()}
    shown[FOUND] = "the plan found"
    told = {shown[n]: FITTING[1] for n, s in plans.items() if result.fits_without_headroom(s)}
    sure = {} if result.robustness is None else result.robustness.by_plan
    draws = {shown[name]: figures for name, figures in sure.items()}
    named = {shown[name]: each for name, each in plans.items()}
    say.print(strategy_table(named, told=told, draws=draws))
    say.print(
        f"{result.spent}; {result.stop_reason.value}.\nCertificate: {result.certificate}.\n"
        f"Simplicity: {result.simplicity}.\n"
        f"Robustness: {_sureness(result)}.\n"
        f"Headroom: {result.headroom} had to stay free.\n"
    )
    for name, why in result.notes.items():
        if name.startswith("method "):
            say.print(f"{name}: {why}.")
    for sentence in filter(None, (result.order, result.simulation.crowded)):
        say.print(f"{sentence}.\n")
    if space:
        say.print(result_table(result.space_table))
        for reason, count in result.notes.items():
            say.print(f"{reason}: {count}")


def _sureness(result: SearchResult) -> str:
    """How sure the choice is, or why nothing is said of it."""
    sure = result.robustness
    if sure is not None:
        return f"the plan found is {sure.in_words}. {sure.note.rstrip('.')}"
    return result.notes.get("errors of prices", "no errors of prices were drawn")


def _facts(result: SearchResult, space: bool) -> dict[str, Any]:
    """What was found, in numbers: seconds and bytes."""
    sure = result.robustness
    facts = {
        "model": result.plan.model,
        "cluster": result.plan.cluster.name,
        "devices": result.plan.num_devices,
        **simulation_facts(result.simulation),
        "bound": result.bound,
        "gap": result.gap,
        "simplicity": result.simplicity,
        "order": result.order,
        "variety": variety(result.plan, result.graph),
        "exports": result.exports,
        "robustness": None if sure is None else sure.table.to_dict()["rows"],
        "headroom": {"share": result.headroom.share, "bytes": result.headroom.fixed_bytes},
        "certificate": result.certificate,
        "tokens_per_second": result.tokens_per_second,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "stopped": result.stop_reason.name.lower(),
        "strategies": result.table.to_dict()["rows"],
    }
    return {**facts, "space": result.space_table.to_dict()["rows"]} if space else facts


def _headroom(given: str) -> float | str:
    """A share of the memory, or the name of the headroom that was measured."""
    if given == MEASURED:
        return given
    try:
        return float(given)
    except ValueError:
        raise ValueError(
            f"--headroom {given!r}: write a share of the memory, such as 0.1, or {MEASURED}"
        ) from None


def _dims_on_axes(option: str, given: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for text in given or ():
        dim, equals, axis = text.partition("=")
        if not (dim and equals and axis):
            raise ValueError(f"{option} {text!r}: write DIM=AXIS, such as vocab=node")
        pairs.append((dim, axis))
    return tuple(pairs)
