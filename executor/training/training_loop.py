"""The training loop of a rank: batches, learning rate, steps, checkpoints, progress.

Every rank runs it with the same options and the same batches.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from stratagem.basics.progress import Show
from stratagem.executor.checkpoints.folder import (
    KEEP,
    find_checkpoint,
    finite_checkpoints,
    only_writer,
)
from stratagem.executor.checkpoints.index import Course
from stratagem.executor.checkpoints.reader import Checkpoint, restore
from stratagem.executor.checkpoints.shard_writer import save_checkpoint
from stratagem.executor.communication.clocks import Clock, Mark
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.held_bytes import most_held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter, StepRecord
from stratagem.executor.program.programs import Program
from stratagem.executor.results.execution_result import ExecutionResult, median_index, not_graphed
from stratagem.executor.results.measured_timeline import timeline
from stratagem.executor.results.run_origin import provenance_of
from stratagem.executor.state.batch_norm_counters import as_tensors
from stratagem.executor.training.batches import Batches, units_of
from stratagem.executor.training.graphed_steps import GraphedSteps, refusal
from stratagem.executor.training.learning_rates import (
    Rate,
    RateSchedule,
    moves_more_than_rates,
    settings_by_step,
)
from stratagem.executor.training.step_paces import StepPaces
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.units import format_duration

TIMED_STEPS = 100
"""How many of the last steps are kept to choose the measured timeline from."""

FIRST_TIMED, TIMED_EVERY = 10, 20
"""On a GPU, how many of the first steps are timed, and then one of how many."""

MOST_AHEAD = 2
"""Steps that the host may have given a device before it waits for the first of them."""

SHOW_SECONDS = 0.25
"""The least time between two calls that show progress."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a run goes, as any process can be told of it.

    Attributes:
        steps: training steps in all, those that a checkpoint had made counted.
        warmup: steps to run and undo before, so that the measured ones are not the first.
        gradients: whether to bring the gradients of the last step together.
        parameters: whether to bring the parameters together behind the last step, which takes the
            memory of a process for all of them; a checkpoint takes no more than a rank's part.
        checkpoint: folder for checkpoints; None writes none.
        every: steps between two checkpoints; 0 writes one after the last step only.
        resume: a checkpoint, or a folder of checkpoints with the last finite one, to go on from.
        keep: how many checkpoints stay; the last finite one stays in any case.
        finite: whether a loss that is not finite is an error; it is a warning otherwise.
        memory: whether to find the most bytes that each rank holds, in a step that is undone.
        timed_every: the instructions of one step of so many are timed, beside the first and the
            last; None times all steps on CPUs, where it costs next to nothing, and few on GPUs.
        cuda_graph: whether to record a step as a CUDA graph, where that can be, and to run the
            steps but a few as that graph, see `GraphedSteps`.

    Raises:
        ValueError: when there is no step to run, a number is below 0, or `every` is given without
            a folder.
    """

    steps: int = 1
    warmup: int = 0
    gradients: bool = False
    parameters: bool = True
    checkpoint: Path | None = None
    every: int = 0
    resume: Path | None = None
    keep: int = KEEP
    finite: bool = False
    memory: bool = False
    cuda_graph: bool = False
    timed_every: int | None = None

    def with_rate(self, rate: Rate) -> RunOptions:
        """How a run goes with these settings and a learning rate."""
        return RunOptions(**self._by_name, rate=rate)

    @property
    def _by_name(self) -> dict[str, Any]:
        """Every setting, without what a kind of them adds."""
        return {each.name: getattr(self, each.name) for each in fields(RunSettings)}

    def to_json(self) -> str:
        """As text, of which `from_json` makes it again.

        Example:
            >>> RunSettings.from_json(RunSettings(steps=3).to_json()).steps
            3
        """
        return msgspec.json.encode(self, enc_hook=_told).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` made a text of.

        Raises:
            ValueError: when the text is of something else.
        """
        return msgspec.json.decode(text, type=cls, dec_hook=_made)

    def times(self, step: int, start: int, comm: Communicator) -> bool:
        """Whether the instructions of a step are timed, in a run that begins at `start`."""
        number, last = step - start, step == self.steps - 1
        if self.timed_every is None and comm.device.type == "cpu":
            return True
        first = 1 if self.timed_every else FIRST_TIMED
        return last or number < first or number % (self.timed_every or TIMED_EVERY) == 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.timed_every is not None and self.timed_every < 1:
            raise ValueError(f"timed_every={self.timed_every}; at least one step of 1 is timed")
        if self.steps < 1 or self.warmup < 0 or self.every < 0:
            raise ValueError(
                f"steps={self.steps}, warmup={self.warmup}, every={self.every}; at least 1 step "
                f"and 0 of warm-up are run, and checkpoints are written every so many steps"
            )
        if self.timed_every is not None and self.cuda_graph:
            raise ValueError(
                f"timed_every={self.timed_every} with cuda_graph=True: inside a graph nothing is "
                f"timed; leave out one of them"
            )
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}; at least 1 checkpoint must stay")
        if self.checkpoint is not None and self.checkpoint.is_file():
            raise ValueError(f"checkpoint={self.checkpoint} is a file; name a folder to make")
        for name, value, default in (("every", self.every, 0), ("keep", self.keep, KEEP)):
            if value != default and self.checkpoint is None:
                raise ValueError(
                    f"{name}={value}, but there is no folder for checkpoints; name one"
                )


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunSettings):
    """How a run goes, beside its plan, model and data.

    Attributes:
        rate: what the plan's learning rates are multiplied by, as a function of the step from 0,
            or a `TorchRate`, which may move momentum and other numbers, too.
    """

    rate: Rate = field(default_factory=RateSchedule)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """The options as callers say them: folders as texts too, and None for no rate.

        Example:
            >>> options = RunOptions.of(steps=3, checkpoint="kept", rate=None)
            >>> options.checkpoint, options.rate == RateSchedule()
            (PosixPath('kept'), True)

        Args:
            options: by the names of the attributes.

        Raises:
            TypeError: when there is no such attribute.
            ValueError: when a value is not one.
        """
        folders = {
            name: Path(options[name])
            for name in ("checkpoint", "resume")
            if isinstance(options.get(name), str)
        }
        rate = options.pop("rate", None) or RateSchedule()
        return cls(**{**options, **folders}, rate=rate)

    @property
    def settings(self) -> RunSettings:
        """All but the learning rate."""
        return RunSettings(**self._by_name)


