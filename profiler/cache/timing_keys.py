"""What a measured time belongs to: an operator and a pass, or a collective, and where it ran."""

from __future__ import annotations

import enum
import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from stratagem.profiler.cache.canonical_operators import canonical_operator
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.kernel_times.training import OPTIMIZER_STATES, Training
from stratagem.simulator.operators.operator import Dim, DimKind, Operator
from stratagem.simulator.plan.provenance import Environment

IN_A_NODE = "intra-node"
BETWEEN_NODES = "inter-node"


LEARNED = "a run of a plan"
"""The origin of what was learned from a step that the executor measured."""


class Trust(enum.IntEnum):
    """Who measured a time, the least trusted first.

    The profiler times an operator alone, with cold caches and nothing recorded meanwhile; a run
    shows it amid others; what another program printed was measured in some other way.
    """

    IMPORTED = 0
    LEARNED = 1
    OWN = 2


def trust_of(origin: str) -> Trust:
    """How far a time of this origin is trusted.

    Example:
        >>> trust_of("").name, trust_of("nccl-tests").name
        ('OWN', 'IMPORTED')
    """
    if not origin:
        return Trust.OWN
    return Trust.LEARNED if origin == LEARNED else Trust.IMPORTED


@dataclass(frozen=True)
class Measurement:
    """Median seconds of `repeats` runs, and their relative spread (one standard deviation).

    Where the device could not run it, `error` says why, and the rest is zero. `origin` is empty
    for what the profiler measured, `LEARNED` for what a run of a plan showed, else the name of the
    program whose output was imported. A spread of zero says nothing where there was one repeat, or
    the origin gives a mean only.

    Raises:
        ValueError: on a time that is no positive number of seconds, though nothing failed.
    """

    median_s: float
    spread: float
    repeats: int
    error: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        if self.error:
            return
        if not (0.0 < self.median_s < math.inf and 0.0 <= self.spread < math.inf):
            raise ValueError(
                f"median_s is {self.median_s!r} and spread {self.spread!r}; a time is above 0 s, "
                "its spread at least 0, both finite; measure again, or say in error what failed"
            )
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; a measured time has at least 1")

    @property
    def trust(self) -> Trust:
        """Who measured it."""
        return trust_of(self.origin)


@dataclass(frozen=True, eq=False)
class TimingKey:
    """What was timed, and where; `operator` is local (see `local_operator`)."""

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


@dataclass(frozen=True)
class CollectiveKey:
    """One collective over a group of ranks, and where.

    Example:
        >>> here = Environment("cpu", "2.11")
        >>> key = CollectiveKey(here, Collective.ALL_REDUCE, 2**20, 2, "gloo")
        >>> key.link, len(key.digest)
        ('intra-node', 64)

    Attributes:
        environment: device and versions of every rank.
        kind: any but a slice, which sends nothing.
        nbytes: the larger of what a member holds before and after, as in `collective_time`.
        size: number of ranks in the group.
        backend: what carries it out: ``gloo`` or ``nccl``.
        link: class of the slowest link that the group crosses: the `name` of a `Link`, or
            ``intra-node`` and ``inter-node`` where no name is known.
        num_nodes: over how many nodes the ranks are spread, equally many on each.

    Raises:
        ValueError: on fewer than two ranks, fewer bytes than 1, or ranks that cannot be spread
            equally over the nodes.
    """

    environment: Environment
    kind: Collective
    nbytes: int
    size: int
    backend: str
    link: str = IN_A_NODE
    num_nodes: int = 1

    def __post_init__(self) -> None:
        where = f"collective {self.kind.value} of {self.nbytes} bytes over {self.size} ranks"
        if self.kind is Collective.SLICE or self.size < 2 or self.nbytes < 1:
            raise ValueError(
                f"{where} sends nothing; give at least 1 byte, 2 ranks and another kind than slice"
            )
        if self.num_nodes < 1 or self.size % self.num_nodes:
            raise ValueError(
                f"{where} on {self.num_nodes} nodes: its ranks must be spread equally over the "
                "nodes; give a number of nodes that divides them"
            )

    @cached_property
    def digest(self) -> str:
        """Equal for equal keys, in every process."""
        what = (self.kind.value, self.nbytes, self.size, self.backend, self.link, self.num_nodes)
        return _sha256((self.environment, what))


@dataclass(frozen=True, eq=False)
class CollectiveEntry:
    """A measured collective in the cache; `timestamp` is in seconds since 1970."""

    key: CollectiveKey
    measurement: Measurement
    timestamp: float


CacheEntry = TimingEntry | CollectiveEntry
"""What the cache holds."""


def passes_of(operator: Operator) -> tuple[Direction, ...]:
    """The passes that an operator has: none goes back where no output has a gradient."""
    goes_back = any(output.differentiable for output in operator.outputs)
    return tuple(Direction) if goes_back else (Direction.FORWARD,)


