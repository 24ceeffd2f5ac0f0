"""What a measured time belongs to: an operator, a pass, and where it ran."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from stratagem.simulator.costs import Direction
from stratagem.simulator.graph import Operator


@dataclass(frozen=True)
class Environment:
    """Where a time was taken: another value of any field may mean another time.

    `threads` counts the threads of one kernel, `load` the other processes that ran the same
    operator meanwhile.
    """

    device: str
    torch: str
    threads: int = 1
    load: int = 0


@dataclass(frozen=True)
class Measurement:
    """Median seconds of `repeats` runs, and their relative spread (one standard deviation).

    Where the device could not run it, `error` says why, and the rest is zero.
    """

    median_s: float
    spread: float
    repeats: int
    error: str = ""


@dataclass(frozen=True, eq=False)
class TimingKey:
    """What was timed, and where; `operator` is local (see `simulator.costs.local_operator`)."""

    environment: Environment
    operator: Operator
    precision: str
    direction: Direction

    @cached_property
    def digest(self) -> str:
        """Equal for keys whose measured times may stand for each other, in every process."""
        where = (self.environment, self.precision, self.direction.value)
        return _sha256((where, operator_digest(self.operator)))


@dataclass(frozen=True, eq=False)
class TimingEntry:
    """A measurement in the cache; `timestamp` is in seconds since 1970."""

    key: TimingKey
    measurement: Measurement
    timestamp: float


def operator_digest(operator: Operator) -> str:
    """SHA-256 of an operator's signature, the same before and after a round trip through JSON.

    Names are left out, and so are the reasons why dims must be whole: they change no kernel.
    """
    return _sha256(
        (
            operator.kind,
            [replace(dim, whole="") for dim in operator.dims],
            [(read.layout, read.order, read.select) for read in operator.inputs],
            [weight.layout for weight in operator.weights],
            operator.outputs,
            operator.attributes,
        )
    )


def describe(operator: Operator) -> str:
    """An operator's kind and sizes, for a person: ``linear: batch 8, in 512, out 2048``."""
    return f"{operator.kind}: " + ", ".join(f"{dim.name} {dim.size}" for dim in operator.dims)


def _sha256(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()
