"""Timing one operator: forward and backward, again and again until the median is sure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from stratagem.basics.reference_kernel import ReferenceKernel
from stratagem.profiler.cache.timing_keys import Measurement, error_of_median, summarise
from stratagem.profiler.machine.device_clocks import DeviceClock, clock_of, num_threads
from stratagem.profiler.timing.random_operands import (
    Operands,
    check_memory,
    random_operands,
    viewed,
)
from stratagem.simulator.hardware.core_pace import at_pace
from stratagem.simulator.kernel_times.cost_model import SUMMED, elasticity
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.run_kernel import prepare_kernel
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels, whole

T = TypeVar("T")

CPU_DRIFT, GPU_DRIFT = 1.0, 0.1
"""How much slower than at its best a device may be, unless an effort says otherwise."""
CPU_EVICT_BYTES = 8 * 2**20
"""What a step of a small model touches between two uses of a weight, where nobody says more."""
CUDA_EVICT_BYTES = 256 * 2**20


OUTLIER_DEVIATIONS = 5.0
"""Runs this many robust standard deviations from the median are outliers (Leys et al. 2013: 2.5
to 3.5 for samples of which a few are wrong; times have a long tail that is no mistake)."""
LEAST_LAUNCH = 1e-7
"""Seconds of a launch that noise makes shorter than nothing."""
NOTHING_REPEATS = 51
LEAST_DEVIATION = 0.01
"""Of the median: clocks are not finer, so runs closer than that are never told apart."""


@dataclass(frozen=True)
class Timing:
    """What one operator takes; `backward` is None for an operator without a gradient.

    `num_outliers` of the runs of both passes were far off. They hardly move a median, so they are
    counted and not left out. `launches` are what the passes take the host of a GPU, beyond what a
    call that does nothing takes it; empty on a CPU. There `reference_s` is the pace that the times
    are at: what the reference kernel took beside the runs, each of which is brought to it.
    """

    forward: Measurement
    backward: Measurement | None
    num_outliers: int = 0
    launches: tuple[Measurement, ...] = ()
    reference_s: float = 0.0


@dataclass(frozen=True)
class Effort:
    """When to stop repeating: the median is as sure as `relative_error`, or `seconds` are spent.

    `min_repeats` are made in any case. Before each, `evict_bytes` are overwritten, since in a step
    many other operators run between two uses of a weight; None takes what suits the device. On a
    CPU that pushes the interpreter out of the caches too, which a step does not; so where code is
    to be `warm_code`, the same operator runs on other tensors in between. What was timed while the
    device was more than `max_drift` slower than at its best is timed again; None allows
    `GPU_DRIFT` or `CPU_DRIFT`: times of CPUs are brought to one pace (see `kept_paces`).
    """

    seconds: float = 0.3
    relative_error: float = 0.02
    min_repeats: int = 5
    evict_bytes: int | None = None
    max_drift: float | None = None
    warm_code: bool = True

    def __post_init__(self) -> None:
        if self.min_repeats < 2:
            raise ValueError(f"min_repeats is {self.min_repeats}; a spread needs at least 2")

    def drift_on(self, device: torch.device) -> float:
        """How much slower than at its best a device may be while something is timed.

        Example:
            >>> Effort().drift_on(torch.device("cpu"))
            1.0
        """
        if self.max_drift is not None:
            return self.max_drift
        return CPU_DRIFT if device.type == "cpu" else GPU_DRIFT


def time_operator(
    operator: Operator,
    training: Training,
    device: torch.device | str = "cpu",
    *,
    threads: int = 1,
    effort: Effort | None = None,
    faster: FasterKernels | None = None,
) -> Timing:
    """Time both passes of a local operator (see `kernel_times.cost_model.local_operator`).

    Example:
        >>> timing = time_operator(graph.operator("fc1"), Training())  # doctest: +SKIP
        >>> timing.forward.median_s, timing.forward.spread  # doctest: +SKIP
        (0.00152, 0.021)

    As in the executor, forward sees its inputs through their views and autograd records it;
    backward is one call of autograd for the gradients of all inputs and trained weights. What the
    pass before has just made is warm in the caches, and so is the code; all other tensors are
    cold, results included. Where memory does not suffice, the measurements say so in `error`.

    Args:
        operator: any kind but ``source``, which costs nothing.
        training: gives the precision of floating tensors.
        device: a CPU or a CUDA device.
        threads: of one kernel on a CPU; set back afterwards.
        effort: how long to go on.
        faster: what the device runs in place of several operators of torch; none without.

    Raises:
        ValueError: on a kind without a kernel, an unknown device, or `threads` below 1.
        RuntimeError: what torch raises where it cannot run the operator; a note names it.
    """
    effort = effort or Effort()
    given = torch.device(device)
    clock = clock_of(given)
    try:
        with num_threads(threads):
            if given.type != "cpu":
                return _time_trial(
                    OperatorTrial(operator, training, given, faster), None, clock, effort
                )
            check_memory(operator, training)
            make = partial(OperatorTrial, operator, training, given, faster)
            twice = effort.warm_code and _fits_twice(operator, training)
            return _time_trial(make(), make() if twice else None, clock, effort)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            error.add_note(f"while timing operator {operator.name!r} ({operator.kind})")
            raise
        return failed_timing(f"out of memory: {error}")


def _fits_twice(operator: Operator, training: Training) -> bool:
    try:
        check_memory(operator, training, copies=2)
    except MemoryError:
        return False
    return True


def failed_timing(error: str) -> Timing:
    """The timing of an operator that could not be run."""
    failure = Measurement(0.0, 0.0, 0, error)
    return Timing(failure, failure)


class OperatorTrial:
    """One operator with its tensors, ready to run either pass."""

    def __init__(
        self,
        operator: Operator,
        training: Training,
        device: torch.device,
        faster: FasterKernels | None = None,
    ) -> None:
        faster = faster or FasterKernels()
        self.operator = operator
        self.device = device
        self.operands: Operands = random_operands(operator, training, device)
        self.leaves = self.operands.leaves
        shards = replace(
            whole(operator, training.formats.rounded_to),
            random=RandomStream(draw=faster.words),
            losses=faster.losses,
        )
        self._run = prepare_kernel(_of_whole(operator), shards)
        self.output_gradients = [torch.randn_like(made) for made in self._gradient_outputs()]

    @property
    def has_backward(self) -> bool:
        """Whether the operator has anything to do on the way back."""
        return bool(self.output_gradients)

    def forward(self) -> tuple[Tensor, ...]:
        """Run the forward pass, recorded by autograd."""
        sizes = self.operator.sizes
        inputs = [
            viewed(tensor, read, sizes)
            for tensor, read in zip(self.operands.inputs, self.operator.inputs, strict=True)
        ]
        return (self._run(inputs, self.operands.weights),)

    def backward(self, outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Run the backward pass of what `forward` returned."""
        return torch.autograd.grad(
            [made for made in outputs if made.requires_grad],
            self.leaves,
            self.output_gradients,
            allow_unused=True,
        )

    def run(self) -> None:
        """Run both passes."""
        outputs = self.forward()
        if self.has_backward:
            self.backward(outputs)

    def _gradient_outputs(self) -> list[Tensor]:
        return [made.detach() for made in self.forward() if made.requires_grad]


