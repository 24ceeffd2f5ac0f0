"""Profiling that times each operator twice, beside no other load, for what is made of the times.

How times become sure, and what others do meanwhile, is a matter of `tests/profiler`. The command
line, the notebooks and the pages profile hundreds of operators, and show what follows. Collectives
between the processes of this machine they time once for all of them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratagem.calibration import measured_links
from stratagem.calibration.executor_measurements import measure_collectives
from stratagem.profiler.machine.background_load import BackgroundLoad
from stratagem.profiler.timing import session
from stratagem.profiler.timing.collective_timing import CollectiveTiming
from stratagem.profiler.timing.kept_collectives import LinkCases
from stratagem.profiler.timing.operator_timing import Effort, time_operator
from stratagem.simulator.base.files import decode, encode, read_text, write_text

FOLDER = "STRATAGEM_TEST_FOLDER"
"""The variable that names a folder of this run of all tests, see `conftest`."""

BRIEF = Effort(seconds=0.0, min_repeats=2, evict_bytes=2**16)
"""As often as a spread needs, whatever effort was asked for."""

STARTUP = f"""
import sys

sys.path.append({str(Path(__file__).parents[2])!r})
from tests.support.brief_timing import begin

begin()
"""
"""What another process runs first."""

_WHOLE = (time_operator, BackgroundLoad, measure_collectives)


def _briefly(*given: Any, effort: Effort, **named: Any) -> Any:
    return _WHOLE[0](*given, effort=BRIEF, **named)


def _no_load(num_processes: int, *, threads: int) -> BackgroundLoad:
    return BackgroundLoad(0, threads=threads)


def collectives_timed_once(
    num_processes: int,
    *,
    backend: Any = "gloo",
    timeout: float = 300.0,
    repeats: int = 3,
    few: bool = False,
) -> list[CollectiveTiming]:
    """What `measure_collectives` finds, which takes the processes of all tests one measurement."""
    kept = Path(os.environ[FOLDER]) / f"{backend}-{num_processes}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            found = _WHOLE[2](num_processes, backend=backend, timeout=timeout, repeats=repeats)
            write_text(kept, encode(found))
    timed = decode(read_text(kept, "collectives"), list[CollectiveTiming], "collectives")
    return few_of(timed, backend) if few else timed


def few_of(timed: list[CollectiveTiming], backend: Any) -> list[CollectiveTiming]:
    """What `measure_collectives` finds of a `few`, of all."""
    cases = LinkCases.of_few(max(each.size for each in timed), backend).cases
    return [each for each in timed if (each.kind, each.nbytes, each.size) in cases]


def begin() -> None:
    """From now on in this process; `time_operator` itself is left as it is."""
    _set(_briefly, _no_load, collectives_timed_once)


@contextmanager
def timed_briefly() -> Iterator[None]:
    """For some time in this process."""
    begin()
    try:
        yield
    finally:
        _set(*_WHOLE)


def _set(timed: Any, load: Any, measured: Any) -> None:
    vars(session).update(time_operator=timed, BackgroundLoad=load)
    vars(measured_links).update(measure_collectives=measured)
