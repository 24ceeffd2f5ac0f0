"""A process a model, so that one that ends badly is a line like any other.

Processes are forked from one that has the libraries already: importing them takes longer than
many a model does.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""What is said of one model."""

_FIELDS = ("captured", "searched", "executed_equal")
"""What is false until it is shown."""

_LIBRARIES = ("benchmarks.zoo.trial", "benchmarks.zoo.libraries")
"""What every model needs, imported once."""


def lines(models: Sequence[tuple[Path, str]], seconds: float, jobs: int) -> Iterator[Line]:
    """The lines of models, in their order.

    Args:
        models: files and the names of functions there.
        seconds: each may take.
        jobs: how many processes run at once.
    """
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda each: line_of(each[0], each[1], seconds), models)


def line_of(path: Path, name: str, seconds: float) -> Line:
    """The line of one model, tried in a process of its own."""
    begun = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_LIBRARIES))
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tried, args=(path, name, theirs))
    process.start()
    theirs.close()
    line: Line = {
        "model": f"{path.stem}.{name}",
        **dict.fromkeys(_FIELDS, False),
        **dict.fromkeys(("generic", "parameters", "flops_ratio")),
        **_last_shown(ours, begun + seconds),
    }
    late = time.perf_counter() >= begun + seconds
    if late:
        process.kill()
    process.join()
    if late:
        line["error"] = f"crash: not done after {seconds:g} s"
    elif process.exitcode:
        line["error"] = f"crash: the process ended with {process.exitcode}"
    line["seconds"] = round(time.perf_counter() - begun, 1)
    return line


def _last_shown(ours: Connection, deadline: float) -> Line:
    """What a process says until it ends or is late."""
    shown: Line = {}
    try:
        while ours.poll(max(0.0, deadline - time.perf_counter())):
            shown = ours.recv()
    except EOFError:
        pass
    return shown


def _tried(path: Path, name: str, theirs: Connection) -> None:
    from benchmarks.zoo.trial import tried

    sys.stdout = sys.stderr  # a model may print
    tried(path, name, theirs.send)
