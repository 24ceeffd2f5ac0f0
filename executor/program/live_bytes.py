"""How many bytes of a rank's tensors are alive at once, found without running anything.

Instructions are played in order over storages: a value is a storage or a view of one, a tape holds
the storages of what its operator's backward pass needs (`saved_for_backward`), and a
storage is alive as long as any of them is. What kernels allocate inside, and messages on their
way, do not count; of gradients whose sums are on their way there is one a parameter at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stratagem.executor.program.instructions import (
    Backward,
    BackwardPart,
    Bundle,
    Convert,
    Direct,
    Forward,
    Free,
    Instruction,
    Join,
    Receive,
    Source,
    Stash,
)
from stratagem.executor.program.programs import Program, RankProgram
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.placement import (
    Pin,
    Placements,
    input_placements,
    local_elements,
    local_sizes,
    output_placements,
)
from stratagem.simulator.hardware.collective_times import Collective
from stratagem.simulator.kernel_times.memory_traffic import rounded_bytes
from stratagem.simulator.kernel_times.recurrent_workspace import kept_on_cpu
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import (
    role_of,
    saved_inside,
    saved_slots,
    saves_output,
)
from stratagem.simulator.operators.operator import Operator, factor_sizes, factors


def peak_bytes(program: Program) -> tuple[int, ...]:
    """The most bytes alive at once on every rank, optimizer state included.

    Shards are taken as large as the largest of their axis.

    Example:
        >>> max(peak_bytes(lower(plan, graph)))  # doctest: +SKIP
        73400320
    """
    found: dict[int, int] = {}
    for rank in program.ranks:
        if id(rank.instructions) not in found:
            found[id(rank.instructions)] = _Player(program, rank).peak()
    return tuple(found[id(rank.instructions)] for rank in program.ranks)


@dataclass(eq=False)
class _Player:
    """One rank's storages: bytes by number, how many hold each, and which each value holds."""

    program: Program
    rank: RankProgram
    alive: int = 0
    nbytes: list[int] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def peak(self) -> int:
        """Play the step."""
        for stored in self.rank.stored:
            shape = self.program.mesh(stored.stage).shape
            elements = local_elements(stored.sizes, stored.placements, shape)
            self._make(stored.value, elements * DTYPE_BYTES[stored.dtype])
        self.alive += self._optimizer_bytes()
        most = self.alive
        for instruction in self.rank.instructions:
            self._play(instruction)
            most = max(most, self.alive)
        return most

    def _optimizer_bytes(self) -> int:
        mine = {stored.value for stored in self.rank.stored}
        total = 0
        for home in self.program.homes:
            stored = home.stored
            if home.trained and home.stage in self.rank.stages and stored.value in mine:
                shape = self.program.mesh(stored.stage).shape
                training = self.program.plan.training.for_parameter(stored.parameter)
                elements = local_elements(stored.sizes, stored.placements, shape)
                whole = self.program.graph.parameter_index[stored.parameter].shape
                total += training.state_bytes(elements, whole)
        return total

    # -- storages -------------------------------------------------------------------------------

    def _make(self, value: str, nbytes: int) -> int:
        """A value in memory of its own."""
        self.nbytes.append(nbytes)
        number = len(self.nbytes) - 1
        self._hold(value, (number,))
        return number

    def _hold(self, value: str, storages: Iterable[int]) -> None:
        """A value that holds storages, which come alive if nobody held them."""
        self.held[value] = kept = tuple(storages)
        for number in kept:
            if self.holders[number] == 0:
                self.alive += self.nbytes[number]
            self.holders[number] += 1

    def _free(self, value: str) -> None:
        for number in self.held.pop(value):
            self.holders[number] -= 1
            if self.holders[number] == 0:
                self.alive -= self.nbytes[number]

    def _add(self, value: str, nbytes: int) -> None:
        """A value to which something is added: it is there already, or is made."""
        if value not in self.held:
            self._make(value, nbytes)

    # -- instructions ---------------------------------------------------------------------------

    def _play(self, instruction: Instruction) -> None:
        match instruction:
            case Source():
                operator = self.program.whole.operator(instruction.operator)
                sizes = factor_sizes(operator.outputs[0].layout, operator.sizes)
                self._make(instruction.value, math.prod(sizes) * DTYPE_BYTES[instruction.dtype])
            case Forward():
                self._forward(instruction)
            case Backward():
                self._backward(instruction)
            case Convert():
                self._convert(instruction)
            case Bundle():
                for part in instruction.parts:
                    self._convert(part)
            case Receive():
                transfer = instruction.transfer
                shape = transfer.target_mesh.shape
                elements = local_elements(transfer.sizes, transfer.target_placements, shape)
                self._add(instruction.value, elements * DTYPE_BYTES[instruction.dtype])
            case Join():
                self._make(instruction.value, sum(self._bytes_of(v) for v in instruction.pieces))
            case Direct():
                self._make(instruction.value, self._direction_bytes(instruction))
            case Stash():
                for value, copy in instruction.copies:
                    self._make(copy, self._bytes_of(value))
            case Free():
                for value in instruction.values:
                    self._free(value)
            case _:
                pass

    def _direction_bytes(self, instruction: Direct) -> int:
        """A direction is in the precision in which its parameter is trained."""
        training = self.program.plan.training
        whole = self._bytes_of(instruction.updated.value)
        return (
            whole // training.parameter_bytes * (training.master_bytes or training.parameter_bytes)
        )

    def _bytes_of(self, value: str) -> int:
        return sum(self.nbytes[number] for number in self.held[value])

    def _forward(self, instruction: Forward) -> None:
        operator = self.program.operator(instruction.operator, instruction.microbatch)
        inside = 0
        for output, (value, dtype) in enumerate(
            zip(instruction.outputs, instruction.dtypes, strict=True)
        ):
            nbytes = self._output_elements(operator, output) * DTYPE_BYTES[dtype]
            nbytes //= 1 if instruction.piece is None else instruction.piece.count
            self._make(value, nbytes)
            tensors, masks = saved_inside(operator)
            inside += nbytes * tensors + nbytes // DTYPE_BYTES[dtype] * masks
        workspace = self._workspace(instruction, operator)
        inside = inside if workspace is None else workspace
        inside += self._rounded(instruction, operator)
        if instruction.tape is None:
            return
        # A cross entropy keeps its logits, which the simulator counts as its own.
        own = {0} if role_of(operator) is OperatorRole.LOSS else set()
        kept = [
            instruction.inputs[slot].value
            for slot in saved_slots(operator) | own
            if slot not in instruction.remade
        ]
        slots = range(len(instruction.weights))
        kept += [instruction.weights[n] for n in slots if n not in instruction.gathered]
        kept += instruction.outputs if saves_output(operator) else ()
        storages = dict.fromkeys(number for value in kept for number in self.held[value])
        self.nbytes.append(inside)
        self._hold(instruction.tape, (*storages, len(self.nbytes) - 1))

    def _rounded(self, instruction: Forward, operator: Operator) -> int:
        """The operands of products that are kept as they were rounded."""
        config, shape = self._config(operator)
        sizes = local_sizes(operator, config, shape)
        nbytes = rounded_bytes(operator, sizes, self.program.plan.training)
        return nbytes // (1 if instruction.piece is None else instruction.piece.count)

    def _workspace(self, instruction: Forward, operator: Operator) -> int | None:
        """What kernels of CPUs keep in place of what a trace shows."""
        plan, mesh = (
            self.program.plan,
            self.program.mesh(self.program.plan.stage_of[operator.name]),
        )
        if not all(device.is_cpu for device in mesh.device_types(plan.cluster)):
            return None
        config, shape = self._config(operator)
        nbytes = kept_on_cpu(operator, local_sizes(operator, config, shape), plan.training)
        parts = 1 if instruction.piece is None else instruction.piece.count
        return None if nbytes is None else nbytes // parts

    def _output_elements(self, operator: Operator, output: int) -> int:
        made = operator.outputs[output]
        config, shape = self._config(operator)
        sizes = factor_sizes(made.layout, operator.sizes)
        return local_elements(sizes, output_placements(made, config), shape)

    def _config(self, operator: Operator) -> tuple[Placements, tuple[int, ...]]:
        plan = self.program.plan
        mesh = self.program.mesh(plan.stage_of[operator.name])
        return plan.choice(operator.name).config, tuple(mesh.shape)

    def _backward(self, instruction: Backward) -> None:
        operator = self.program.operator(instruction.operator, instruction.microbatch)
        config, shape = self._config(operator)
        if instruction.part is not BackwardPart.WEIGHTS:
            for slot, value in enumerate(instruction.inputs):
                if value is not None and value not in self.held:
                    if slot >= len(operator.inputs):
                        self._make(value, self._earlier_bytes(instruction, operator, slot - 1))
                        continue
                    names = factors(operator.inputs[slot].layout)
                    piece = instruction.piece
                    parts = piece.count if piece is not None and piece.dim in names else 1
                    self._make(value, self._input_bytes(instruction, operator, slot) // parts)
        if instruction.part is BackwardPart.INPUTS:
            for output, value in zip(_reached(instruction), instruction.totals, strict=True):
                itemsize = self.program.plan.training.parameter_bytes
                self._make(value, self._output_elements(operator, output) * itemsize)
            return
        sizes = local_sizes(operator, config, shape)
        trained = [
            (weight, value)
            for weight, value in zip(operator.weights, instruction.weights, strict=True)
            if value is not None
        ]
        for (weight, value), dtype in zip(trained, instruction.dtypes, strict=True):
            elements = math.prod(sizes[name] for group in weight.layout for name in group)
            self._add(value, elements * DTYPE_BYTES[dtype])

    def _earlier_bytes(self, instruction: Backward, operator: Operator, number: int) -> int:
        """Bytes of the gradient of what a prefix reads of an earlier slice."""
        own = self.program.slice_of(instruction.microbatch)
        assert own is not None
        part = self.program.slices[number]
        elements = self._output_elements(operator, 0) // own.stop * (part.stop - part.start)
        return elements * self.program.plan.training.bytes_of(operator.outputs[0].dtype)

    def _input_bytes(self, instruction: Backward, operator: Operator, slot: int) -> int:
        """Bytes of the gradient of an input, in the factors of the whole source."""
        read = operator.inputs[slot]
        config, shape = self._config(operator)
        source = self.program.operator(read.source, instruction.microbatch)
        made = source.outputs[read.output]
        sizes = factor_sizes(made.layout, source.sizes)
        itemsize = self.program.plan.training.bytes_of(made.dtype)
        return local_elements(sizes, input_placements(read, config), shape) * itemsize

    def _convert(self, convert: Convert) -> None:
        if convert.target is None:
            return
        if convert.source is not None and _is_view(convert) and not convert.adds:
            self._hold(convert.target, self.held[convert.source])
            return
        shape = self.program.mesh(convert.stage).shape
        elements = local_elements(convert.sizes, convert.after, shape)
        self._add(convert.target, elements * DTYPE_BYTES[convert.dtype])


def _is_view(convert: Convert) -> bool:
    """Whether a conversion gives a part of what it is given, in the same memory."""
    return all(
        step.collective is Collective.SLICE or isinstance(step.target, Pin)
        for step in convert.steps
    )


def _reached(instruction: Backward) -> Sequence[int]:
    """The outputs whose gradients reach a backward pass."""
    return [n for n, names in enumerate(instruction.gradients) if names or instruction.seed]
