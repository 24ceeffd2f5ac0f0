"""Which processes are ranks of a run, as the system shows it."""

from __future__ import annotations

import re
from pathlib import Path


def rank_of(pid: int) -> int | None:
    """The rank that a process is: where what it says goes, or what it was told when it began.

    Forked ranks show the environment of the process that they were forked from.
    """
    try:
        written = re.search(r"/(\d+)/stdout\.log$", str(Path(f"/proc/{pid}/fd/1").readlink()))
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    told = [each[5:] for each in settings if each.startswith(b"RANK=")]
    found = [written[1]] if written is not None else [each.decode() for each in told]
    return int(found[0]) if found else None
