"""What collectives are called, and how unlike they are on a link whose figures all kinds share."""

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
class KindFactor:
    """How many times as long one kind of collective takes as the figures of a link say.

    Backends do not carry all kinds out as rings do: gloo lays the pieces of a reduce-scatter end
    to end for each member, and passes a broadcast on at twice the speed of a ring.

    Example:
        >>> KindFactor(Collective.REDUCE_SCATTER, 1.3).factor
        1.3

    Raises:
        ValueError: on a factor that is not above 0.
    """

    kind: Collective
    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(
                f"by_kind: the factor of {self.kind.value} is {self.factor}; it must be > 0"
            )
