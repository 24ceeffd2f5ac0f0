"""The interpreter: one rank's program, run step after step with a communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.communication.clocks import Mark
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.communication.endings import Ending
from stratagem.executor.cuda.fused_losses import faster_on
from stratagem.executor.interpreter import operator_actions, prefix_actions, transfer_actions
from stratagem.executor.interpreter.batch_loading import BatchLoader
from stratagem.executor.interpreter.named_values import NamedValues
from stratagem.executor.interpreter.operator_parts import OperatorParts
from stratagem.executor.interpreter.transfer_actions import Ports
from stratagem.executor.interpreter.untimed_actions import untimed
from stratagem.executor.optimizers.make_optimizer import make_optimizer, muon_of
from stratagem.executor.optimizers.measuring import Measuring, Placed
from stratagem.executor.optimizers.muon import moved_by
from stratagem.executor.program.instructions import (
    Backward,
    Bundle,
    Convert,
    Direct,
    Forward,
    Free,
    Instruction,
    Join,
    Measure,
    Norm,
    Receive,
    Send,
    Source,
    Stash,
    Update,
    Updated,
)
from stratagem.executor.program.numbered_meshes import all_meshes
from stratagem.executor.program.programs import LOSS, Program, Stored, part_shape
from stratagem.executor.resharding.seats import mesh_groups
from stratagem.executor.state.batch_norm_counters import counters_of
from stratagem.executor.state.gathered_results import gather_results
from stratagem.executor.state.gradient_lists import (
    GradientChange,
    clip_scale,
    clipped,
    handfuls,
    norm_of_all,
    sum_of_powers,
)
from stratagem.executor.state.loss_scale import LossScale
from stratagem.executor.state.parameter_parts import check_state, collect, local_part, stored_part
from stratagem.executor.state.rewritten_parameters import to_model, to_rewritten
from stratagem.simulator.kernel_times.training import AVERAGE
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import factor_sizes, factors
from stratagem.simulator.operators.step_programs import inputs_of
from stratagem.simulator.sharding.tensor_parts import TensorPart
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.step_programs import prepare_source, torch_dtype

Action = Callable[[], None]


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
        self.gradients: dict[str, Tensor] | None = None
        self.at = -1
        plan, faster = program.plan, faster_on(comm.device)
        self.random = RandomStream(
            plan.seed, num_microbatches=plan.num_microbatches, draw=faster.words
        )
        self._parts = OperatorParts(program, comm, self.random, faster)
        for mesh in all_meshes(program.plan):
            comm.prepare(mesh_groups(mesh, program.rank_of))
        self.counters = counters_of(program, state)
        whole = to_rewritten(program.maps, state)
        self._start = {
            each.value: local_part(each, whole[each.parameter], self._parts.seats[each.stage])
            for each in self.mine.stored
        }
        self.loader = BatchLoader(comm.device)
        self._memory = NamedValues()
        self._masters: dict[str, Tensor] = {}
        self._overflowed = False
        self._trained = {home.stored for home in program.homes if home.trained}
        self._ports = Ports(self.mine.device, program.rank_of, program.tags, comm)
        self.reset()
        self._batch: Mapping[str, Tensor] = {}
        self.reads = _inputs_of(program, self.mine.instructions)
        actions = [self._action(each) for each in self.mine.instructions]
        posting = transfer_actions.posters(program, self._ports)
        self._actions = [*transfer_actions.posted(dict(enumerate(actions)), posting).values()]
        made = untimed(
            *(actions, self._parts, self.mine.instructions, self._memory, self._update),
            stops=set(posting),
        )
        issued = transfer_actions.posted(made, posting)
        self._issued, self._numbers = [*issued.values()], [*issued]

    def reset(self) -> None:
        """Undo all training: parameters as they were given, and an optimizer without a past."""
        for stored in self.mine.stored:
            self._keep(stored, self._start[stored.value].clone())
        training = self.program.plan.training
        self.optimizer = make_optimizer(training, self.comm.device)
        if isinstance(self.optimizer, Measuring):
            mine = (each for each in self.mine.stored if each in self._trained)
            self.optimizer.learn({each.parameter: self._placed(each) for each in mine})
        trains = not self.program.graph.is_forward
        self.scale = LossScale() if training.scales_loss and trains else None

    def _placed(self, stored: Stored) -> Placed:
        """How this rank's part of a parameter lies in it."""
        size_of = dict(zip(factors(stored.layout), stored.sizes, strict=True))
        groups = tuple(tuple(size_of[name] for name in group) for group in stored.layout)
        return Placed(groups, stored_part(stored, self._parts.seats[stored.stage]))

    def value(self, stored: Stored) -> Tensor:
        """A parameter or buffer as this rank has it now, in float32 where it is trained so."""
        tensor: Tensor = self._masters.get(stored.value, self._memory.values[stored.value])
        return tensor

    def _keep(self, stored: Stored, part: Tensor) -> None:
        """Take a new value for a parameter or buffer, and its float32 copy if it has one."""
        part, dtype = part.to(self.comm.device).contiguous(), torch_dtype(stored.dtype)
        self._memory.values[stored.value] = part.to(dtype)
        if part.dtype != dtype and stored in self._trained:
            self._masters[stored.value] = part

    @property
    def overflowed(self) -> bool:
        """Whether a gradient of the last step was not finite in float16, on any rank."""
        return self._overflowed

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by; 1 but in float16."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def waits(self) -> bool:
        """Whether this rank waits for a collective that was begun earlier."""
        return self._memory.waits

    def held(self) -> list[Any]:
        """All that this rank holds now: tensors and tapes, with what the optimizer remembers."""
        states = [self.optimizer.state(home.stored.parameter) for home in self.program.homes]
        remembered = [tensor for state in states for tensor in state.values()]
        return [*self._memory.everything(), *self._masters.values(), *remembered]

    def restore(self, read: Callable[[Stored, TensorPart], Tensor]) -> None:
        """Replace every parameter and buffer by what `read` gives of it, which is the part."""
        for stored in self.mine.stored:
            part = stored_part(stored, self._parts.seats[stored.stage])
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
        self.gradients = {} if keep_gradients else None
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
                marks.append((start, end))
                start = end
                if self._memory.begun:
                    begun[number] = self._memory.begun.pop()
            self._memory.everything()
        self.at = len(self._actions)
        spans = clock.spans(zero, marks, begun)
        self.at = -1
        loss = self._memory.values.get(LOSS)
        duration = max((end for _, end in spans), default=0)
        return StepRecord(None if loss is None else float(loss), tuple(spans), duration)

    def issue(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Run the instructions of a step without a barrier or a clock; the loss, where it is.

        Parameters that are updated one behind the other are so at once. Where the device works by
        itself, the host waits for nothing but what it must read to go on.
        """
        self._begin(batch)
        self.gradients = None
        with torch.no_grad(), self.comm.clock.untimed():
            for number, action in zip(self._numbers, self._issued, strict=True):
                self.at = number
                action()
            self._memory.everything()
        self._memory.begun.clear()
        self.at = -1
        return self._memory.values.get(LOSS)

    def _begin(self, batch: Mapping[str, Tensor]) -> None:
        read = {name: tensor for name, tensor in batch.items() if name in self.reads}
        self._batch = {**batch, **self.loader.load(read)}
        for value in self.program.left:
            self._memory.values.pop(value, None)
        self._memory.seed = 1.0 if self.scale is None else self.scale.value

    def settled(self) -> dict[str, Tensor]:
        """Values by name, none of them on its way: between steps, parameters, buffers and loss."""
        self._memory.everything()
        return self._memory.values

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters and buffers of the model on rank 0; every rank calls this."""
        program = self.program
        parts = {
            home.stored.parameter: self.value(home.stored)
            for home in program.homes
            if home.stage in self.mine.stages and home.stored.value in self._memory.values
        }
        return to_model(program.maps, collect(program, program.homes, parts, self.comm))

    def results(self) -> dict[str, Tensor]:
        """What the last step of a forward pass gave back, on rank 0; every rank calls this."""
        return gather_results(self.program, self.settled(), self.comm)

    def averages(self) -> dict[str, Tensor]:
        """Whole averages of the trained parameters on rank 0; every rank calls this."""
        trained = tuple(home for home in self.program.homes if home.trained)
        names = [home.stored.parameter for home in trained]
        states = {name: self.optimizer.state(name) for name in names}
        parts = {name: state[AVERAGE] for name, state in states.items() if AVERAGE in state}
        return to_model(self.program.maps, collect(self.program, trained, parts, self.comm))

    def whole_gradients(self) -> dict[str, Tensor]:
        """Whole gradients of a step that kept them, on rank 0; every rank calls this."""
        assert self.gradients is not None
        trained = tuple(home for home in self.program.homes if home.trained)
        found = collect(self.program, trained, self.gradients, self.comm)
        return to_model(self.program.maps, found)

    # -- actions --------------------------------------------------------------------------------

    def _action(self, instruction: Instruction) -> Action:
        memory, comm = self._memory, self.comm
        match instruction:
            case Source():
                return self._source(instruction)
            case Forward():
                return self._forward(instruction)
            case Backward():
                operator = self.program.operator(instruction.operator, instruction.microbatch)
                shards = self._parts.shards_of(operator, instruction.microbatch, instruction.piece)
                if role_of(operator) is OperatorRole.PREFIX:
                    slices = self.program.slices
                    return prefix_actions.backward(instruction, operator, shards, slices, memory)
                seat = self._parts.seat_of(operator.name)
                return operator_actions.backward(instruction, operator, shards, seat, memory)
            case Convert():
                return transfer_actions.convert(
                    instruction, self._parts.seats[instruction.stage], comm, memory
                )
            case Join():
                return transfer_actions.join(instruction, memory)
            case Bundle():
                seat = self._parts.seats[instruction.parts[0].stage]
                return transfer_actions.bundle(instruction, seat, comm, memory)
            case Send():
                return transfer_actions.send(instruction, self._ports, memory)
            case Receive():
                return transfer_actions.receive(instruction, self._ports, memory)
            case Norm():
                return self._norm(instruction)
            case Measure():
                return self._measure(instruction)
            case Direct():
                return self._direct(instruction)
            case Stash():
                return transfer_actions.stash(instruction, memory)
            case Update():
                return self._update([instruction])
            case Free():
                return lambda: memory.free(instruction.values)

    def _source(self, instruction: Source) -> Action:
        operator = self.program.whole.operator(instruction.operator)
        shape = factor_sizes(operator.outputs[0].layout, operator.sizes)
        values, dtype = self._memory.values, torch_dtype(instruction.dtype)

        make = prepare_source(operator, self.comm.device)

        def run() -> None:
            values[instruction.value] = make(self._batch).to(dtype).reshape(shape)

        return run

    def _forward(self, instruction: Forward) -> Action:
        microbatch, program = instruction.microbatch, self.program
        operator = program.operator(instruction.operator, microbatch)
        seat = self._parts.seat_of(operator.name)
        if role_of(operator) is OperatorRole.PREFIX:
            parts = self._parts.before(operator, len(instruction.inputs))
            return prefix_actions.forward(instruction, operator, parts, seat, self._memory)
        shards = self._parts.shards_of(operator, microbatch, instruction.piece)
        flows, enter = self._parts.flows[operator.name], self._parts.entering(microbatch)
        run = operator_actions.forward(instruction, operator, shards, flows, seat, self._memory)

        def at_its_microbatch() -> None:
            enter()
            run()

        return at_its_microbatch

    def _norm(self, instruction: Norm) -> Action:
        values, comm = self._memory.values, self.comm
        order = float(self.program.plan.training.clip_norm_type)
        counted = [
            value
            for value, stage, placements in instruction.gradients
            if self._parts.seats[stage].is_first(placements)
        ]

        def run() -> None:
            powers = sum_of_powers([values[value] for value in counted], comm.device, order)
            norm = norm_of_all(comm, powers, order) / self._memory.seed
            values[instruction.value] = norm
            if self.scale is not None:
                self._overflowed = not bool(norm.isfinite())
                self.scale.update(overflowed=self._overflowed)

        return run

    def _measure(self, instruction: Measure) -> Action:
        """What brings together what ranks measure of their parts of all parameters."""
        values, comm, number = self._memory.values, self.comm, instruction.number
        here, everyone = instruction.parameters, tuple(range(comm.world_size))
        named = [each.updated for each in here]
        counted = [
            each.counts and self._parts.seats[each.stage].is_first(each.placements)
            for each in here
        ]
        shapes = self.program.graph.parameter_index
        first = self.optimizer
        assert isinstance(first, Measuring), "no other optimizer measures"
        ends = [*accumulate(first.count(number, shapes[name].shape) for name in instruction.names)]
        own = {
            name: slice(begun, end)
            for name, begun, end in zip(instruction.names, (0, *ends), ends, strict=False)
        }

        def run() -> None:
            optimizer = self.optimizer
            assert isinstance(optimizer, Measuring), "no other optimizer measures"
            row = torch.zeros(ends[-1], dtype=optimizer.dtype, device=comm.device)
            if not self._overflowed and named:
                norm = None if instruction.norm is None else values[instruction.norm]
                found = [
                    numbers
                    for handful in handfuls(self._changes(named))
                    for numbers in optimizer.measure(number, self._scaled(handful, norm))
                ]
                for each, counts, numbers in zip(named, counted, found, strict=True):
                    if counts:
                        row[own[each.parameter]] = numbers
            whole = comm.all_reduce(row, everyone, optimizer.reduction)
            values[instruction.value] = whole
            if not self._overflowed:
                names = [each.parameter for each in named]
                optimizer.take(number, {name: whole[own[name]] for name in names})

        return run

    def _changes(self, named: Sequence[Updated]) -> list[GradientChange]:
        """How parameters are to be changed by their gradients."""
        return [self._change(each, self._memory.values[each.gradient]) for each in named]

    def _change(self, updated: Updated, by: Tensor) -> GradientChange:
        """What is trained in float32 is changed there, and followed by what operators use."""
        value = self._memory.values[updated.value]
        master = self._masters.get(updated.value)
        if master is None:
            return GradientChange(updated.parameter, value, by)
        return GradientChange(updated.parameter, master, by, value)

    def _update(self, instructions: Sequence[Update]) -> Action:
        """What updates the parameters of some operators, a handful of them at a time."""
        every = [each for update in instructions for each in update.parameters]
        named = [each for each in every if each.direction is None]
        moves = [self._mover(each) for each in every if each.direction is not None]
        shares = {each.parameter: u.share for u in instructions for each in u.parameters}
        norm = instructions[0].norm

        def run() -> None:
            length = None if norm is None else self._memory.values[norm]
            inside, changes = self._scale_inside(length), self._changes(named)
            if inside is None or self.gradients is not None:
                for handful in handfuls(changes):
                    scaled = self._scaled(handful, length)
                    if self.gradients is not None:
                        for change in scaled:
                            self._keep_gradient(change.name, change.gradient, shares[change.name])
                    if inside is None and not self._overflowed:
                        self.optimizer.all_of(scaled)
            if inside is not None:
                self.optimizer.all_of(changes, inside)
            if moves and not self._overflowed:
                self.optimizer.all_of([move() for move in moves])

        return run

    def _direct(self, instruction: Direct) -> Action:
        """What makes this rank's part of a direction."""
        values, updated, norm = self._memory.values, instruction.updated, instruction.norm

        def run() -> None:
            change = self._change(updated, values[updated.gradient])
            (scaled,) = self._scaled([change], None if norm is None else values[norm])
            if self.gradients is not None:
                self._keep_gradient(scaled.name, scaled.gradient, instruction.share)
            if self._overflowed:  # Others wait for a part, which nobody reads.
                values[instruction.value] = torch.zeros_like(scaled.parameter)
            else:
                muon = muon_of(self.optimizer, scaled.name)
                values[instruction.value] = muon.direct(scaled)

        return run

    def _mover(self, updated: Updated) -> Callable[[], GradientChange]:
        """What makes a change of this rank's part of a matrix, by the direction of all of it."""
        direction, values = updated.direction, self._memory.values
        assert direction is not None
        stored = next(each for each in self.mine.stored if each.value == updated.value)
        training = self.program.plan.training.for_parameter(updated.parameter)
        settings, seat = training.newton_schulz, self._parts.seats[stored.stage]
        shape = self.program.graph.parameter_index[updated.parameter].shape

        def moved() -> GradientChange:
            whole = moved_by(values[direction].reshape(shape), settings)
            part = local_part(stored, whole, seat)
            change = self._change(updated, part)
            return change._replace(gradient=part.reshape(change.parameter.shape))

        return moved

    def _scale_inside(self, norm: Tensor | None) -> Tensor | None:
        """What the optimizer itself multiplies gradients by, if nothing else is done to them.

        Then nothing is made of them: their clipping is part of the pass that reads them.
        """
        longest = self.program.plan.training.clip_norm
        if norm is None or not longest or self.scale is not None or not self.optimizer.takes_scale:
            return None
        return clip_scale(norm, longest).float()

    def _scaled(
        self, changes: Sequence[GradientChange], norm: Tensor | None
    ) -> Sequence[GradientChange]:
        """Changes whose gradients are without the loss scale, and clipped."""
        training = self.program.plan.training
        longest, most = training.clip_norm, training.clip_value
        if self.scale is None and not (longest or most):
            return changes
        gradients = [change.gradient for change in changes]
        if self.scale is not None:
            whole = [gradient.float() for gradient in gradients]
            gradients = list(torch._foreach_div(whole, self._memory.seed))
        if longest and norm is not None:
            gradients = clipped(gradients, norm, longest)
        if most and gradients:
            gradients = list(torch._foreach_clamp_min(gradients, -most))
            torch._foreach_clamp_max_(gradients, most)
        return [
            GradientChange(name, parameter, gradient, copy)
            for (name, parameter, _, copy), gradient in zip(changes, gradients, strict=True)
        ]

    def _keep_gradient(self, parameter: str, gradient: Tensor, share: float) -> None:
        """Note what a parameter was updated by."""
        assert self.gradients is not None
        if share != 1.0:
            gradient = self.gradients.get(parameter, 0.0) + share * gradient
        self.gradients[parameter] = gradient


def _inputs_of(program: Program, instructions: Sequence[Instruction]) -> set[str]:
    """The inputs of the batch that a rank reads: in a pipeline few stages read any."""
    sources = [each.operator for each in instructions if isinstance(each, Source)]
    steps = [program.whole.operator(source).attributes["steps"] for source in sources]
    return {name for each in steps for name in inputs_of(each)}
