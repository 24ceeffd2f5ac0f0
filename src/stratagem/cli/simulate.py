"""The command line's verbs that predict, and lay predictions beside each other and beside runs.

stratagem simulate plan.json examples.gpt2:build --plot step.png
stratagem compare plan.json examples.small_gpt:build run.json --diff
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stratagem.cli.shared.named_models import load_graph
from stratagem.cli.shared.options import (
    AsJson,
    ExpertLoads,
    Measure,
    Model,
    PlanFile,
    Plot,
    Tables,
    Trace,
    print_json,
    print_tables,
    say_written,
    speaker,
    with_expert_loads,
    write_json,
)
from stratagem.cli.shared.rich_tables import comparison_table
from stratagem.cli.shared.simulations import (
    costs_for,
    show_simulation,
    simulated,
    simulation_facts,
)
from stratagem.face import verbs
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.drawing.memory_plot import plot_memory
from stratagem.simulator.drawing.timeline_plot import plot_timelines
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.timeline.chrome_trace import write_trace
from stratagem.simulator.timeline.step_difference import TimelineDiff, diff_timelines
from stratagem.simulator.timeline.timeline_tables import collective_table, operator_table

if TYPE_CHECKING:
    from stratagem.executor.results.execution_result import ExecutionResult
    from stratagem.simulator.graph.operator_graph import OperatorGraph

TABLES = ("groups", "operators", "collectives", "critical_path")
"""Of a simulation, those that ``--tables`` writes."""


def simulate(
    plan: PlanFile,
    model: Model,
    measure: Measure = False,
    expert_loads: ExpertLoads = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="time of each operator, layers together")
    ] = False,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="time of each communication, and what is exposed")
    ] = False,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="what the step time is made of; in --plot too")
    ] = False,
    plot: Plot = None,
    memory: Annotated[
        Path | None,
        typer.Option("--memory", help="picture of each rank's memory to write; lists the fullest"),
    ] = None,
    trace: Trace = None,
    tables: Tables = None,
    as_json: AsJson = False,
) -> None:
    """Predict a plan's step time and memory.

    Example: stratagem simulate plan.json examples.gpt2:build --plot step.png --operators
    """
    check_outputs(plot, memory, trace, tables, read=(plan, model))
    graph = load_graph(model)
    loaded = Plan.load(plan)
    training = with_expert_loads(loaded.training, expert_loads)
    simulation = simulated(replace(loaded, training=training), graph, measure)
    say = speaker(as_json)
    path = simulation.critical_path if critical_path else None
    show_simulation(say, simulation, graph, plot, trace, path)
    if operators:
        print_tables(say, operator_table(simulation.timeline, by_layer=False))
    if collectives:
        sizes = simulation.communication_bytes
        moved = collective_table(simulation.timeline, sizes, by_layer=False)
        print_tables(say, simulation.groups, moved)
    if path is not None:
        print_tables(say, path.by_work, path.by_group, path.by_operator)
    if memory is not None:
        _draw_memory(say, simulation, memory)
    if tables is not None:
        parts = {part: getattr(simulation, part).to_dict() for part in TABLES}
        write_json(say, tables, parts)
    if as_json:
        asked = dict(zip(TABLES[1:], (operators, collectives, critical_path), strict=True))
        told = {part: getattr(simulation, part).to_dict() for part in TABLES[1:] if asked[part]}
        groups = simulation.groups.to_dict()
        print_json({**simulation_facts(simulation), "groups": groups, **told})


def _draw_memory(say: Console, simulation: Simulation, path: Path) -> None:
    ranks = range(len(simulation.memory))
    plot_memory([simulation.memory_timeline(rank) for rank in ranks], path)
    print_tables(say, max(simulation.memory, key=lambda rank: rank.peak).table)
    say_written(say, path)


def compare(
    plan: PlanFile,
    model: Model,
    result: Annotated[Path, typer.Argument(help="result file, from run")],
    measure: Measure = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="where the measured step takes longer")
    ] = False,
    tasks: Annotated[
        bool,
        typer.Option(
            "--tasks", help="every stage, and every operator and collective by its error"
        ),
    ] = False,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn", help="keep the measured operators in the timing cache, as of what ran them"
        ),
    ] = False,
    plot: Plot = None,
    trace: Trace = None,
    tables: Tables = None,
    as_json: AsJson = False,
) -> None:
    """Lay a plan's predicted step beside a measured one.

    Example: stratagem compare plan.json examples.small_gpt:build run.json --diff --plot both.png
    """
    from stratagem.executor.results.execution_result import ExecutionResult
    from stratagem.runs.predicted_and_measured import compare as lay_beside

    check_outputs(plot, trace, tables, read=(plan, model, result))
    loaded, run, graph = Plan.load(plan), ExecutionResult.load(result), load_graph(model)
    comparison = lay_beside(simulated(loaded, graph, measure), run, plot)
    kept = _learn(run, graph, loaded) if learn else 0
    if trace is not None:
        comparison.save_trace(trace)
    say = speaker(as_json)
    say.print(comparison_table(comparison))
    if comparison.peaks:
        print_tables(say, comparison.memory_table)
    for number, reason in enumerate(comparison.most_off):
        say.print(f"{'most off: ' if not number else '          '}{reason}", soft_wrap=True)
    say_written(say, plot, trace)
    if diff:
        _print_diff(say, comparison.diff)
    if tasks:
        print_tables(say, comparison.stage_table, comparison.task_table)
    if learn:
        say.print(
            f"kept {kept} measured passes of {run.provenance} in the timing cache, which "
            "predict where the profiler has measured nothing itself",
            soft_wrap=True,
        )
    if tables is not None:
        write_json(say, tables, comparison.diff.to_dict())
    if as_json:
        rows = [
            {"what": row.what, "predicted": row.predicted, "measured": row.measured}
            for row in comparison.rows
        ]
        answer: dict[str, Any] = {
            "relative_error": comparison.relative_error,
            "rows": rows,
            "most_off": [str(reason) for reason in comparison.most_off],
        }
        if comparison.at_pace is not None:
            answer["at_pace"] = comparison.at_pace
        if comparison.peaks:
            answer["memory"] = comparison.memory_table.to_dict()
        if comparison.notes:
            answer["notes"] = list(comparison.notes)
        if learn:
            answer["kept"] = kept
        if tasks:
            answer["stages"] = comparison.stage_table.to_dict()
            answer["tasks"] = comparison.task_table.to_dict()
        print_json({**answer, "diff": comparison.diff.to_dict()} if diff else answer)


def _learn(run: ExecutionResult, graph: OperatorGraph, plan: Plan) -> int:
    """Keep what a result file shows, as times of the device that it names."""
    from stratagem.calibration.learned_times import learn_from
    from stratagem.profiler.cache.timing_cache import TimingCache

    with TimingCache() as cache:
        return learn_from(run, graph, plan, cache)


def diff(
    plan: PlanFile,
    other: Annotated[Path, typer.Argument(help="plan file to compare it with")],
    model: Model,
    measure: Measure = False,
    plot: Plot = None,
    trace: Trace = None,
    tables: Tables = None,
    as_json: AsJson = False,
) -> None:
    """Say where the predicted steps of two plans differ.

    Example: stratagem diff plan.json other.json examples.gpt2:build --plot both.png
    """
    check_outputs(plot, trace, tables, read=(plan, other, model))
    plans, graph = [Plan.load(plan), Plan.load(other)], load_graph(model)
    timelines = [
        replace(simulated(loaded, graph, measure).timeline, label=path.stem)
        for loaded, path in zip(plans, (plan, other), strict=True)
    ]
    difference = diff_timelines(*timelines)
    if plot is not None:
        plot_timelines(timelines, plot)
    if trace is not None:
        write_trace(trace, *timelines)
    say = speaker(as_json)
    _print_diff(say, difference)
    say_written(say, plot, trace)
    if tables is not None:
        write_json(say, tables, difference.to_dict())
    if as_json:
        print_json(difference.to_dict())


def schedules(
    plan: PlanFile,
    model: Model,
    slices: Annotated[int, typer.Option(help="token slices under TeraPipe, if above 1")] = 1,
    measure: Measure = False,
    tables: Tables = None,
    as_json: AsJson = False,
) -> None:
    """Say what each pipeline schedule would do to a plan's step, bubble and memory.

    Example: stratagem schedules pipeline.json examples.gpt2:build
    """
    check_outputs(tables, read=(plan, model))
    loaded, graph = Plan.load(plan), load_graph(model)
    graph = loaded.on(graph)
    costs = costs_for(graph, loaded.cluster, loaded.training, measure)
    table = verbs.compare_schedules(loaded, graph, costs, token_slices=slices)
    say = speaker(as_json)
    print_tables(say, table)
    if tables is not None:
        write_json(say, tables, table.to_dict())
    if as_json:
        print_json(table.to_dict())


def _print_diff(say: Console, difference: TimelineDiff) -> None:
    say.print(f"\n{difference.headline}", soft_wrap=True)
    print_tables(say, *difference.tables)