def _told(value: Any) -> str:
    """What a text says of something that JSON does not have."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be told to another process; give it `settings` alone")


def _made(kind: type, value: Any) -> Any:
    """What a text means by it."""
    if kind is Path:
        return Path(value)
    raise TypeError(
        f"{value!r} is to be a {kind.__name__}, which no text says; say how in `_told`"
    )


def train(
    interpreter: Interpreter,
    batches: Batches,
    options: RunOptions,
    *,
    place: Place,
    show: Show | None = None,
) -> ExecutionResult:
    """Run steps on one rank and share what was measured; every rank calls this.

    Args:
        interpreter: this rank's.
        batches: that of every step.
        options: how the run goes, the same on every rank.
        place: is kept up to date with where this rank is, for whoever watches it.
        show: shows progress on the rank that knows the loss.

    Raises:
        ValueError: before the first step, when the checkpoint to go on from does not fit or is
            damaged, or another run writes to the folder of checkpoints; before any step whose
            batch does not fit.
        ArithmeticError: on the rank that knows the loss, when it must be finite and is not.
    """
    folder = options.checkpoint if interpreter.comm.rank == 0 else None
    with only_writer(folder, interpreter.program.plan.name):
        return _train(interpreter, batches, options, place, show)


def _train(
    interpreter: Interpreter,
    batches: Batches,
    options: RunOptions,
    place: Place,
    show: Show | None,
) -> ExecutionResult:
    comm = interpreter.comm
    place.follow(interpreter)
    if comm.device.type == "cuda":
        batches.pin()
    start, most_held = _begin(interpreter, batches, options, place)
    losses: list[float | Tensor | None] = []
    durations: list[int] = []
    walls: list[int] = []
    flight = _Flight(comm.clock)
    pace = StepPaces(comm)
    timed: deque[tuple[int, StepRecord]] = deque(maxlen=TIMED_STEPS)
    training = interpreter.program.plan.training
    refused = None
    if options.cuda_graph:
        moves = moves_more_than_rates(options.rate, training, options.steps)
        refused = refusal(interpreter, options.steps - start, moves=moves)
    graphed = GraphedSteps(interpreter) if options.cuda_graph and refused is None else None
    if refused is not None and comm.rank == 0:
        warnings.warn(not_graphed(refused), stacklevel=2)
    speed = _Speed(interpreter.program, start, options.steps)
    settings = settings_by_step(options.rate, training)
    for step in range(start, options.steps):
        pace.look()
        place.enter(step, "taking the batch", slow=True, idle=True)
        batch = batches.at(step)
        if batches.draws and (step == start or batches.position[1] == 1):
            check_equal(batch, comm, f"batches in step {step}", _SAME_DATA)
        interpreter.optimizer.now = settings(step)
        interpreter.random.step = step
        place.enter(step, "waiting for the other ranks to begin", waits=True)
        last = step == options.steps - 1
        keep = options.gradients and last
        if graphed is not None:
            record = graphed.step(batch, keep_gradients=keep, timed=last)
        elif options.times(step, start, comm):
            record = interpreter.step(batch, keep_gradients=keep)
        else:
            record = StepRecord(interpreter.issue(batch), (), 0, timed=False)
        if not record.timed:
            place.enter(step, "waiting for the device", waits=True)
            flight.issued()
        place.enter(step, "between two steps")
        if record.timed:
            place.saw(record)
            timed.append((step - start, record))
        losses.append(record.loss)
        if options.finite:
            _check_finite(record.loss, step)
        walls.append(flight.passed())
        durations.append(record.duration_ns or walls[-1])
        if show is not None and comm.rank == interpreter.program.loss_rank:
            speed.report(step + 1, record.loss, show)
        if options.checkpoint and (last or (options.every and (step + 1) % options.every == 0)):
            place.enter(step, "writing a checkpoint", slow=True)
            course = Course(step + 1, *batches.position)
            found = None if record.loss is None else float(record.loss)
            save_checkpoint(interpreter, options.checkpoint, course, loss=found, keep=options.keep)
    place.enter(options.steps - 1, "bringing results together", slow=True)
    times, spent = _slowest(durations, comm), _slowest(walls, comm)
    result = _result(interpreter, losses, times, timed, start, options)
    peaks = _of_all(most_held, comm) if options.memory else ()
    return replace(
        result,
        wall_times=spent,
        peak_bytes=peaks,
        no_graph=refused or "",
        step_paces=pace.of_all(comm),
    )


def first_step(interpreter: Interpreter, batches: Batches, place: Place) -> ExecutionResult:
    """Make one step, and bring its gradients together; every rank calls this.

    A step that overflows in float16 changes no parameter: it is made again with the smaller loss
    scale that follows from it.
    """
    while True:
        trains = not interpreter.program.graph.is_forward
        result = train(interpreter, batches, RunOptions(gradients=trains), place=place)
        if not interpreter.overflowed or interpreter.loss_scale < 1:
            return result


def _begin(
    interpreter: Interpreter, batches: Batches, options: RunOptions, place: Place
) -> tuple[int, int]:
    """Warm up, and go on from a checkpoint if there is one to go on from.

    Returns:
        The first step, and the most bytes held in one of those before it, 0 unless asked for.
    """
    start, found = 0, None
    if options.resume is not None:
        place.enter(0, "loading a checkpoint", slow=True)
        found = find_checkpoint(options.resume)
        with Checkpoint(found) as checkpoint:
            course = checkpoint.index.course
            checkpoint.index.check_model(interpreter.program, found)
        start = course.step
        batches.seek((course.epoch, course.batch))
        interpreter.comm.barrier()  # Ranks of one process share the batches: all seek, then draw.
        if start >= options.steps:
            raise ValueError(
                f"checkpoint {found} is of step {start} already; steps={options.steps} counts "
                f"from the start of training, so ask for more"
            )
    if options.checkpoint is not None:
        _check_folder(options.checkpoint, start)
    most_held = _warm_up(interpreter, batches, options, place, start)
    if found is not None:
        place.enter(start, "loading a checkpoint", slow=True)
        restore(interpreter, found)
    return start, most_held


def _warm_up(
    interpreter: Interpreter, batches: Batches, options: RunOptions, place: Place, start: int
) -> int:
    """Run steps and undo them; the most bytes held in the last of them, 0 unless asked for.

    Bytes are counted behind another step, in which optimizers make their states.
    """
    most_held = 0
    for number in range(max(options.warmup, int(options.memory))):
        place.enter(start, f"warming up, step {number}", waits=True, slow=True)
        interpreter.step(batches.at(start))
    if options.memory:
        place.enter(start, "counting what is in memory", waits=True, slow=True)
        most_held = most_held_bytes(interpreter, batches.at(start))
    if options.warmup or options.memory:
        interpreter.reset()
    return most_held


def _check_folder(folder: Path, start: int) -> None:
    later = [step for step in finite_checkpoints(folder) if step > start]
    if later:
        raise ValueError(
            f"{folder} has a checkpoint of step {later[-1]} already, and this run begins at step "
            f"{start}; resume from it, or write to another folder"
        )


def _check_finite(loss: float | Tensor | None, step: int) -> None:
    if loss is not None and not math.isfinite(loss):
        raise ArithmeticError(
            f"the loss of step {step} is {float(loss)}, and was to be finite; {_NOT_FINITE}"
        )


def warn_not_finite(losses: Sequence[float], first_step: int) -> None:
    """Say which losses of a run are not finite, if any is not."""
    wrong = [n for n, loss in enumerate(losses) if not math.isfinite(loss)]
    if wrong:
        warnings.warn(
            f"the loss of step {first_step + wrong[0]} is {losses[wrong[0]]}, and so not "
            f"finite, like {len(wrong)} of {len(losses)} of this run; {_NOT_FINITE}",
            stacklevel=3,
        )


_NOT_FINITE = (
    "go on from a checkpoint before it with a lower learning rate, clipped gradients or other data"
)

_SAME_DATA = (
    "every rank must get the same whole batches, of which it takes its part: shuffle by torch's "
    "random numbers, and leave out samplers that deal out data among ranks"
)


def check_equal(tensors: Mapping[str, Tensor], comm: Communicator, what: str, why: str) -> None:
    """Refuse ranks that have different tensors under the same names.

    Raises:
        ValueError: on every rank, with the first name whose tensors differ.
    """
    names = sorted(tensors)
    everyone = tuple(range(comm.world_size))
    sums = torch.stack([_mark(tensors[name]) for name in names]).to(comm.device)
    apart = comm.all_reduce(sums, everyone, "max") + comm.all_reduce(-sums, everyone, "max")
    for name, difference in zip(names, apart.tolist(), strict=True):
        if difference != 0:
            raise ValueError(f"ranks have different {what}: {name!r} differs; {why}")


def _mark(tensor: Tensor) -> Tensor:
    """A number that changes with the values of a tensor and with their order."""
    flat = tensor.detach().flatten().double().cpu()
    return flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64)


class _Speed:
    """How fast a run is, and how long it will take."""

    def __init__(self, program: Program, start: int, steps: int) -> None:
        self._what, self._each = units_of(program.whole)
        self._doing = "running" if program.graph.is_forward else "training"
        self._start, self._steps = start, steps
        self._begun = self._shown = time.monotonic()

    def report(self, done: int, loss: float | Tensor | None, show: Show) -> None:
        now = time.monotonic()
        if now - self._shown < SHOW_SECONDS and done < self._steps:
            return
        self._shown = now
        each = (now - self._begun) / (done - self._start)
        left = each * (self._steps - done)
        told = "" if loss is None else f", loss {loss:.4g}"
        speed = f"{self._each / each:,.0f} {self._what}/s"
        remark = f"step {done} of {self._steps}{told}, {speed}"
        if left > 0:
            remark += f", {format_duration(left)} left"
        show(self._doing, done / self._steps, remark)


class _Flight:
    """The steps that a device still works on, and the host's time from one step to the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: deque[Mark] = deque()
        self._last = time.perf_counter_ns()

    def issued(self) -> None:
        """Say that a step was given to the device, and wait for the one before those under way."""
        self._ends.append(self._clock.mark())
        if len(self._ends) > MOST_AHEAD:
            self._clock.wait(self._ends.popleft())

    def passed(self) -> int:
        """Nanoseconds since this was last called, or since the first step."""
        before, self._last = self._last, time.perf_counter_ns()
        return self._last - before


