"""Running something in a process that knows nothing of this one but what it is sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

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
