"""How many bytes of a rank's tensors are alive at once, found without running anything.

Instructions are played in order over storages: a value is a storage or a view of one, a tape holds
the storages of what its operator's backward pass needs (`saved_for_backward`), and a
storage is alive as long as any of them is. What each instruction makes it says itself
(`Instruction.memory`). What kernels allocate inside, and messages on their way, do not count; of
gradients whose sums are on their way there is one a parameter at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from stratagem.executor.program.instructions.instruction import Instruction
from stratagem.executor.program.programs import Program, RankProgram
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.placement import local_elements


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

    def _play(self, instruction: Instruction) -> None:
        """Make what is not there yet: what is, is added to or changed in place."""
        for value, nbytes, of in instruction.memory(self.program, self._bytes_of):
            if value not in self.held:
                storages = dict.fromkeys(number for each in of for number in self.held[each])
                self._make(value, nbytes, storages)
        for value in instruction.frees:
            self._free(value)

    def _make(self, value: str, nbytes: int | None, others: Iterable[int] = ()) -> None:
        """A value that holds storages of others, and one of its own if that has any bytes."""
        self.held[value] = kept = (*others, *self._new(nbytes))
        for number in kept:
            if self.holders[number] == 0:
                self.alive += self.nbytes[number]
            self.holders[number] += 1

    def _new(self, nbytes: int | None) -> Iterable[int]:
        if nbytes is None:
            return ()
        self.nbytes.append(nbytes)
        return (len(self.nbytes) - 1,)

    def _free(self, value: str) -> None:
        for number in self.held.pop(value):
            self.holders[number] -= 1
            if self.holders[number] == 0:
                self.alive -= self.nbytes[number]

    def _bytes_of(self, value: str) -> int:
        return sum(self.nbytes[number] for number in self.held[value])
