"""The command line's verb on this machine.

stratagem doctor
"""

from __future__ import annotations

import typer

from stratagem.cli_options import ANSWER_IS_NO, AsJson, print_json, speaker
from stratagem.machine import State
from stratagem.machine import doctor as examine
from stratagem.tables import result_table


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can do, what is missing, and what mends it.

    Exit code 1 says that something is broken without which nothing can be trained here, or not
    on the GPUs that are here.

    Example: stratagem doctor --json
    """
    table = examine()
    say = speaker(as_json)
    say.print(result_table(table))
    say.print(table.note, soft_wrap=True)
    if as_json:
        print_json(table.to_dict())
    if State.BROKEN.value in table.column("state"):
        raise typer.Exit(ANSWER_IS_NO)
