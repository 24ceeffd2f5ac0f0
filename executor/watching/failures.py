"""What a run that failed has left: which rank failed first and why, and the logs of all."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from stratagem.basics.source_places import LOGS_OF, place_in
from stratagem.executor.watching.rank_starter import ENDED
from stratagem.executor.watching.watch import RankError

TAIL_LINES = 20
"""Lines of the failing rank that an error shows."""

STARTER_LOG = "starter.log"
"""The file, among the logs, of what the rank starter says."""

KEPT_LOGS = 10
"""Failed runs whose logs are kept."""


@dataclass(frozen=True)
class Ended:
    """A rank that ended and failed: its exit code, or the negative number of a signal."""

    rank: int
    code: int


def failure_of(logs: Path, code: int) -> str:
    """What the rank that failed first said last; else what any rank said, or what started them.

    A rank that only stopped because of another one counts where no other has told anything.
    """
    failed: list[tuple[bool, float, Path, str, str]] = []
    for path in logs.rglob("error.json"):
        try:
            message = json.loads(path.read_text())["message"]
            text = str(message["message"])
            follows = text.startswith(RankError.__name__)
            when = float(message["extraInfo"]["timestamp"])
            trace = str(message["extraInfo"].get("py_callstack", ""))
            failed.append((follows, when, path.parent, text, trace))
        except (ValueError, KeyError, TypeError):
            continue
    if failed:
        follows, _, folder, text, trace = min(failed)
        if follows:
            return text.partition(": ")[2]
        # A rank that is asked to stop while it is ending has said nothing to its log.
        lines = _tail(folder / "stderr.log") or trace.splitlines()[-TAIL_LINES:]
        source = place_in(trace)
        was_at = f"rank {folder.name} was at "
        place = [line for line in trace.splitlines() if line.startswith(was_at)]
        ended = f"rank {folder.name} ended with {text}{f' ({source})' if source else ''}"
        first = "; ".join([ended, *place[-1:]])
        return "\n".join([first, *lines])
    written = [path for path in sorted(logs.rglob("stderr.log")) if path.stat().st_size]
    if written:
        return "\n".join([f"rank {written[0].parent.name} wrote", *_tail(written[0])])
    said = _tail(logs / STARTER_LOG)
    return "\n".join(
        [_first_lost(logs, code), *(["the rank starter wrote", *said] if said else [])]
    )


def _first_lost(logs: Path, code: int) -> str:
    """Which rank ended first, without having said anything, or how the starter of all did."""
    ended = first_ended(logs)
    if ended is None:
        return f"no rank said anything, and the rank starter ended with exit code {code}"
    return f"rank {ended.rank} ended with exit code {ended.code} before it joined the run"


def first_ended(logs: Path) -> Ended | None:
    """The rank that failed first, as the rank starter saw it; None where none has."""
    try:
        found = json.loads((logs / ENDED).read_text("utf-8"))
        return Ended(int(found["rank"]), int(found["code"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tail(path: Path) -> list[str]:
    """The last lines of a file, without the names of ranks before them."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines[-TAIL_LINES:]]


def keep_logs(logs: Path) -> str:
    """Move the logs of a failed run to where they stay, and say where that is.

    Only the last few are kept. Nothing is lost where they cannot be: that too is said.
    """
    folder = platformdirs.user_log_path("stratagem") / "failed"
    kept = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{logs.parent.name}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copytree(logs, kept)
        kept.chmod(0o700)
    except (OSError, shutil.Error) as error:
        return f"{LOGS_OF}the ranks could not be kept in {folder}: {error}"
    for old in sorted(folder.iterdir())[:-KEPT_LOGS]:
        with suppress(OSError):
            shutil.rmtree(old)
    return f"{LOGS_OF}all ranks: {kept}"
