"""What goes wrong on the days of a long run, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stratagem.simulator.base.field_types import check_type
from stratagem.simulator.base.misspelt_names import unknown

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, kw_only=True)
class Hazards:
    """What interrupts a run or slows it down. Everything that is left out does not happen.

    Nodes fail, become slow, and data comes late independently of one another, after times that are
    exponentially distributed: what has run long is no more likely to fail.

    Example:
        >>> hazards = Hazards(node_mtbf_hours=6_000, restart_seconds=300)
        >>> round(hazards.mtbf(num_nodes=100) / 3600)
        60

    Attributes:
        node_mtbf_hours: mean hours between two failures of one node that end the job.
        restart_seconds: from a failure, once there are enough nodes, until the first step after
            it: finding out, placing ranks, loading the checkpoint.
        spare_nodes: nodes that take over at once; they are paid for.
        repair_hours: mean hours until a node that failed is a spare node again, exponentially
            distributed. 0: another one is there at once.
        node_slow_hours: mean hours between two times in which one node is slow.
        slow_minutes: mean length of such a time, exponentially distributed.
        slow_factor: by how much its steps then take longer. All wait for the slowest node.
        stalls_per_day: how often data comes late, or storage does not answer.
        stall_seconds: mean length of such a stall, exponentially distributed.
        step_variation: standard deviation of one step's time, as a share of its mean.

    Raises:
        ValueError: names what is not a number, negative or without effect.
    """

    node_mtbf_hours: float = math.inf
    restart_seconds: float = 0.0
    spare_nodes: int = 0
    repair_hours: float = 0.0
    node_slow_hours: float = math.inf
    slow_minutes: float = 0.0
    slow_factor: float = 1.0
    stalls_per_day: float = 0.0
    stall_seconds: float = 0.0
    step_variation: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            _check(field.name, value)
            kind = int if field.name == "spare_nodes" else float
            # What was given as 60 is kept as 60.0, so that a file of it is the same read again.
            object.__setattr__(self, field.name, kind(value))
        for idle, gone, cause in (
            ("restart_seconds", 0.0, "node_mtbf_hours"),
            ("repair_hours", 0.0, "node_mtbf_hours"),
            ("spare_nodes", 0, "repair_hours"),
            ("slow_minutes", 0.0, "node_slow_hours"),
            ("slow_factor", 1.0, "node_slow_hours"),
            ("stall_seconds", 0.0, "stalls_per_day"),
        ):
            given = getattr(self, idle)
            if given != gone and not _happens(cause, getattr(self, cause)):
                raise ValueError(
                    f"hazards: {idle} is {given}, which has no effect while {cause} is "
                    f"{getattr(self, cause)}; set {cause}, or leave {idle} out"
                )
        slow = self.slow_minutes > 0 and self.slow_factor > 1
        for cause, effect, happens in (
            ("node_slow_hours", "slow_minutes and slow_factor", slow),
            ("stalls_per_day", "stall_seconds", self.stall_seconds > 0),
        ):
            if _happens(cause, getattr(self, cause)) and not happens:
                raise ValueError(
                    f"hazards: {cause} has no effect while nothing says how bad that is; set "
                    f"{effect}, or leave {cause} out"
                )

    def mtbf(self, num_nodes: int) -> float:
        """Mean seconds between two failures of a job on so many nodes."""
        return self.node_mtbf_hours * HOUR / num_nodes

    @classmethod
    def published(cls, run: str, **others: float) -> Hazards:
        """How often jobs were interrupted on a cluster that somebody wrote about.

        Example:
            >>> hazards = Hazards.published("llama-3-405b", restart_seconds=600)
            >>> round(hazards.mtbf(num_nodes=2048) / 3600, 1)
            3.1

        Args:
            run: a name of `PUBLISHED`, whose comments name the sources.
            others: what they do not tell, such as how long a restart takes.
        """
        if run not in PUBLISHED:
            raise unknown("published run", run, PUBLISHED)
        return cls(node_mtbf_hours=PUBLISHED[run], **others)  # type: ignore[arg-type]


PUBLISHED = {
    # 419 unexpected interruptions in 54 days on 16,384 H100s, eight a node: Dubey et al., The
    # Llama 3 Herd of Models, 2024, section 3.3.4.
    "llama-3-405b": 54 * 24 * 2048 / 419,
    # One to two GPU failures a week on 48 nodes of eight A100s: Le Scao et al., BLOOM, 2022,
    # section 3.2.
    "bloom-176b": 7 * 24 * 48 / 1.5,
}
"""Hours between two failures of one node, by the run in which they were counted."""


def _check(name: str, value: float) -> None:
    check_type(value, float, name, "hazards")
    least = 1.0 if name == "slow_factor" else 0.0
    endless = name in ("node_mtbf_hours", "node_slow_hours")
    bounded = value >= least and (endless or math.isfinite(value))
    if not bounded or (endless and value == 0) or (name == "spare_nodes" and value != int(value)):
        kind = "a whole number, " if name == "spare_nodes" else ""
        bound = "above 0" if endless else f"{least:g} or more"
        raise ValueError(f"hazards: {name} is {value}; it is {kind}{bound}")


def _happens(cause: str, value: float) -> bool:
    if cause in ("node_mtbf_hours", "node_slow_hours"):
        return math.isfinite(value)
    return value > 0
