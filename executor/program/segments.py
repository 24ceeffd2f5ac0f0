"""Segments: operators whose passes share one tape, so that one backward pass is begun for all.

    F norm   F up   F act   F down   …   B down   B act   B up   B norm
    ╰── recorded as one graph ───╯       ╰ all gradients ╯ nothing left to do

Their backward passes follow one another with nothing between them but the freeing of values: what
is communicated amid them begins no later than it would, and what they are given is there before
the first of them. A gradient that one of them makes of what another has made stays inside.
What is derived from a pass, and so may run otherwise, is in none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stratagem.executor.program.instructions import (
    Backward,
    BackwardPart,
    Forward,
    Instruction,
)
from stratagem.executor.program.instructions.operands import Operand

Held = Callable[[Forward, Backward], int]


@dataclass(frozen=True)
class Segment:
    """Operators that share a tape, in the order of their backward passes.

    Attributes:
        forwards: the numbers of their forward instructions.
        backwards: those of their backward instructions.
        inside: the gradients that only they make and read.
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    inside: frozenset[str]


@dataclass
class _Open:
    """A segment to which operators may still be added, and what their gradients hold meanwhile."""

    backwards: list[int] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)
    nbytes: int = 0


def segments(
    instructions: Sequence[Instruction],
    held: Held,
    limit: int,
    refused: Callable[[Backward], bool] = lambda backward: False,
) -> tuple[Segment, ...]:
    """The segments of a rank's instructions; an operator may be one by itself.

    Example:
        >>> found = segments(program.ranks[0].instructions, lambda *passes: 0, 1)  # doctest: +SKIP
        >>> [len(segment.backwards) for segment in found]  # doctest: +SKIP
        [126]

    An operator has none where it runs in pieces, its tape keeps a note of what is brought back, or
    gradients of its inputs are made apart from those of its weights. One with collectives inside
    shares none: these stay where they are among others.

    Args:
        held: bytes of the gradients that the backward pass of a forward pass makes to be added to
            others, all of which are in memory at the end of a segment.
        limit: the most such bytes of a segment of several operators.
        refused: operators that run by themselves for another reason.
    """
    return _Finder(instructions, held, limit, refused).found()


class _Finder:
    """Finds segments; see `segments`."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        held: Held,
        limit: int,
        refused: Callable[[Backward], bool],
    ) -> None:
        self._instructions = instructions
        self._held, self._limit, self._refused = held, limit, refused
        self._forward_of: dict[str, int] = {}
        self._writers: dict[str, set[int]] = defaultdict(set)
        self._readers: dict[str, set[int]] = defaultdict(set)
        for number, each in enumerate(instructions):
            if type(each) is Forward and each.tape is not None:
                self._forward_of[each.tape] = number
            for name in each.reads:
                self._readers[name].add(number)
            for name in each.writes:
                self._writers[name].add(number)

    def found(self) -> tuple[Segment, ...]:
        """All segments, in order."""
        made: list[Segment] = []
        now = _Open()
        for number, each in enumerate(self._instructions):
            if each.only_frees:
                continue
            joins = type(each) is Backward and self._runs_whole(each)
            if not (isinstance(each, Backward) and joins and self._joins(now, each)):
                made += self._closed(now)
                now = _Open()
            if isinstance(each, Backward) and joins:
                now.backwards.append(number)
                now.nbytes += self._held(self._forward(each), each)
        return (*made, *self._closed(now))

    def _closed(self, now: _Open) -> list[Segment]:
        if not now.backwards:
            return []
        forwards = tuple(self._forward_of[self._backward(n).tape] for n in now.backwards)
        return [Segment(forwards, tuple(now.backwards), frozenset(now.inside))]

    def _backward(self, number: int) -> Backward:
        found = self._instructions[number]
        assert isinstance(found, Backward)
        return found

    def _forward(self, backward: Backward) -> Forward:
        found = self._instructions[self._forward_of[backward.tape]]
        assert isinstance(found, Forward)
        return found

    def _runs_whole(self, backward: Backward) -> bool:
        """Whether a backward pass is one, of all that an operator has made."""
        whole = backward.part is BackwardPart.ALL and backward.piece is None
        return whole and not backward.anew and not self._refused(backward)

    def _joins(self, now: _Open, backward: Backward) -> bool:
        """Whether an operator can share the tape of a segment; it then does."""
        if not now.backwards:
            return False
        last = self._backward(now.backwards[-1])
        if last.meetings or backward.meetings or last.microbatch != backward.microbatch:
            return False
        if now.nbytes + self._held(self._forward(backward), backward) > self._limit:
            return False
        outputs = self._forward(backward).outputs
        inside: set[str] = set()
        for output, names in zip(outputs, backward.gradients, strict=True):
            for name in names:
                makers = self._writers[name].intersection(now.backwards)
                if makers and not self._stays_inside(name, makers, output):
                    return False
                inside.update([name] if makers else [])
        now.inside |= inside
        return True

    def _stays_inside(self, name: str, makers: set[int], output: str) -> bool:
        """Whether a gradient is that of a value as those who make it have read it."""
        if self._writers[name] != makers or len(self._readers[name]) != 1:
            return False
        for number in makers:
            backward = self._backward(number)
            if name in backward.weights or name in backward.added:
                return False
            read = self._forward(backward).inputs
            for operand, gradient in zip(read, backward.inputs, strict=True):
                if gradient == name and operand != Operand(output):
                    return False
        return True
