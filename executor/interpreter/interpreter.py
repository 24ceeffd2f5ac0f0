"""The interpreter: one rank's program, run step after step with a communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.actions import operator_passes, transfer_actions
from stratagem.executor.actions.operator_parts import OperatorParts
from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.actions.registry import Action, action_of
from stratagem.executor.communication.clocks import Mark
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.communication.endings import Ending
from stratagem.executor.cuda.fused_losses import faster_on
from stratagem.executor.interpreter.batch_loading import BatchLoader
from stratagem.executor.interpreter.untimed_actions import untimed
from stratagem.executor.optimizers.make_optimizer import Optimizer, make_optimizer
from stratagem.executor.optimizers.measuring import Measuring, Placed
from stratagem.executor.program.instructions.numbered_meshes import all_meshes
from stratagem.executor.program.programs import LOSS, Program, Stored, part_shape
from stratagem.executor.resharding.seats import mesh_groups
from stratagem.executor.state.batch_norm_counters import counters_of
from stratagem.executor.state.gathered_results import gather_results
from stratagem.executor.state.loss_scale import LossScale
from stratagem.executor.state.parameter_parts import check_state, collect, local_part, stored_part
from stratagem.executor.state.rewritten_parameters import to_model, to_rewritten
from stratagem.simulator.kernel_times.training import AVERAGE
from stratagem.simulator.operators.operator import factors
from stratagem.simulator.sharding.tensor_parts import TensorPart
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank: start and end of every instruction in ns, 0 at the barrier before it.

    `loss` is None on ranks of stages without the loss, and still on the device where the host has
    not waited for it. Instructions are not `timed` in steps that are run as a whole, and then have
    no spans; nor does a step have a duration while it goes on.
    """

    loss: float | Tensor | None
    spans: tuple[tuple[int, int], ...]
    duration_ns: int
    timed: bool = True


