"""One run of the profiler: what is to be timed, in rounds, watched for disturbances."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch

from stratagem.basics.reference_kernel import ReferenceKernel
from stratagem.profiler.cache.kept_paces import brought, keep_pace
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.cache.timing_keys import (
    Measurement,
    TimingKey,
    describe,
    launch_key,
    passes_of,
)
from stratagem.profiler.machine.background_load import BackgroundLoad
from stratagem.profiler.machine.device_clocks import clock_of, num_threads
from stratagem.profiler.machine.drift_watch import (
    CHECK_SECONDS,
    DriftWatch,
    throttle_reasons,
)
from stratagem.profiler.timing.operator_timing import (
    Effort,
    Timing,
    failed_timing,
    is_out_of_memory,
    operator_work,
    time_operator,
)
from stratagem.simulator.kernel_times.cost_model import Direction, elasticity
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.provenance import Environment
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels

MAX_ROUNDS = 3
"""How often an operator is timed at most while the machine is disturbed."""
LEAST_SECONDS = 0.01
"""To begin with an operator: tensors, the background load, the cache."""


@dataclass(frozen=True)
class ProfileProgress:
    """How far a profile is: `done` of `total` distinct operators, the last of them `operator`.

    `seconds_left` is what the others will take if they take what they should relative to those
    that were timed; None before the first. Disturbed operators that are timed again add to
    `total`.
    """

    done: int
    total: int
    operator: str
    cached: bool
    seconds_left: float | None = None


@dataclass(frozen=True)
class ProfileReport:
    """What a profile did.

    Attributes:
        num_timed: distinct operators.
        num_cached: distinct operators whose times were there before.
        seconds: that it took.
        failures: which operators memory did not suffice for, and why.
        num_outliers: runs that were far off the median of their operator.
        disturbed: operators that were slow each time because the device was, by how much, and why
            if that is known; the worst first.
        left_out: operators for which no time was left, in their order.
    """

    num_timed: int
    num_cached: int
    seconds: float
    failures: tuple[str, ...] = ()
    num_outliers: int = 0
    disturbed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """How operators are timed, with what kernels, and where times are kept."""

    training: Training
    environment: Environment
    cache: TimingCache
    device: torch.device
    effort: Effort
    faster: FasterKernels = field(default_factory=FasterKernels)


@dataclass
class Estimate:
    """How long the rest will take, from what the operators so far took.

    An operator weighs as its effort and its least repeats should take; `spent` over the weight of
    what was timed is how long a unit of weight takes here.
    """

    weights: Mapping[str, float]
    spent: float = 0.0
    weight_done: float = 0.0

    def add(self, digest: str, seconds: float) -> None:
        """An operator took `seconds`."""
        self.spent += seconds
        self.weight_done += self.weights[digest]

    def seconds(self, rest: Iterable[str]) -> float | None:
        """Seconds for the operators of `rest`; None when nothing was timed yet."""
        if not self.weight_done:
            return None
        return self.spent / self.weight_done * sum(self.weights[digest] for digest in rest)


@dataclass
class Session:
    """Times operators, watched for disturbances, and keeps what it finds.

    `operators` are by digest; those in `todo` are not in the cache.
    """

    operators: Mapping[str, Operator]
    todo: Set[str]
    setting: Setting
    others: BackgroundLoad
    watch: DriftWatch
    estimate: Estimate
    deadline: float
    progress: Callable[[ProfileProgress], None]
    total: int
    done: int = 0
    num_outliers: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    timed: set[str] = field(default_factory=set)
    found: dict[str, tuple[TimingKey, Measurement]] = field(default_factory=dict)

    def run(self) -> None:
        """Time all that is to do, then what was disturbed again; bring CPU times to one pace."""
        try:
            self._rounds()
        finally:
            if self.setting.device.type == "cpu" and self.found:
                self._bring_to_one_pace()

    def _rounds(self) -> None:
        self._round(list(self.operators))
        for _ in range(MAX_ROUNDS - 1):
            slow = self.watch.disturbed(self._most_drift)
            if not slow or self._is_late:
                return
            self.total += len(slow)
            self._round(slow)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Operators that there was no time for."""
        return tuple(describe(o) for d, o in self.operators.items() if d in self._untimed)

    @property
    def disturbed(self) -> tuple[str, ...]:
        """Operators that were slow in every round, by how much, perhaps why; the worst first."""
        slow = self.watch.disturbed(self._most_drift)
        slow.sort(key=self.watch.slowness, reverse=True)
        why = ", ".join(throttle_reasons(self.setting.device)) if slow else ""
        return tuple(
            f"{describe(self.operators[digest])}: while the device was "
            f"{self.watch.slowness(digest) - 1:.0%} slower than at its best"
            + (f" ({why})" if why else "")
            for digest in slow
        )

    @property
    def _most_drift(self) -> float:
        return self.setting.effort.drift_on(self.setting.device)

    @property
    def _untimed(self) -> Set[str]:
        return self.todo - self.timed

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _round(self, digests: Sequence[str]) -> None:
        for place, digest in enumerate(digests):
            if digest in self.todo:
                if self._is_late:
                    continue
                began = time.monotonic()
                self._time(digest)
                self.estimate.add(digest, time.monotonic() - began)
            self.done += 1
            left = self.estimate.seconds(d for d in digests[place + 1 :] if d in self.todo)
            what, cached = describe(self.operators[digest]), digest not in self.todo
            self.progress(ProfileProgress(self.done, self.total, what, cached, left))
        self.watch.check()

    def _time(self, digest: str) -> None:
        """Time both passes, and keep each unless it was faster before."""
        operator, setting = self.operators[digest], self.setting
        timing = self._timing(operator)
        self.num_outliers += timing.num_outliers
        self.timed.add(digest)
        passes = [
            (direction, self._at_first_pace(measured, timing.reference_s, operator))
            for direction, measured in (
                (Direction.BACKWARD, timing.backward),
                (Direction.FORWARD, timing.forward),
            )
            if measured is not None
        ]
        launches = dict(zip(Direction, timing.launches, strict=False))
        for direction, measured in passes:
            key = TimingKey(
                setting.environment, operator, setting.training.formats.kernels, direction
            )
            if direction in launches:
                self._keep(launch_key(key), launches[direction])
            if self._keep(key, measured) and timing.reference_s:
                self.found[key.digest] = key, measured
        if timing.forward.error:
            self.failures[digest] = f"{describe(operator)}: {timing.forward.error}"
        else:
            self.watch.timed(digest)

    def _at_first_pace(
        self, measured: Measurement, reference_s: float, operator: Operator
    ) -> Measurement:
        """A time at the pace of the first look, so that it can be compared with others."""
        if not reference_s:
            return measured
        return brought(measured, reference_s, self.watch.looks[0], elasticity(operator))

    def _keep(self, key: TimingKey, measured: Measurement) -> bool:
        before = self.setting.cache.own(key)
        if before is None or (not measured.error and measured.median_s < before.median_s):
            return self.setting.cache.offer(key, measured)
        return False

    def _bring_to_one_pace(self) -> None:
        """Put times in place of those taken at whatever pace the cores had (`kept_paces`)."""
        cache = self.setting.cache
        pace = keep_pace(cache, self.setting.environment, self.watch.looks)
        for key, measured in self.found.values():
            share = elasticity(key.operator)
            cache.put(key, brought(measured, self.watch.looks[0], pace, share))

    def _timing(self, operator: Operator) -> Timing:
        setting = self.setting
        try:
            self.others.run(partial(operator_work, operator, setting.training))
        except RuntimeError as error:
            if is_out_of_memory(error):
                return failed_timing(str(error))
            error.add_note(f"while starting operator {operator.name!r} ({operator.kind})")
            raise
        return time_operator(
            operator,
            setting.training,
            setting.device,
            threads=setting.environment.threads,
            effort=setting.effort,
            faster=setting.faster,
        )


