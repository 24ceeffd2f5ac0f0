"""The command line's verb on this machine.

stratagem doctor
"""

from __future__ import annotations

import typer

from stratagem.cli.shared.options import ANSWER_IS_NO, AsJson, print_json, speaker
from stratagem.cli.shared.rich_tables import result_table
from stratagem.face.diagnosis import CheckState
from stratagem.face.diagnosis import doctor as examine


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
    if CheckState.BROKEN.value in table.column("state"):
        raise typer.Exit(ANSWER_IS_NO)
