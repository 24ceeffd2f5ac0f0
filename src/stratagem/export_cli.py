"""The command line's verb that says a plan in the words of another program.

stratagem export plan.json --model examples.small_gpt:build --to megatron --out megatron.args
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stratagem import exports
from stratagem.model_spec import load_graph
from stratagem.simulator.plan import Plan

console = Console(highlight=False)


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
) -> None:
    """Say a plan in the words of another program, and what that leaves out."""
    made = exports.export(Plan.load(plan), load_graph(model), to)
    made.save(out)
    console.print(made.summary, soft_wrap=True)
    for sentence in made.missing:
        console.print(f"• {sentence}", soft_wrap=True, markup=False)
    console.print(f"Written to {out}")
