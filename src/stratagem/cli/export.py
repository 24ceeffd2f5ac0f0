"""The command line's verb that says a plan in the words of another program.

stratagem export plan.json --model examples.small_gpt:build --to megatron --out megatron.args
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stratagem import exports
from stratagem.cli.shared.named_models import load_graph
from stratagem.cli.shared.options import AsJson, print_json, speaker
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.plan.plan import Plan


def export(
    plan: Annotated[Path, typer.Argument(help="plan file, from search")],
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="module:function returning (model, inputs), or a graph file"
        ),
    ],
    to: Annotated[str, typer.Option("--to", help=f"one of {', '.join(exports.FORMATS)}")],
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write")],
    as_json: AsJson = False,
) -> None:
    """Say a plan in the words of another program, and what that leaves out.

    Example: stratagem export plan.json -m examples.small_gpt:build --to megatron -o megatron.args
    """
    check_outputs(out, read=(plan, model))
    made = exports.export(Plan.load(plan), load_graph(model), to)
    made.save(out)
    console = speaker(as_json)
    console.print(made.summary, soft_wrap=True)
    for sentence in made.missing:
        console.print(f"• {sentence}", soft_wrap=True)
    console.print(f"Written to {out}", soft_wrap=True)
    if as_json:
        print_json({"to": to, "summary": made.summary, "missing": made.missing, "out": out})
