"""The command line: the library's verbs, results in files.

stratagem search examples.gpt2:build --cluster dgx-a100 --precision bfloat16 --out plan.json
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from stratagem import __version__, face
from stratagem.cache_cli import cache_app
from stratagem.export_cli import export
from stratagem.model_spec import load_cluster, load_graph
from stratagem.profile_cli import profile
from stratagem.run_cli import run
from stratagem.search.constraints import Constraints
from stratagem.search.result import Budget
from stratagem.search.space import Options
from stratagem.simulator.cluster import Cluster, preset_names
from stratagem.simulator.describe import describe
from stratagem.simulator.files import write_text
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.graph_io import graph_to_json
from stratagem.simulator.memory_plot import plot_memory
from stratagem.simulator.plan import Plan
from stratagem.simulator.plot import plot_timelines
from stratagem.simulator.segments import RECOMPUTE_POLICIES
from stratagem.simulator.simulation import Simulation
from stratagem.simulator.step_path import StepPath
from stratagem.simulator.table import Table
from stratagem.simulator.timeline_diff import TimelineDiff, diff_timelines
from stratagem.simulator.timeline_tables import collective_table, operator_table
from stratagem.simulator.trace import write_trace
from stratagem.simulator.training import Training
from stratagem.tables import comparison_table, result_table, simple_table, strategy_table

if TYPE_CHECKING:
    from stratagem.simulator.costs import CostModel

USER_ERRORS = (ValueError, OSError, RuntimeError, ImportError)
"""What is wrong with the input or the machine; anything else is a mistake of this program."""


class Commands(TyperGroup):
    """Commands whose expected errors end in one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except USER_ERRORS as error:
            if type(error).__module__.startswith(("click", "typer")):
                raise
            Console(stderr=True, soft_wrap=True, highlight=False).print(
                f"error: {_one_line(error)}", markup=False
            )
            raise typer.Exit(2) from error


