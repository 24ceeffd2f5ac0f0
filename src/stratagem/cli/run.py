"""The command line's verb that trains.

stratagem run plan.json examples.small_gpt:build --steps 100 --out run.json
stratagem run plan.json examples.small_gpt:build --data mydata:loader --steps 10000 \\
    --rate cosine --rate-warmup 500 --checkpoint checkpoints --every 1000
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratagem.basics.progress import progress_bar
from stratagem.cli.shared.options import AsJson, among, print_json, speaker
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import PROCESS_BACKENDS

if TYPE_CHECKING:
    from rich.console import Console

    from stratagem.executor.results.execution_result import ExecutionResult


def run(
    plan: Annotated[Path, typer.Argument(help="plan file, from search")],
    model: Annotated[str, typer.Argument(help="module:function returning (model, inputs)")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="result file to write, for compare")
    ] = None,
    steps: Annotated[
        int, typer.Option(help="training steps, those before a checkpoint counted")
    ] = 10,
    warmup: Annotated[int, typer.Option(help="steps to run and undo first")] = 2,
    check: Annotated[
        bool,
        typer.Option("--check", help="compare a step with one device; exit code 1 if it differs"),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="module:function returning batches, the same on every rank"),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="safetensors, or a folder of them, with the model's parameters; ranks read their "
            "parts, and the function may return a model on torch's meta device"
        ),
    ] = None,
    rate: Annotated[
        str,
        typer.Option(help="learning rate: constant, linear, cosine, or module:function"),
    ] = "constant",
    rate_warmup: Annotated[int, typer.Option(help="steps in which the rate rises")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="folder for checkpoints")] = None,
    every: Annotated[
        int, typer.Option(help="steps between two checkpoints; 0: after the last step only")
    ] = 0,
    resume: Annotated[
        Path | None, typer.Option(help="checkpoint, or folder of them, to go on from")
    ] = None,
    keep: Annotated[int, typer.Option(help="checkpoints that stay, and the last finite one")] = 2,
    finite: Annotated[
        bool, typer.Option("--finite", help="fail at a loss that is not finite")
    ] = False,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="find the most bytes that each rank holds, in a step that is undone",
        ),
    ] = False,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph",
            help="run the steps but a few as one CUDA graph (nccl); those few are timed",
        ),
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            help="gloo (CPUs) or nccl (GPUs); left out, nccl where torch sees GPUs",
            autocompletion=among(PROCESS_BACKENDS),
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="seconds after which a run in which no rank goes on is stopped")
    ] = 20.0,
    patience: Annotated[
        float,
        typer.Option(help="times as long as expected an instruction may take, if longer"),
    ] = 10.0,
    preparing: Annotated[
        float, typer.Option(help="seconds for building the model, writing a checkpoint, …")
    ] = 600.0,
    outputs: Annotated[
        Path | None,
        typer.Option(help="file for what a forward pass gives back (safetensors)"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train by a plan on this machine, or run its forward pass, a process for every device.

    Example: stratagem run plan.json examples.small_gpt:build --check --out run.json
    """
    from stratagem.executor.running.launch import launch
    from stratagem.executor.running.run_request import RunRequest
    from stratagem.executor.watching.judges import Limits

    chosen = next((known for known in PROCESS_BACKENDS if known == backend), None)
    if backend is not None and chosen is None:
        raise unknown("backend", backend, PROCESS_BACKENDS)
    check_outputs(out, outputs, read=(plan, weights))
    request = RunRequest(
        plan=plan,
        model=model,
        steps=steps,
        warmup=warmup,
        check=check,
        weights=weights,
        data=data,
        rate=rate,
        rate_warmup=rate_warmup,
        checkpoint=checkpoint,
        every=every,
        resume=resume,
        keep=keep,
        finite=finite,
        memory=memory,
        cuda_graph=cuda_graph,
        backend=chosen,
        limits=Limits(stalled=timeout, patience=patience, preparing=preparing),
        outputs=outputs,
    )
    with progress_bar() as show:
        result = launch(request, timeout=None, show=show)
    _tell(result, plan, outputs, speaker(as_json))
    if out is not None:
        result.save(out)
        speaker(as_json).print(f"Written to {out}", soft_wrap=True)
    if as_json:
        print_json(_facts(result, out))
    if result.verdict is not None and not result.verdict.agrees:
        raise typer.Exit(1)


def _tell(result: ExecutionResult, plan: Path, outputs: Path | None, console: Console) -> None:
    """Print how the run went, and what the user should know of it."""
    from stratagem.executor.results.execution_result import not_graphed

    console.print(
        f"{result.num_steps} steps, {format_duration(result.step_time)} each (median); "
        f"{_loss_in_words(result)}{result.provenance}",
        soft_wrap=True,
    )
    elsewhere = result.provenance.elsewhere(Plan.load(plan)) if result.provenance else ""
    if elsewhere:
        console.print(elsewhere, style="yellow", soft_wrap=True)
    if result.peak_bytes:
        fullest = format_bytes(max(result.peak_bytes))
        console.print(f"{fullest} in the memory of the fullest device")
    if result.no_graph:
        console.print(not_graphed(result.no_graph), style="yellow")
    verdict = result.verdict
    if verdict is not None:
        console.print(f"a step {verdict.sentence()}", style="" if verdict.agrees else "bold red")
    if outputs is not None:
        console.print(f"What it gives back is in {outputs}", soft_wrap=True)


def _facts(result: ExecutionResult, out: Path | None) -> dict[str, object]:
    """What `--json` prints of a run; `out` is the file that holds all of it."""
    facts: dict[str, object] = {
        "step_time": result.step_time,
        "losses": result.losses,
        "provenance": result.provenance and asdict(result.provenance),
        "out": out,
    }
    if result.peak_bytes:
        facts["peak_bytes"] = result.peak_bytes
    verdict = result.verdict
    if verdict is not None:
        facts |= {
            "agrees": verdict.agrees,
            "verdict": verdict.sentence(),
            "worst": verdict.worst,
            "error": verdict.errors[verdict.worst],
            "allowed": verdict.allowed[verdict.worst],
            "max_error": verdict.max_error,
            "reference": verdict.reference,
        }
    return facts


def _loss_in_words(result: ExecutionResult) -> str:
    """How the loss went; nothing of a forward pass, which has none."""
    return f"loss {result.losses[0]:.4g} → {result.losses[-1]:.4g}; " if result.losses else ""
