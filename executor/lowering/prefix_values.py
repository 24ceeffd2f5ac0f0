"""What prefixes read and make: the values of earlier token slices, and the gradients for them.

The prefix of slice k reads the own keys of all slices up to k, each as the prefix of that slice
read them. Its backward pass splits the gradient of all of them. What belongs to an earlier slice
is added up until the prefix of that slice, whose backward pass comes last, takes it:

    forward    k₀ ──▶ prefix 0      k₀ k₁ ──▶ prefix 1      k₀ k₁ k₂ ──▶ prefix 2
    backward   ∂k₀ ◀──── later 0 ◀──────── + ◀────────────────────╯
                        ∂k₁ ◀─────────── later 1 ◀────────────────╯
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.executor.lowering.plan_context import Context
from stratagem.executor.program.instructions import Backward
from stratagem.executor.program.instructions.operands import Operand
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of


class PrefixValues:
    """The values of the prefixes of one stage, in one token slice of many.

    `_given` has what each prefix read of its own slice, by operator and pass; the slices of a
    stage share it.
    """

    def __init__(self, context: Context, first: PrefixValues | None) -> None:
        self._graph = context.graph
        self._number = 0 if context.part is None else context.part.number
        self._last = context.num_slices - 1
        self._given: dict[tuple[int, int], Operand] = {} if first is None else first._given

    def before(
        self, i: int, number: int, own: Sequence[Operand | None], *, again: bool
    ) -> tuple[Operand, ...]:
        """What operator `i` reads of earlier slices in pass `number`: something if it is a prefix.

        What it reads of its `own` is noted for the later ones, if it does not run `again`.
        """
        if role_of(self._graph.operators[i]) is not OperatorRole.PREFIX or own[0] is None:
            return ()
        if not again:
            self._given[i, number] = own[0]
        return tuple(self._given[i, each] for each in self._earlier(number))

    def backward(self, i: int, number: int, made: Backward) -> Backward:
        """The backward pass of operator `i`, with the gradients for and from other slices."""
        if role_of(self._graph.operators[i]) is not OperatorRole.PREFIX:
            return made
        is_last = self._number == self._last
        before = tuple(self._later(i, each) for each in self._earlier(number))
        return replace(
            made,
            gradients=(*made.gradients, () if is_last else (self._later(i, number),)),
            inputs=(*made.inputs, *before),
            added=made.added if is_last else (*made.added, *before),
        )

    def _earlier(self, number: int) -> range:
        """The passes of the slices before that of pass `number`."""
        return range(number - self._number, number)

    def _later(self, i: int, number: int) -> str:
        """The sum of what later slices find as the gradient of a slice's own part."""
        return f"∂{self._graph.operators[i].name} of later slices m{number}"