def _one_line(error: BaseException) -> str:
    """An error as one line; of a failed rank's output only what it failed with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failures = [line for line in lines if _FAILURE.match(line)]
    if len(lines) > 1 and failures:
        lines = [lines[0], failures[-1]]
    return " ".join(lines) or type(error).__name__


_FAILURE = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="How should this PyTorch model be trained on that GPU cluster?",
)
app.add_typer(cache_app, name="cache")
app.command()(profile)
app.command()(run)
app.command()(export)
console = Console(highlight=False)

Model = Annotated[
    str, typer.Argument(help="module:function returning (model, inputs), or a graph file")
]
PlanFile = Annotated[Path, typer.Argument(help="plan file, from search")]
ClusterName = Annotated[
    str, typer.Option("--cluster", "-c", help="preset (see clusters) or cluster file")
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="number of nodes")]
Devices = Annotated[int | None, typer.Option("--devices", help="devices per node")]
Precision = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
Optimizer = Annotated[str, typer.Option(help="adam or sgd")]
Measure = Annotated[
    bool, typer.Option("--measure", help="time operators on this machine, not the device model")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="picture of the timeline to write")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Perfetto trace to write (.json.gz)")]
Tables = Annotated[Path | None, typer.Option("--tables", help="JSON file of the tables to write")]

MAX_ROWS = 20
"""Rows of a table that are printed; its title counts the others, and --tables writes them."""


def main() -> None:
    """Run the command line."""
    sys.path.insert(0, os.getcwd())
    app(prog_name="stratagem")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def capture(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="graph file to write")],
) -> None:
    """Capture a model as an operator graph."""
    graph = load_graph(model)
    write_text(out, graph_to_json(graph))
    console.print(
        f"{graph.name}: {len(graph.operators)} operators, {graph.num_parameters:,} parameters, "
        f"batch {graph.batch}; written to {out}"
    )


@app.command()
def search(
    model: Model,
    cluster: ClusterName,
    out: Annotated[Path, typer.Option("--out", "-o", help="plan file to write")],
    nodes: Nodes = None,
    devices: Devices = None,
    precision: Precision = "float32",
    optimizer: Optimizer = "adam",
    schedule: Annotated[
        str, typer.Option(help="of pipelines: 1f1b, gpipe, interleaved or zb-h1")
    ] = "1f1b",
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="policies to try until a plan fits: none, selective, full; repeatable"),
    ] = None,
    chunks: Annotated[
        list[int] | None,
        typer.Option(help="pieces that a product may run in beside its collectives; repeatable"),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="let elementwise work run inside collectives")
    ] = False,
    bucket_mib: Annotated[
        float, typer.Option(help="reduce gradients in buckets of at least so many MiB")
    ] = 0.0,
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
        float, typer.Option(help="share of each device's memory that must stay free")
    ] = 0.0,
    compare_with: Annotated[
        list[str] | None,
        typer.Option("--baseline", help="method to compare with, as Alpa or FlexFlow; repeatable"),
    ] = None,
    rewrite: Annotated[
        int, typer.Option(help="search so many rewritten graphs too, that compute the same")
    ] = 0,
    start: Annotated[
        Path | None, typer.Option(help="plan file to go on from, perhaps edited")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="file that keeps finished parts, to go on from")
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="list every skeleton and what became of it")
    ] = False,
    evaluations: Annotated[int, typer.Option(help="plans to evaluate")] = Budget.evaluations,
    seconds: Annotated[float | None, typer.Option(help="stop after so long")] = None,
    seed: Annotated[int, typer.Option(help="of every random number")] = 0,
    measure: Measure = False,
    plot: Plot = None,
    trace: Trace = None,
) -> None:
    """Find a plan for a model on a cluster."""
    training = Training(precision, optimizer)
    budget = Budget(evaluations, seconds)
    graph, place = load_graph(model), load_cluster(cluster, nodes, devices)
    result = face.search(
        graph,
        place,
        costs=_costs(graph, place, training, measure),
        training=training,
        budget=budget,
        seed=seed,
        schedule=schedule,
        options=Options(
            recompute=tuple(recompute or RECOMPUTE_POLICIES),
            chunks=tuple(sorted({1, *(chunks or ())})),
            fuse=fuse,
            bucket_bytes=round(bucket_mib * 2**20),
        ),
        constraints=Constraints(
            max_tensor=tensor,
            pipeline=pipeline,
            zero_stages=tuple(zero) if zero else None,
            microbatches=tuple(microbatches) if microbatches else None,
            forbid=_dims_on_axes("--forbid", forbid),
            require=_dims_on_axes("--require", require),
            headroom=headroom,
        ),
        baselines=compare_with,
        start=Plan.load(start) if start is not None else None,
        checkpoint=checkpoint,
        num_rewritten=rewrite,
    )
    result.plan.save(out)
    console.print(strategy_table({"the plan found": result.simulation, **result.baselines}))
    console.print(
        f"{result.evaluations:,} plans evaluated in {result.seconds:.1f} s; "
        f"{result.stop_reason.value}.\nCertificate: {result.certificate}.\n"
    )
    if space:
        console.print(result_table(result.space_table))
        for reason, count in result.notes.items():
            console.print(f"{reason}: {count}")
    _report(result.simulation, graph, plot, trace)
    console.print(f"\nWritten to {out}")


def _dims_on_axes(option: str, given: list[str] | None) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for text in given or ():
        dim, equals, axis = text.partition("=")
        if not (dim and equals and axis):
            raise ValueError(f"{option} {text!r}: write DIM=AXIS, such as vocab=node")
        pairs.append((dim, axis))
    return tuple(pairs)


@app.command()
def simulate(
    plan: PlanFile,
    model: Model,
    measure: Measure = False,
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
) -> None:
    """Predict a plan's step time and memory."""
    loaded, graph = Plan.load(plan), load_graph(model)
    simulation = _simulated(loaded, graph, measure)
    path = simulation.critical_path if critical_path else None
    _report(simulation, graph, plot, trace, path)
    if operators:
        _print_tables(operator_table(simulation.timeline, by_layer=False))
    if collectives:
        sizes = simulation.communication_bytes
        moved = collective_table(simulation.timeline, sizes, by_layer=False)
        _print_tables(simulation.groups, moved)
    if path is not None:
        _print_tables(path.by_work, path.by_group, path.by_operator)
    if memory is not None:
        ranks = range(len(simulation.memory))
        plot_memory([simulation.memory_timeline(rank) for rank in ranks], memory)
        _print_tables(max(simulation.memory, key=lambda rank: rank.peak).table)
        _say_written(memory, None)
    if tables is not None:
        parts = ("groups", "operators", "collectives", "critical_path")
        _write_json(tables, {part: getattr(simulation, part).to_dict() for part in parts})


