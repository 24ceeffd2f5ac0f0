"""The command line: the library's verbs, results in files.

stratagem search examples.gpt2:build --cluster dgx-a100 --precision bfloat16 --out plan.json

Exit codes: 0, it was done; 1, it was done and the answer is no (no plan fits the memory, a machine
cannot train), or a mistake of this program, with its traceback; 2, the input or the machine does
not allow it, with the reason in a line on standard error; 130, it was interrupted.
"""

from __future__ import annotations

if __name__ == "__main__":
    from stratagem.basics.startup import prepare

    prepare()

import gc
import os
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from stratagem.basics.extras import install_hint
from stratagem.basics.source_places import LOGS_OF
from stratagem.basics.startup import INTERRUPTED, heed_interrupts
from stratagem.basics.version import __version__
from stratagem.cli.annotate import annotate
from stratagem.cli.cache import cache_app
from stratagem.cli.clusters import clusters
from stratagem.cli.doctor import doctor
from stratagem.cli.export import export
from stratagem.cli.forecast import forecast
from stratagem.cli.profile import profile
from stratagem.cli.run import run
from stratagem.cli.search import search
from stratagem.cli.shared.named_models import load_graph
from stratagem.cli.shared.options import WRONG_INPUT, AsJson, Model, print_json, speaker
from stratagem.cli.simulate import compare, diff, schedules, simulate
from stratagem.simulator.base.files import check_outputs
from stratagem.simulator.base.hostile_texts import printable

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
            hint = install_hint(error)
            Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False).print(
                f"error: {printable(_one_line(error))}{f' ({hint})' if hint else ''}"
            )
            raise typer.Exit(WRONG_INPUT) from error


def _one_line(error: BaseException) -> str:
    """An error as one line; of a failed rank's output only what it failed with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failures = [line for line in lines if _FAILURE.match(line)]
    if len(lines) > 1 and failures:
        logs = [f"; {line}" for line in lines[1:] if line.startswith(LOGS_OF)]
        lines = [lines[0], failures[-1] + "".join(logs)]
    return " ".join(lines) or type(error).__name__


_FAILURE = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="How should this PyTorch model be trained on that GPU cluster?",
    epilog="Exit codes: 0 done; 1 the answer is no, as when no plan fits; 2 wrong input; "
    "130 interrupted. Every verb takes --json.",
)


def main() -> None:
    """Run the command line; modules of the current folder are for models only (`make_model`)."""
    if os.getpid() == 1:  # As in a container: Linux gives the first process no default for these.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        heed_interrupts()
        app(prog_name="stratagem")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # Python would look through all of torch for garbage before it ends.


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


def capture(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="graph file to write")],
    as_json: AsJson = False,
) -> None:
    """Capture a model as an operator graph.

    Example: stratagem capture examples.gpt2:build --out graph.json
    """
    check_outputs(out)
    graph = load_graph(model)
    graph.save(out)
    speaker(as_json).print(
        f"{graph.name}: {len(graph.operators)} operators, {graph.num_parameters:,} parameters, "
        f"batch {graph.batch}; written to {out}",
        soft_wrap=True,
    )
    if as_json:
        facts = {"model": graph.name, "operators": len(graph.operators), "batch": graph.batch}
        size = {"parameters": graph.num_parameters, "fingerprint": graph.fingerprint}
        print_json({**facts, **size, "out": out})


VERBS = (
    capture,
    profile,
    search,
    annotate,
    simulate,
    run,
    compare,
    diff,
    schedules,
    forecast,
    export,
    clusters,
)
for verb in VERBS:
    app.command()(verb)
app.add_typer(cache_app, name="cache")
app.command()(doctor)


if __name__ == "__main__":
    main()
