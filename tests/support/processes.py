"""Which processes are ranks of a run, and processes that know nothing of this one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle


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


PROGRAM = """
import sys, cloudpickle
function, arguments = cloudpickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(cloudpickle.dumps(function(*arguments)))
"""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives there; it and its arguments go by value."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=cloudpickle.dumps((function, arguments)),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return cloudpickle.loads(done.stdout)