@app.command()
def compare(
    plan: PlanFile,
    model: Model,
    result: Annotated[Path, typer.Argument(help="result file, from run")],
    measure: Measure = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="where the measured step takes longer")
    ] = False,
    plot: Plot = None,
    trace: Trace = None,
    tables: Tables = None,
) -> None:
    """Lay a plan's predicted step beside a measured one."""
    from stratagem.comparison import compare as lay_beside
    from stratagem.executor.report import Report

    loaded, report, graph = Plan.load(plan), Report.load(result), load_graph(model)
    comparison = lay_beside(_simulated(loaded, graph, measure), report, plot)
    if trace is not None:
        comparison.save_trace(trace)
    console.print(comparison_table(comparison))
    _say_written(plot, trace)
    if diff:
        _print_diff(comparison.diff)
    if tables is not None:
        _write_json(tables, comparison.diff.to_dict())


@app.command()
def diff(
    plan: PlanFile,
    other: Annotated[Path, typer.Argument(help="plan file to compare it with")],
    model: Model,
    measure: Measure = False,
    plot: Plot = None,
    trace: Trace = None,
    tables: Tables = None,
) -> None:
    """Say where the predicted steps of two plans differ."""
    plans, graph = [Plan.load(plan), Plan.load(other)], load_graph(model)
    timelines = [
        replace(_simulated(loaded, graph, measure).timeline, label=path.stem)
        for loaded, path in zip(plans, (plan, other), strict=True)
    ]
    difference = diff_timelines(*timelines)
    if plot is not None:
        plot_timelines(timelines, plot)
    if trace is not None:
        write_trace(trace, *timelines)
    _print_diff(difference)
    _say_written(plot, trace)
    if tables is not None:
        _write_json(tables, difference.to_dict())


@app.command()
def schedules(
    plan: PlanFile,
    model: Model,
    slices: Annotated[int, typer.Option(help="token slices under TeraPipe, if above 1")] = 1,
    measure: Measure = False,
    tables: Tables = None,
) -> None:
    """Say what each pipeline schedule would do to a plan's step, bubble and memory."""
    loaded, graph = Plan.load(plan), load_graph(model)
    graph = loaded.rewrite(graph).graph
    loaded.check(graph)
    costs = _costs(graph, loaded.cluster, loaded.training, measure)
    table = face.compare_schedules(loaded, graph, costs, token_slices=slices)
    _print_tables(table)
    if tables is not None:
        _write_json(tables, table.to_dict())


@app.command()
def clusters() -> None:
    """List the bundled clusters."""
    rows = []
    for name in preset_names():
        cluster = Cluster.preset(name)
        kinds = ", ".join(sorted(set(cluster.node_devices)))
        links = [
            f"{link.bandwidth_gb_s:g} GB/s, {link.latency_us:g} µs"
            for link in (cluster.intra_node, cluster.inter_node)
        ]
        size = f"{cluster.num_nodes} × {cluster.devices_per_node}"
        memory = f"{cluster.device_type(0).memory_gib:g} GiB"
        rows.append([name, size, kinds, memory, *links])
    headings = ("preset", "nodes × devices", "device", "memory", "in a node", "between nodes")
    console.print(simple_table(headings, rows))


def _costs(
    graph: OperatorGraph, cluster: Cluster, training: Training, measure: bool
) -> CostModel | None:
    return face.profile(graph, cluster, training=training) if measure else None


def _simulated(plan: Plan, graph: OperatorGraph, measure: bool) -> Simulation:
    graph = plan.rewrite(graph).graph
    plan.check(graph)
    costs = _costs(graph, plan.cluster, plan.training, measure)
    return face.simulate(plan, graph, costs)


def _print_diff(difference: TimelineDiff) -> None:
    console.print(f"\n{difference.headline}", soft_wrap=True)
    _print_tables(*difference.tables)


def _print_tables(*tables: Table) -> None:
    for table in tables:
        console.print()
        console.print(result_table(table, most=MAX_ROWS))
        if table.note:
            console.print(table.note, soft_wrap=True)


def _write_json(path: Path, columns: dict[str, Any]) -> None:
    write_text(path, json.dumps(columns, ensure_ascii=False, indent=1) + "\n")
    _say_written(path)


def _report(
    simulation: Simulation,
    graph: OperatorGraph,
    plot: Path | None,
    trace: Path | None,
    critical_path: StepPath | None = None,
) -> None:
    console.print(describe(simulation, graph), soft_wrap=True)
    if plot is not None:
        plot_timelines([simulation.timeline], plot, critical_path=critical_path)
    if trace is not None:
        write_trace(trace, simulation.timeline)
    _say_written(plot, trace)


def _say_written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            console.print(f"Written to {path}")


if __name__ == "__main__":
    main()