def _of_whole(operator: Operator) -> Operator:
    """An operator of which a local one, if it is split, has the first of two parts.

    So its kernel goes the way of ranks that sum inside it; there is nobody to sum with.
    """
    places = operator.attributes.get(SUMMED, ())
    dims = tuple(
        replace(dim, size=2 * dim.size) if place in places else dim
        for place, dim in enumerate(operator.dims)
    )
    attributes = {key: value for key, value in operator.attributes.items() if key != SUMMED}
    return replace(operator, dims=dims, attributes=attributes)


def operator_work(operator: Operator, training: Training) -> Callable[[], None]:
    """Both passes of an operator on the CPU, ready to run again and again."""
    return OperatorTrial(operator, training, torch.device("cpu")).run


def _time_trial(
    trial: OperatorTrial, other: OperatorTrial | None, clock: DeviceClock, effort: Effort
) -> Timing:
    """Both passes of a trial, each behind that of the `other`, whose results stay meanwhile."""
    evict = evictor(trial.device, effort)
    hosts: tuple[list[float], list[float]] = [], []
    others: list[Sequence[Tensor | None]] = []
    paces = _Paces(trial)

    def before_forward() -> None:
        others.clear()
        evict()
        if other is not None:
            others.append(other.forward())

    def before_backward() -> None:
        evict()
        if other is not None:
            others.append(other.backward([made for made in others[0] if made is not None]))

    def run() -> tuple[float, ...]:
        inputs, made = trial.operands.inputs, trial.output_gradients
        seconds, outputs = timed(trial.forward, clock, before_forward, warm=inputs)
        forward = paces.brought(seconds)
        hosts[0].append(clock.host_seconds)
        if not trial.has_backward:
            return (forward,)
        seconds, _ = timed(lambda: trial.backward(outputs), clock, before_backward, warm=made)
        backward = paces.brought(seconds)
        hosts[1].append(clock.host_seconds)
        return forward, backward

    passes = repeat(run, effort)
    forward, *backward = map(summarise, passes)
    outliers = sum(map(count_outliers, passes))
    launches = _launches(trial.device, hosts) if clock.host_seconds else ()
    last = backward[0] if backward else None
    return Timing(forward, last, outliers, launches, paces.reference_s)


