"""What ``make demo`` runs: plan GPT-2 for 16 A100s, then plan, run and check a small GPT here."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from torch import Tensor, nn

import stratagem as sg
from examples import gpt2, small_gpt
from stratagem.cli.shared.rich_tables import comparison_table, strategy_table
from stratagem.executor import ExecutionResult
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.simulator.base.units import format_duration

OUT = Path("out")
STEPS, WARMUP = 20, 3

console = Console(highlight=False)


def main() -> None:
    """Both jobs, one after the other."""
    began = time.monotonic()
    OUT.mkdir(exist_ok=True)
    plan_gpt2()
    run_small_gpt()
    console.print(f"\nDone in {time.monotonic() - began:.0f} s. In [bold]{OUT}/[/]:")
    for path in sorted(OUT.iterdir()):
        console.print(f"  {path.name}")
    console.print(
        "Open a trace at https://ui.perfetto.dev to look at every task of a step.", style="dim"
    )


def plan_gpt2() -> None:
    """Find a plan for GPT-2 on two nodes of eight A100s: simulated, nothing is run."""
    console.rule("[bold]1. How should GPT-2 be trained on 2 nodes × 8 A100?", align="left")
    graph = sg.capture(*as_arguments(gpt2.build()), name="GPT-2 124M")
    cluster = sg.Cluster.preset("dgx-a100", num_nodes=2)
    report_capture(graph)
    say("Searching, with the device model of the A100 …")
    result = sg.search(graph, cluster, training=sg.Training("bfloat16", "adam"))
    report_search(result)
    result.plan.save(OUT / "gpt2-plan.json")
    sg.plots.timelines([result.simulation.timeline], OUT / "gpt2-predicted.png")
    sg.plots.trace(OUT / "gpt2-trace.json.gz", result.simulation.timeline)


def run_small_gpt() -> None:
    """Find a plan for a small GPT on two processes of this machine; run, check and compare it."""
    console.print()
    console.rule("[bold]2. And a small GPT on two processes of this machine?", align="left")
    graph = sg.capture(*as_arguments(small_gpt.build()), name="small GPT")
    report_capture(graph)
    say(
        "Measuring the link between two processes, and every operator that a plan may need, "
        "unless that was done before …"
    )
    cluster = sg.local_cluster(2)
    costs = sg.profile(graph, cluster)
    link = cluster.intra_node
    say(f"The link: {link.bandwidth_gb_s:.2f} GB/s, {link.latency_us:.0f} µs a message.")
    result = sg.search(graph, cluster, costs=costs)
    report_search(result)
    plan_file = OUT / "small-gpt-plan.json"
    result.plan.save(plan_file)

    say(f"Running the plan: {STEPS} steps, one process a device, with gloo …")
    request = RunRequest(
        plan=plan_file,
        model="examples.small_gpt:build",
        steps=STEPS,
        warmup=WARMUP,
        check=True,
        out=OUT / "small-gpt-run.json",
    )
    report = launch(request)
    report_check(report)
    comparison = sg.compare(result.simulation, report)
    console.print(Padding(comparison_table(comparison), (1, 2), expand=False))
    at_its_pace = f"; {comparison.pace_in_words}" if comparison.pace_in_words else ""
    say(
        f"Predicted {format_duration(result.simulation.step_time)}, measured "
        f"{format_duration(report.step_time)} a step (the median of {STEPS}): "
        f"{comparison.relative_error:+.0%}{at_its_pace}."
    )
    sg.plots.timelines([comparison.predicted], OUT / "small-gpt-predicted.png")
    comparison.save_plot(OUT / "small-gpt-predicted-over-measured.png")
    comparison.save_trace(OUT / "small-gpt-trace.json.gz")


def report_capture(graph: sg.OperatorGraph) -> None:
    """What was captured, in numbers."""
    say(
        f"Captured {graph.name}: {len(graph.operators)} operators, "
        f"{graph.num_parameters / 1e6:.1f} M parameters, a batch of {graph.batch} samples."
    )


def report_search(result: sg.SearchResult) -> None:
    """The plan beside the known strategies, and what it does."""
    plans = {"the plan found": result.simulation, **result.baselines}
    console.print(Padding(strategy_table(plans), (1, 2), expand=False))
    say(
        f"{result.evaluations:,} plans were simulated in {result.seconds:.0f} s. "
        "What the plan does:\n"
    )
    say(sg.describe(result.simulation, result.graph))
    if result.order:
        say(f"{result.order}.")
    console.print()


def report_check(result: ExecutionResult) -> None:
    """Whether loss and gradients are those of one process of plain torch."""
    verdict = result.verdict
    assert verdict is not None
    say(f"Checked: a step {verdict.sentence()}.")
    if not verdict.agrees:
        raise SystemExit("error: the plan trains another model")
    first, last = result.losses[0], result.losses[-1]
    say(f"Over {STEPS} steps the loss falls from {first:.3f} to {last:.3f}.")


def say(text: str) -> None:
    """Print text, a little indented."""
    console.print(Padding(text, (0, 2), expand=False))


def as_arguments(
    built: tuple[nn.Module, dict[str, Tensor]],
) -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """(model, inputs) as `capture` takes them: the inputs are keyword arguments."""
    model, inputs = built
    return model, (), inputs


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