def run_session(
    operators: Mapping[str, Operator],
    setting: Setting,
    *,
    seconds: float | None,
    predict: Callable[[Operator], float],
    progress: Callable[[ProfileProgress], None],
) -> ProfileReport:
    """Time those of `operators`, by digest, that the cache lacks; see `profile_operators`."""
    began = time.monotonic()
    todo = {digest for digest, o in operators.items() if not _is_cached(o, setting)}
    threads = setting.environment.threads
    with (
        num_threads(threads),
        BackgroundLoad(setting.environment.load if todo else 0, threads=threads) as others,
    ):
        session = Session(
            operators=operators,
            todo=todo,
            setting=setting,
            others=others,
            watch=_watch(setting.device),
            estimate=Estimate({d: _weight(predict(operators[d]), setting.effort) for d in todo}),
            deadline=math.inf if seconds is None else began + seconds,
            progress=progress,
            total=len(operators),
        )
        try:
            session.run()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(
                f"interrupted: {len(session.timed)} of {len(todo)} operators were timed and are "
                f"kept in {setting.cache.path}; profile again to go on with the others"
            )
            raise
    return ProfileReport(
        num_timed=len(session.timed),
        num_cached=len(operators) - len(todo),
        seconds=time.monotonic() - began,
        failures=tuple(session.failures.values()),
        num_outliers=session.num_outliers,
        disturbed=session.disturbed,
        left_out=session.left_out,
    )


def _watch(device: torch.device) -> DriftWatch:
    """Looks at a CPU after each operator, whose times are brought to one pace; at a GPU rarely."""
    reference = ReferenceKernel(device, clock_of(device))
    return DriftWatch(reference.seconds, interval=0.0 if device.type == "cpu" else CHECK_SECONDS)


def _is_cached(operator: Operator, setting: Setting) -> bool:
    """Whether every pass was measured here: a run may have shown one only, an import anything."""
    where, precision = setting.environment, setting.training.formats.kernels
    keys = [TimingKey(where, operator, precision, each) for each in passes_of(operator)]
    return all(setting.cache.own(key) is not None for key in keys)


def _weight(predicted: float, effort: Effort) -> float:
    """Seconds that timing an operator should take, up to a factor."""
    return LEAST_SECONDS + effort.seconds + (effort.min_repeats + 1) * predicted
