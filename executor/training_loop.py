"""The training loop of a rank: batches, learning rate, steps, checkpoints, progress.

Every rank runs it with the same options and the same batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stratagem.executor.backends.base import Communicator
from stratagem.executor.batches import Batches, units_of
from stratagem.executor.checkpoint import complete_checkpoints, save_checkpoint
from stratagem.executor.checkpoint_index import Course
from stratagem.executor.checkpoint_reader import Checkpoint, find_checkpoint, restore
from stratagem.executor.interpreter import Interpreter, StepRecord
from stratagem.executor.measure import timeline
from stratagem.executor.program import Program
from stratagem.executor.rates import Rate, RateSchedule
from stratagem.executor.result import ExecutionResult, median_index
from stratagem.executor.where import Place
from stratagem.simulator.timeline import format_duration

TIMED_STEPS = 100
"""How many of the last steps are kept to choose the measured timeline from."""

SHOW_SECONDS = 0.25
"""The least time between two calls that show progress."""

Show = Callable[[str, float, str], None]
"""Shows what is being done, how much of it is (0 to 1), and a remark."""


@dataclass(frozen=True)
class RunOptions:
    """How a run goes, beside its plan, model and data.

    Attributes:
        steps: training steps in all, those that a checkpoint had made counted.
        warmup: steps to run and undo before, so that the measured ones are not the first.
        gradients: whether to bring the gradients of the last step together.
        rate: what the plan's learning rate is multiplied by, as a function of the step from 0.
        checkpoint: folder for checkpoints; None writes none.
        every: steps between two checkpoints; 0 writes one after the last step only.
        resume: a checkpoint, or a folder of checkpoints with the last of them, to go on from.

    Raises:
        ValueError: when there is no step to run, a number is below 0, or `every` is given without
            a folder.
    """

    steps: int = 1
    warmup: int = 0
    gradients: bool = False
    rate: Rate = field(default_factory=RateSchedule)
    checkpoint: Path | None = None
    every: int = 0
    resume: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or self.every < 0:
            raise ValueError(
                f"steps={self.steps}, warmup={self.warmup}, every={self.every}; at least 1 step "
                f"and 0 of warm-up are run, and checkpoints are written every so many steps"
            )
        if self.every and self.checkpoint is None:
            raise ValueError(
                f"every={self.every}, but there is no folder for checkpoints; name one"
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
            damaged; before any step whose batch does not fit.
    """
    comm = interpreter.comm
    place.follow(interpreter)
    start = _begin(interpreter, batches, options, place)
    losses: list[float | None] = []
    durations: list[int] = []
    records: deque[StepRecord] = deque(maxlen=TIMED_STEPS)
    speed = _Speed(interpreter.program, start, options.steps)
    base = interpreter.program.plan.training.learning_rate
    for step in range(start, options.steps):
        place.enter(step, "taking the batch")
        batch = batches.at(step)
        if batches.draws and (step == start or batches.position[1] == 1):
            check_equal(batch, comm, f"batches in step {step}", _SAME_DATA)
        interpreter.optimizer.rate = base * options.rate(step)
        interpreter.random.step = step
        place.enter(step, "waiting for the other ranks to begin", waits=True)
        last = step == options.steps - 1
        record = interpreter.step(batch, keep_gradients=options.gradients and last)
        place.enter(step, "between two steps")
        records.append(record)
        losses.append(record.loss)
        durations.append(record.duration_ns)
        if show is not None and comm.rank == interpreter.program.loss_rank:
            speed.report(step + 1, record.loss, show)
        if options.checkpoint and (last or (options.every and (step + 1) % options.every == 0)):
            place.enter(step, "writing a checkpoint", slow=True)
            save_checkpoint(interpreter, options.checkpoint, Course(step + 1, *batches.position))
    place.enter(options.steps - 1, "bringing results together", slow=True)
    return _result(interpreter, losses, durations, records, start, gradients=options.gradients)


def _begin(interpreter: Interpreter, batches: Batches, options: RunOptions, place: Place) -> int:
    """Warm up, and go on from a checkpoint if there is one to go on from; the first step."""
    start = 0
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
    for _ in range(options.warmup):
        interpreter.step(batches.at(start))
    if options.warmup:
        interpreter.reset()
    if options.resume is not None:
        restore(interpreter, options.resume)
    return start


def _check_folder(folder: Path, start: int) -> None:
    later = [step for step in complete_checkpoints(folder) if step > start]
    if later:
        raise ValueError(
            f"{folder} has a checkpoint of step {later[-1]} already, and this run begins at step "
            f"{start}; resume from it, or write to another folder"
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
        self._start, self._steps = start, steps
        self._begun = self._shown = time.monotonic()

    def report(self, done: int, loss: float | None, show: Show) -> None:
        now = time.monotonic()
        if now - self._shown < SHOW_SECONDS and done < self._steps:
            return
        self._shown = now
        each = (now - self._begun) / (done - self._start)
        left = each * (self._steps - done)
        remark = (
            f"step {done} of {self._steps}, loss {loss:.4g}, "
            f"{self._each / each:,.0f} {self._what}/s"
        )
        if left > 0:
            remark += f", {format_duration(left)} left"
        show("training", done / self._steps, remark)


def _result(
    interpreter: Interpreter,
    losses: list[float | None],
    durations: list[int],
    records: deque[StepRecord],
    start: int,
    *,
    gradients: bool,
) -> ExecutionResult:
    comm, program = interpreter.comm, interpreter.program
    everyone = tuple(range(comm.world_size))
    own = None
    if comm.rank == program.loss_rank:
        own = torch.tensor(losses, dtype=torch.float64).to(comm.device)
    shared = comm.broadcast(own, (len(losses),), torch.float64, program.loss_rank, everyone)
    spent = torch.tensor(durations, dtype=torch.int64)
    slowest = comm.all_reduce(spent.to(comm.device), everyone, "max")
    times = tuple(ns * 1e-9 for ns in slowest.tolist())
    spans = _spans(interpreter, records[median_index(times[-len(records) :])])
    return ExecutionResult(
        losses=tuple(shared.tolist()),
        step_times=times,
        timeline=timeline(program, spans),
        parameters=interpreter.parameters(),
        gradients=interpreter.whole_gradients() if gradients else None,
        first_step=start,
    )


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
