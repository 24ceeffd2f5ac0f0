"""The result file of a run: losses, step times, the measured timeline, errors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.results.verdict import Verdict
from stratagem.simulator.base.files import read_text, reading, write_text
from stratagem.simulator.plan.provenance import Provenance
from stratagem.simulator.timeline.timeline import Timeline

REPORT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Report:
    """What a launched run wrote.

    Attributes:
        plan: its name.
        losses: of every step.
        step_times, wall_times: of every step in seconds, see `ExecutionResult`; files from before
            they were told have none of the latter.
        timeline: of the step with the median time, measured.
        verdict: whether a first step was that of one device, if it was checked.
        peak_bytes: per rank the most bytes that it held at once; empty unless asked for.
        no_graph: why steps were run one by one though a CUDA graph was asked for; empty otherwise.
        provenance: what ran it: backend, devices, precision and versions; None in files from
            before they said it.
    """

    plan: str
    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    timeline: Timeline
    verdict: Verdict | None = None
    peak_bytes: tuple[int, ...] = ()
    no_graph: str = ""
    provenance: Provenance | None = None
    wall_times: tuple[float, ...] = ()

    @property
    def step_time(self) -> float:
        """Median step time in seconds."""
        return sorted(self.step_times)[(len(self.step_times) - 1) // 2]

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        columns: dict[str, Any] = {
            "version": REPORT_VERSION,
            "plan": self.plan,
            "losses": self.losses,
            "step_times": self.step_times,
            "wall_times": self.wall_times,
            "timeline": self.timeline.to_dict(),
            "verdict": None if self.verdict is None else asdict(self.verdict),
            "peak_bytes": self.peak_bytes,
            "no_graph": self.no_graph,
            "provenance": None if self.provenance is None else asdict(self.provenance),
        }
        write_text(path, json.dumps(columns, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read the file.

        Raises:
            ValueError: names the file and what is wrong with it.
        """
        text = read_text(path, "result file")
        with reading(f"result file {path}"):
            columns = json.loads(text)
            if columns.pop("version") != REPORT_VERSION:
                raise ValueError(f"it is not of version {REPORT_VERSION}; run again")
            return cls(
                plan=columns["plan"],
                losses=tuple(columns["losses"]),
                step_times=tuple(columns["step_times"]),
                timeline=Timeline.from_dict(columns["timeline"]),
                verdict=Verdict(**columns["verdict"]) if columns.get("verdict") else None,
                peak_bytes=tuple(columns.get("peak_bytes", ())),
                no_graph=columns.get("no_graph", ""),
                provenance=msgspec.convert(columns.get("provenance"), Provenance | None),
                wall_times=tuple(columns.get("wall_times", ())),
            )


def report_of(plan: str, result: ExecutionResult, verdict: Verdict | None = None) -> Report:
    """The report of a result."""
    return Report(
        plan,
        result.losses,
        result.step_times,
        result.timeline,
        verdict,
        peak_bytes=result.peak_bytes,
        no_graph=result.no_graph,
        provenance=result.provenance,
        wall_times=result.wall_times,
    )