def _slowest(durations: Sequence[int], comm: Communicator) -> tuple[float, ...]:
    """The seconds of every step, that of the rank that took longest."""
    spent = torch.tensor(durations, dtype=torch.int64).to(comm.device)
    slowest = comm.all_reduce(spent, tuple(range(comm.world_size)), "max")
    return tuple(ns * 1e-9 for ns in slowest.tolist())


def _result(
    interpreter: Interpreter,
    losses: Sequence[float | Tensor | None],
    times: tuple[float, ...],
    timed: deque[tuple[int, StepRecord]],
    start: int,
    options: RunSettings,
) -> ExecutionResult:
    comm, program = interpreter.comm, interpreter.program
    middle = median_index(tuple(times[number] for number, _ in timed))
    spans = _spans(interpreter, timed[middle][1])
    trains = not program.graph.is_forward
    parameters = averages = None
    if options.parameters:
        parameters = interpreter.parameters() if trains else {}
        averages = interpreter.averages() if program.plan.training.average else None
        if comm.rank == 0 and trains:
            parameters |= as_tensors(interpreter.counters.at(start + len(losses)))
    return ExecutionResult(
        plan=program.plan.name,
        losses=_shared(losses, program, comm) if trains else (),
        step_times=times,
        timeline=timeline(program, spans),
        whole_parameters=parameters,
        whole_averages=averages,
        provenance=provenance_of(comm, program.plan.training.formats.kernels),
        gradients=interpreter.whole_gradients() if options.gradients else None,
        first_step=start,
        outputs=None if trains else interpreter.results(),
    )