class _Paces:
    """Looks at the reference kernel of a CPU beside each run, whose pace is the first one's."""

    def __init__(self, trial: OperatorTrial) -> None:
        self._kernel = ReferenceKernel(trial.device) if trial.device.type == "cpu" else None
        self._elasticity = elasticity(trial.operator)
        self.reference_s = self._kernel.seconds() if self._kernel else 0.0

    def brought(self, seconds: float) -> float:
        """What a run that just ended takes at the pace of `reference_s`."""
        if self._kernel is None:
            return seconds
        return at_pace(seconds, self._kernel.glance(), self.reference_s, self._elasticity)


def _launches(device: torch.device, hosts: Sequence[Sequence[float]]) -> tuple[Measurement, ...]:
    """What passes take the host beyond a call that does nothing, the first one left out."""
    floors = _calls_of_nothing(device)
    return tuple(
        summarise([max(each - floor, LEAST_LAUNCH) for each in spent[1:]])
        for spent, floor in zip(hosts, floors, strict=True)
        if spent
    )


@lru_cache(maxsize=8)
def _calls_of_nothing(device: torch.device) -> tuple[float, float]:
    """What the host takes around a pass forward and backward that launch no kernel."""
    clock, given = clock_of(device), torch.ones(1, device=device, requires_grad=True)
    seen, ones = given.view(1, 1), torch.ones(1, 1, device=device)
    spent: tuple[list[float], list[float]] = [], []
    calls = (lambda: None, lambda: torch.autograd.grad(seen, given, ones, retain_graph=True))
    for _ in range(NOTHING_REPEATS):
        for call, times in zip(calls, spent, strict=True):
            timed(call, clock, lambda: None)
            times.append(clock.host_seconds)
    return statistics.median(spent[0]), statistics.median(spent[1])


def timed(
    run: Callable[[], T],
    clock: DeviceClock,
    evict: Callable[[], None],
    *,
    warm: Sequence[Tensor] = (),
) -> tuple[float, T]:
    """Seconds and result of one call with cold caches, but for the tensors in `warm`."""
    evict()
    for tensor in warm:
        tensor.detach().sum()
    with clock.ahead():
        start = clock.now()
        result = run()
        stop = clock.now()
    return clock.seconds(start, stop), result


def repeat(run: Callable[[], tuple[float, ...]], effort: Effort) -> list[tuple[float, ...]]:
    """Seconds of every run of what `run` times: once to warm up, then until the effort is made."""
    run()
    runs: list[tuple[float, ...]] = []
    deadline = time.monotonic() + effort.seconds
    while True:
        runs.extend(run() for _ in range(effort.min_repeats))
        passes = list(zip(*runs, strict=True))
        made = [summarise(seconds) for seconds in passes]
        sure = all(error_of_median(p.spread, p.repeats) <= effort.relative_error for p in made)
        if sure or time.monotonic() > deadline:
            return passes


def count_outliers(seconds: Sequence[float]) -> int:
    """How many times are far from the median, by the median absolute deviation.

    Example:
        >>> count_outliers([1.0, 1.01, 0.99, 1.0, 9.0])
        1
    """
    median = statistics.median(seconds)
    deviation = 1.4826 * statistics.median(abs(each - median) for each in seconds)
    limit = OUTLIER_DEVIATIONS * max(deviation, LEAST_DEVIATION * median)
    return sum(abs(each - median) > limit for each in seconds)


def evictor(device: torch.device, effort: Effort) -> Callable[[], None]:
    """A function that fills the caches with something else."""
    nbytes = effort.evict_bytes
    if nbytes is None:
        nbytes = CPU_EVICT_BYTES if device.type == "cpu" else CUDA_EVICT_BYTES
    filler = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def evict() -> None:
        filler.add_(1)

    return evict


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; of a CPU's plain RuntimeError only the text tells."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
