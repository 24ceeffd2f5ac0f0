"""Training steps as one CUDA graph: recorded once, then given to the GPU in one call.

    step 0, 1, 2   one instruction after the other: states, connections and kernels are made
    step 3         recorded, which runs nothing; then run as a graph, as all steps after it
    last step      one instruction after the other again: it is timed, and gives its gradients

What a step reads and changes must stay where it is. A batch is copied into inputs that stay; rate,
number of updates and dropout's step lie on the device; parameters that a step makes anew, such as
those gathered behind an update, are copied to where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from stratagem.executor.cuda.dropout_words import DeviceWords
from stratagem.executor.interpreter.interpreter import Interpreter, StepRecord
from stratagem.executor.optimizers.fused_optimizers import FusedSGD
from stratagem.executor.program.programs import LOSS
from stratagem.simulator.operators.kinds.operator_kinds import kind_of

FIRST_STEPS = 3
"""Steps that run before one is recorded. The first makes what is made once; the next ones are
those that can be timed, since nothing inside a graph is."""


@runtime_checkable
class Recorder(Protocol):
    """A communicator whose steps can be recorded."""

    def record_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` issues; what is returned issues it again."""


def refusal(interpreter: Interpreter, steps: int, *, moves: bool = False) -> str | None:
    """Why steps cannot be run as a graph; None where they can.

    Example:
        >>> refusal(interpreter, steps=100)  # doctest: +SKIP
        "ranks of this backend have no streams of their own to record; use backend 'nccl'"

    Args:
        interpreter: of any rank; all give the same answer.
        steps: how many steps there are to run.
        moves: whether a scheduler moves more than the learning rate.
    """
    if not isinstance(interpreter.comm, Recorder):
        return "ranks of this backend have no streams of their own to record; use backend 'nccl'"
    if steps <= FIRST_STEPS + 1:
        return (
            f"the first {FIRST_STEPS} steps and the last one run instruction by instruction, so "
            f"{steps} steps leave none; run more"
        )
    if interpreter.program.results:
        return "a forward pass gives results back, which the next run of the graph would overwrite"
    if interpreter.scale is not None:
        return "in float16 the host asks in every step whether a gradient is not finite"
    on_device = isinstance(interpreter.random.draw, DeviceWords)
    if not (on_device and isinstance(interpreter.optimizer, FusedSGD)):
        return "rate and step are numbers of the host where CuPy's kernels are not used"
    if moves:
        return "momentum, betas or a decay that a scheduler moves are no numbers of the device"
    for operator in interpreter.program.whole.operators:
        asks_host = kind_of(operator).asks_host
        if asks_host is not None and len(operator.inputs) > asks_host:
            return f"operator {operator.name!r} asks in every step how many slots are taken"
        if operator.is_source and any(
            function == "tensor" for function, _ in operator.attributes["steps"]
        ):
            return f"operator {operator.name!r} copies a constant from the host in every step"
    return None


class GraphedSteps:
    """The steps of one rank, which from some step on are runs of one graph.

    All ranks must make the same calls. Parameters must not be replaced in the meantime, by `reset`
    or a checkpoint: steps that are run as a graph know them by their place.

    Example:
        >>> steps = GraphedSteps(interpreter)  # doctest: +SKIP
        >>> [steps.step(batch).timed for _ in range(5)]  # doctest: +SKIP
        [True, True, True, False, False]
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._steps = 0
        self._inputs: dict[str, Tensor] = {}
        self._places: dict[str, Tensor] = {}
        self._run: Callable[[], None] | None = None
        self._loss: Tensor | None = None

    def step(
        self, batch: Mapping[str, Tensor], *, keep_gradients: bool = False, timed: bool = False
    ) -> StepRecord:
        """A step, see `Interpreter.step`; the host waits for none that is run as a graph.

        Args:
            timed: whether every instruction is to be timed, which those of a graph are not.

        Raises:
            RuntimeError: when a step cannot be recorded; names what to leave out.
        """
        self._steps += 1
        if timed or keep_gradients or self._steps <= FIRST_STEPS:
            record = self._interpreter.step(batch, keep_gradients=keep_gradients)
            self._bring_back()
            return record
        if self._run is None:
            self._record(batch)
        return self._run_again(batch)

    def _record(self, batch: Mapping[str, Tensor]) -> None:
        interpreter, comm = self._interpreter, self._interpreter.comm
        assert isinstance(comm, Recorder)
        self._inputs = {
            name: batch[name].to(comm.device, copy=True) for name in sorted(interpreter.reads)
        }
        self._places = {name: each for name, each in interpreter.settled().items() if name != LOSS}
        self._enter_step()
        try:
            self._run = comm.record_graph(self._issue)
        except Exception as error:
            # Where the run failed, the end of the recording fails too, which says nothing.
            raise RuntimeError(
                f"the step could not be recorded as a CUDA graph ({error.__context__ or error}); "
                f"run it without (cuda_graph=False, no --cuda-graph)"
            ) from error

    def _issue(self) -> None:
        self._interpreter.issue(self._inputs)
        self._bring_back()
        self._loss = self._interpreter.settled().get(LOSS)

    def _bring_back(self) -> None:
        """Let what lasts lie where the graph reads it, once there is a graph to be."""
        values = self._interpreter.settled() if self._places else {}
        for name, place in self._places.items():
            if values[name] is not place:
                place.copy_(values[name])
                values[name] = place

    def _enter_step(self) -> None:
        random = self._interpreter.random
        if isinstance(random.draw, DeviceWords):
            random.draw.enter(random.step)

    def _run_again(self, batch: Mapping[str, Tensor]) -> StepRecord:
        assert self._run is not None
        self._interpreter.loader.load_into(self._inputs, batch)
        self._enter_step()
        self._run()
        # The next run overwrites the graph's own, perhaps before anybody has read it.
        loss = None if self._loss is None else self._loss.clone()
        return StepRecord(loss, (), 0, timed=False)