def _shared(
    losses: Sequence[float | Tensor | None], program: Program, comm: Communicator
) -> tuple[float, ...]:
    """The losses on every rank, from the one that knows them."""
    own = None
    if comm.rank == program.loss_rank:
        known = [torch.as_tensor(each, dtype=torch.float64).cpu() for each in losses]
        own = torch.stack(known).to(comm.device)
    everyone = tuple(range(comm.world_size))
    shared = comm.broadcast(own, (len(losses),), torch.float64, program.loss_rank, everyone)
    return tuple(shared.tolist())


def _of_all(number: int, comm: Communicator) -> tuple[int, ...]:
    """Every rank's number on rank 0, this rank's elsewhere."""
    everyone = tuple(range(comm.world_size))
    own = torch.tensor([number], dtype=torch.int64, device=comm.device)
    gathered = comm.gather(own, [(1,)] * comm.world_size, 0, everyone)
    return (number,) if gathered is None else tuple(int(each) for each in gathered)


def _spans(interpreter: Interpreter, record: StepRecord) -> dict[int, list[tuple[int, int]]]:
    """The clock readings of all ranks on rank 0, of this rank elsewhere."""
    comm, program = interpreter.comm, interpreter.program
    everyone = tuple(range(comm.world_size))
    own = torch.tensor(record.spans, dtype=torch.int64, device=comm.device).reshape(-1, 2)
    shapes = [(len(each.instructions), 2) for each in program.ranks]
    gathered = comm.gather(own, shapes, 0, everyone)
    if gathered is None:
        return {comm.rank: list(record.spans)}
    return {
        rank: [(start, end) for start, end in each.tolist()] for rank, each in enumerate(gathered)
    }