def operator_digest(operator: Operator) -> str:
    """SHA-256 of what decides an operator's time, the same before and after a trip through JSON.

    Two operators have the same digest when their kernels get tensors of equal shapes and strides:
    names and kinds of samples do not count, see `canonical_operator`.
    """
    return _sha256(canonical_operator(operator))


def describe(operator: Operator) -> str:
    """An operator's kind and sizes, for a person: ``linear: batch 8, in 512, out 2048``."""
    return f"{operator.kind}: " + ", ".join(f"{dim.name} {dim.size}" for dim in operator.dims)


def _sha256(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


DISPATCH_KIND = "dispatch"


def dispatch_key(environment: Environment, direction: Direction) -> TimingKey:
    """Where the cache keeps it, as the time of an operator of its own kind."""
    operator = Operator("dispatch", DISPATCH_KIND, (), (), (), ())
    return TimingKey(environment, operator, "float32", direction)


LAUNCH_KIND = "launch"


class Launched(enum.Enum):
    """How passes are launched: by the executor in a step, or alone, as the profiler times them."""

    BY_EXECUTOR = "by the executor"
    ALONE = "alone"


def launch_key(key: TimingKey) -> TimingKey:
    """Where the cache keeps what a pass takes the host of a GPU, given where that pass is kept."""
    named: dict[str, object] = {"operator": operator_digest(key.operator)}
    operator = Operator("launch", LAUNCH_KIND, (), (), (), (), named)
    return TimingKey(key.environment, operator, key.precision, key.direction)


def launched_key(environment: Environment, how: Launched) -> TimingKey:
    """Where the cache keeps what launching all passes of a step takes a host, in one way."""
    operator = Operator("launch", LAUNCH_KIND, (), (), (), (), {"step": how.value})
    return TimingKey(environment, operator, "float32", Direction.FORWARD)


PACE_KIND = "pace"


class PaceOf(enum.Enum):
    """Whose pace: that to which the times of an environment were brought, or the cores' own."""

    TIMES = "times"
    CORES = "cores"


def pace_key(environment: Environment, whose: PaceOf) -> TimingKey:
    """Where the cache keeps what the reference kernel takes, see `hardware.core_pace`."""
    operator = Operator("pace", PACE_KIND, (), (), (), (), {"of": whose.value})
    return TimingKey(environment, operator, "float32", Direction.FORWARD)


LATER_KIND = "sum needed later"


def later_key(key: CollectiveKey) -> TimingKey:
    """Where the cache keeps what a sum that is needed later adds to the computing beside it."""
    operator = Operator("later", LATER_KIND, (), (), (), (), {"collective": key.digest})
    return TimingKey(key.environment, operator, "float32", Direction.FORWARD)


MEETING_KIND = "meeting"


def meeting_key(environment: Environment, size: int, backend: str) -> TimingKey:
    """Where the cache keeps what the last of `size` ranks takes for one second of their mean."""
    named: dict[str, object] = {"size": size, "backend": backend}
    operator = Operator("meeting", MEETING_KIND, (), (), (), (), named)
    return TimingKey(environment, operator, "float32", Direction.FORWARD)


AROUND_OPERATORS = (DISPATCH_KIND, LAUNCH_KIND, PACE_KIND, LATER_KIND, MEETING_KIND)
"""Kinds of what is no operator of a model, and no update, but is kept as the time of one."""


UPDATE_KIND = "update"


def update_key(num_parameters: int, training: Training, environment: Environment) -> TimingKey:
    """Where the cache keeps the time of an update, as that of an operator of its own kind."""
    dims = (Dim("parameter", num_parameters, DimKind.PARAMETER),)
    kind: dict[str, object] = {"optimizer": training.optimizer}
    if training.states != OPTIMIZER_STATES[training.optimizer]:
        kind["states"] = list(training.states)
    operator = Operator("update", UPDATE_KIND, dims, (), (), (), kind)
    return TimingKey(environment, operator, training.formats.kernels, Direction.FORWARD)


def summarise(seconds: Sequence[float]) -> Measurement:
    """Median and relative spread of repeated times.

    Example:
        >>> summarise([1.0, 1.0, 1.0, 1.0, 9.0])
        Measurement(median_s=1.0, spread=0.0, repeats=5, error='', origin='')
    """
    median, deviation = median_and_deviation(seconds)
    return Measurement(median, deviation / median, len(seconds))


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the standard deviation of a normal distribution with the same quartiles.

    So a few interrupted runs do not count.

    Example:
        >>> median_and_deviation([1.0, 1.0, 1.0, 1.0, 9.0])
        (1.0, 0.0)
    """
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), (high - low) / 1.349


def error_of_median(deviation: float, count: int) -> float:
    """The standard error of the median of so many values of a normal distribution.

    Example:
        >>> error_of_median(0.04, 25)
        0.01
    """
    return 1.25 * deviation / math.sqrt(count)
