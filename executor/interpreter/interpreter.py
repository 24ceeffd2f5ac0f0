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
from stratagem.executor.optimizers.measuring import Measuring
from stratagem.executor.program.instructions.numbered_meshes import all_meshes
from stratagem.executor.program.programs import LOSS, Home, Program
from stratagem.executor.resharding.seats import mesh_groups
from stratagem.executor.state.batch_norm_counters import counters_of
from stratagem.executor.state.gathered_results import gather_results
from stratagem.executor.state.loss_scale import LossScale
from stratagem.executor.state.optimizer_state import OptimizerState
from stratagem.executor.state.parameter_parts import check_state, collect
from stratagem.executor.state.parameter_state import ParameterState
from stratagem.executor.state.rewritten_parameters import as_rewritten, to_model
from stratagem.simulator.kernel_times.training import AVERAGE
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype

Chosen = Callable[[ParameterState], Tensor | None]
"""Chooses one of the tensors of a parameter."""


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
    `states` has the parameters and buffers that this rank keeps between steps, by value.
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
        state: whole parameters and buffers of the model, by name; only this rank's part is kept,
            and they are asked for one after another (see `weight_files`).

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
        whole = as_rewritten(program.maps, state)
        self.loader = BatchLoader(comm.device)
        optimizer = make_optimizer(program.plan.training, comm.device)
        self._state = RankState(program, self.mine, comm, parts, optimizer)
        homes, values = {home.stored: home for home in program.homes}, self._state.memory.values
        for stored in self.mine.stored:
            seat, given = parts.seats[stored.stage], whole[stored.parameter]
            dtype = torch_dtype(program.graph.parameter_index[stored.parameter].dtype)
            self._state.states[stored.value] = ParameterState(
                stored, homes.get(stored), seat, given, dtype, values, comm.device
            )
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
        training = self.program.plan.training
        optimizer = make_optimizer(training, self.comm.device)
        self._state.optimizer = optimizer
        if isinstance(optimizer, Measuring):
            optimizer.learn(each for each in self.states.values() if each.trained)
        for each in self.states.values():
            each.undo(optimizer.state(each.stored.parameter) if each.trained else OptimizerState())
        trains = not self.program.graph.is_forward
        self._state.scale = LossScale() if training.scales_loss and trains else None

    @property
    def states(self) -> Mapping[str, ParameterState]:
        """The parameters and buffers that this rank keeps, by value."""
        return self._state.states

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
    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of every gradient at home, of a step that kept them; else none."""
        return self._at_home(lambda state: state.gradient)

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
        there = self._state.memory.everything()
        kept = [tensor for each in self.states.values() for tensor in each.kept().values()]
        return [*there, *kept]

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
        self._begin(batch, keep_gradients=keep_gradients)
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
        with torch.no_grad(), self.comm.clock.untimed():
            for number, action in zip(self._numbers, self._issued, strict=True):
                self.at = number
                action()
            self._state.memory.everything()
        self._state.memory.begun.clear()
        self.at = -1
        return self._state.memory.values.get(LOSS)

    def _begin(self, batch: Mapping[str, Tensor], *, keep_gradients: bool = False) -> None:
        self.comm.let_go()
        if self._state.keeps_gradients:
            for each in self.states.values():
                each.gradient = None
        self._state.keeps_gradients = keep_gradients
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
        return self._whole(lambda state: state.tensor, self.program.homes)

    def averages(self) -> dict[str, Tensor]:
        """Whole averages of the trained parameters on rank 0; every rank calls this."""
        return self._whole(lambda state: state.optimizer.tensors.get(AVERAGE), self._trained)

    def whole_gradients(self) -> dict[str, Tensor]:
        """Whole gradients of a step that kept them, on rank 0; every rank calls this."""
        assert self._state.keeps_gradients
        return self._whole(lambda state: state.gradient, self._trained)

    def results(self) -> dict[str, Tensor]:
        """What the last step of a forward pass gave back, on rank 0; every rank calls this."""
        return gather_results(self.program, self.settled(), self.comm)

    @property
    def _trained(self) -> tuple[Home, ...]:
        return tuple(home for home in self.program.homes if home.trained)

    def _whole(self, chosen: Chosen, homes: tuple[Home, ...]) -> dict[str, Tensor]:
        """What is `chosen` of parameters, whole and in the model's form, on rank 0."""
        found = collect(self.program, homes, self._at_home(chosen), self.comm)
        return to_model(self.program.maps, found)

    def _at_home(self, chosen: Chosen) -> dict[str, Tensor]:
        """What is `chosen` of the parameters that are at home here, by name."""
        found = {
            each.stored.parameter: chosen(each)
            for each in self.states.values()
            if each.home is not None
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}