class Interpreter:
    """One rank of a program: its parameters, and its instructions as ready-made actions.

    `at` is the number of the instruction under way, -1 outside the instructions of a step, and
    their count while the device is waited for.
    `scale` is the loss scale of the next step in float16, None in other precisions.
    `counters` are those of batch norms, as they follow from the steps made.
    `reads` has the inputs of the batch that it needs, which alone are brought to its device, by
    `loader`.
    `optimizer` is that of the parameters at home; its settings may be set before every step, as
    may the step of `random`, by which dropout draws.

    Example:
        >>> interpreter = Interpreter(program, comm, model.state_dict())  # doctest: +SKIP
        >>> interpreter.step({"x": x, "target": target}).loss  # doctest: +SKIP
        2.31

    Args:
        program: from `lower`.
        comm: its rank says which part of the program this is; `prepare` is called here.
        state: whole parameters and buffers of the model, by name; only this rank's part is kept.

    Raises:
        ValueError: when `state` does not fit the model.
    """

    def __init__(self, program: Program, comm: Communicator, state: Mapping[str, Tensor]) -> None:
        check_state(program, state)
        self.program = program
        self.comm = comm
        self.mine = program.ranks[comm.rank]
        self.at = -1
        plan, faster = program.plan, faster_on(comm.device)
        self.random = RandomStream(
            plan.seed, num_microbatches=plan.num_microbatches, draw=faster.words
        )
        parts = OperatorParts(program, comm, self.random, faster)
        for mesh in all_meshes(program.plan):
            comm.prepare(mesh_groups(mesh, program.rank_of))
        self.counters = counters_of(program, state)
        whole = to_rewritten(program.maps, state)
        self._start = {
            each.value: local_part(each, whole[each.parameter], parts.seats[each.stage])
            for each in self.mine.stored
        }
        self.loader = BatchLoader(comm.device)
        self._trained = {home.stored for home in program.homes if home.trained}
        optimizer = make_optimizer(program.plan.training, comm.device)
        self._state = RankState(program, self.mine, comm, parts, optimizer)
        self.reset()
        self.reads = operator_passes.batch_inputs(program, self.mine)
        actions = [action_of(each, self._state) for each in self.mine.instructions]
        posting = transfer_actions.posters(self._state)
        self._actions = [*transfer_actions.posted(dict(enumerate(actions)), posting).values()]
        made = untimed(actions, self._state, stops=set(posting))
        issued = transfer_actions.posted(made, posting)
        self._issued, self._numbers = [*issued.values()], [*issued]

    def reset(self) -> None:
        """Undo all training: parameters as they were given, and an optimizer without a past."""
        for stored in self.mine.stored:
            self._keep(stored, self._start[stored.value].clone())
        training = self.program.plan.training
        self._state.optimizer = make_optimizer(training, self.comm.device)
        if isinstance(self.optimizer, Measuring):
            mine = (each for each in self.mine.stored if each in self._trained)
            self.optimizer.learn({each.parameter: self._placed(each) for each in mine})
        trains = not self.program.graph.is_forward
        self._state.scale = LossScale() if training.scales_loss and trains else None

    def _placed(self, stored: Stored) -> Placed:
        """How this rank's part of a parameter lies in it."""
        size_of = dict(zip(factors(stored.layout), stored.sizes, strict=True))
        groups = tuple(tuple(size_of[name] for name in group) for group in stored.layout)
        return Placed(groups, stored_part(stored, self._state.parts.seats[stored.stage]))

    def value(self, stored: Stored) -> Tensor:
        """A parameter or buffer as this rank has it now, in float32 where it is trained so."""
        tensor: Tensor = self._state.masters.get(
            stored.value, self._state.memory.values[stored.value]
        )
        return tensor

    def _keep(self, stored: Stored, part: Tensor) -> None:
        """Take a new value for a parameter or buffer, and its float32 copy if it has one."""
        part, dtype = part.to(self.comm.device).contiguous(), torch_dtype(stored.dtype)
        self._state.memory.values[stored.value] = part.to(dtype)
        if part.dtype != dtype and stored in self._trained:
            self._state.masters[stored.value] = part

    @property
    def optimizer(self) -> Optimizer:
        """Of the parameters at home."""
        return self._state.optimizer

    @property
    def scale(self) -> LossScale | None:
        """The loss scale of the next step; None in other precisions than float16."""
        return self._state.scale

    @scale.setter
    def scale(self, scale: LossScale) -> None:
        self._state.scale = scale

    @property
    def gradients(self) -> dict[str, Tensor] | None:
        """This rank's part of every gradient at home, of a step that kept them."""
        return self._state.gradients

    @property
    def overflowed(self) -> bool:
        """Whether a gradient of the last step was not finite in float16, on any rank."""
        return self._state.overflowed

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by; 1 but in float16."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def waits(self) -> bool:
        """Whether this rank waits for a collective that was begun earlier."""
        return self._state.memory.waits

    def held(self) -> list[Any]:
        """All that this rank holds now: tensors and tapes, with what the optimizer remembers."""
        states = [self.optimizer.state(home.stored.parameter) for home in self.program.homes]
        remembered = [tensor for state in states for tensor in state.tensors.values()]
        return [*self._state.memory.everything(), *self._state.masters.values(), *remembered]

    def restore(self, read: Callable[[Stored, TensorPart], Tensor]) -> None:
        """Replace every parameter and buffer by what `read` gives of it, which is the part."""
        for stored in self.mine.stored:
            part = stored_part(stored, self._state.parts.seats[stored.stage])
            self._keep(stored, read(stored, part).reshape(part_shape(stored.layout, part)))

    def step(
        self,
        batch: Mapping[str, Tensor],
        *,
        keep_gradients: bool = False,
        between: Action | None = None,
    ) -> StepRecord:
        """Run one training step on the inputs of the whole batch.

        With `keep_gradients`, `gradients` then has this rank's part of every gradient at home.
        `between` is run before every instruction, and does not count as part of it.
        """
        clock = self.comm.clock
        mark = clock.mark
        self._begin(batch)
        self._state.gradients = {} if keep_gradients else None
        marks: list[tuple[Mark, Mark]] = []
        begun: dict[int, Ending] = {}
        with torch.no_grad():
            self.comm.barrier()
            zero = start = clock.start()
            for number, action in enumerate(self._actions):
                self.at = number
                if between is not None:
                    between()
                    start = mark()
                action()
                end = mark()
                marks.append((clock.behind(start, self._state.memory.waited_ns), end))
                start = end
                if self._state.memory.begun:
                    begun[number] = self._state.memory.begun.pop()
            self._state.memory.everything()
        self.at = len(self._actions)
        spans = clock.spans(zero, marks, begun)
        self.at = -1
        loss = self._state.memory.values.get(LOSS)
        duration = max((end for _, end in spans), default=0)
        return StepRecord(None if loss is None else float(loss), tuple(spans), duration)

    def issue(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Run the instructions of a step without a barrier or a clock; the loss, where it is.

        Parameters that are updated one behind the other are so at once. Where the device works by
        itself, the host waits for nothing but what it must read to go on.
        """
        self._begin(batch)
        self._state.gradients = None
        with torch.no_grad(), self.comm.clock.untimed():
            for number, action in zip(self._numbers, self._issued, strict=True):
                self.at = number
                action()
            self._state.memory.everything()
        self._state.memory.begun.clear()
        self.at = -1
        return self._state.memory.values.get(LOSS)

    def _begin(self, batch: Mapping[str, Tensor]) -> None:
        self.comm.let_go()
        read = {name: tensor for name, tensor in batch.items() if name in self.reads}
        self._state.batch = {**batch, **self.loader.load(read)}
        for value in self.program.left:
            self._state.memory.values.pop(value, None)
        self._state.memory.seed = 1.0 if self.scale is None else self.scale.value

    def settled(self) -> dict[str, Tensor]:
        """Values by name, none of them on its way: between steps, parameters, buffers and loss."""
        self._state.memory.everything()
        return self._state.memory.values

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters and buffers of the model on rank 0; every rank calls this."""
        program = self.program
        parts = {
            home.stored.parameter: self.value(home.stored)
            for home in program.homes
            if home.stage in self.mine.stages and home.stored.value in self._state.memory.values
        }
        return to_model(program.maps, collect(program, program.homes, parts, self.comm))

    def results(self) -> dict[str, Tensor]:
        """What the last step of a forward pass gave back, on rank 0; every rank calls this."""
        return gather_results(self.program, self.settled(), self.comm)

    def averages(self) -> dict[str, Tensor]:
        """Whole averages of the trained parameters on rank 0; every rank calls this."""
        trained = tuple(home for home in self.program.homes if home.trained)
        names = [home.stored.parameter for home in trained]
        states = {name: self.optimizer.state(name).tensors for name in names}
        parts = {name: state[AVERAGE] for name, state in states.items() if AVERAGE in state}
        return to_model(self.program.maps, collect(self.program, trained, parts, self.comm))

    def whole_gradients(self) -> dict[str, Tensor]:
        """Whole gradients of a step that kept them, on rank 0; every rank calls this."""
        assert self.gradients is not None
        trained = tuple(home for home in self.program.homes if home.trained)
        found = collect(self.program, trained, self.gradients, self.comm)
        return to_model(self.program.maps, found)
