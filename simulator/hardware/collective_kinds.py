"""What collectives are called, and what a kind showed on a link whose figures all kinds share."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Collective(enum.Enum):
    """A communication along one mesh axis."""

    __hash__ = object.__hash__  # Members are the same by identity; Enum hashes their names.

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    REDUCE = "reduce"
    SEND = "send"
    SLICE = "slice"


@dataclass(frozen=True)
class KindFigures:
    """Latency a message and bandwidth that one kind of collective showed, by its ring model.

    Backends do not carry all kinds out as rings do: gloo hands a broadcast on at twice the speed
    of a ring, and two passes of an all-reduce wake its threads once.

    Example:
        >>> KindFigures(Collective.REDUCE_SCATTER, 1200.0, 1.4).bandwidth_gb_s
        1.4

    Raises:
        ValueError: on a latency below 0, or a bandwidth that is not above 0.
    """

    kind: Collective
    latency_us: float
    bandwidth_gb_s: float

    def __post_init__(self) -> None:
        if not (self.latency_us >= 0 and self.bandwidth_gb_s > 0):
            raise ValueError(
                f"by_kind: {self.kind.value} has latency_us {self.latency_us} and bandwidth_gb_s "
                f"{self.bandwidth_gb_s}; give a latency of at least 0 and a bandwidth above 0"
            )
