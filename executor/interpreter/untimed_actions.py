"""The actions of a step whose instructions are not timed, made of those that are one by one.

Segments have one tape and one backward pass, and parameters that are updated one behind the other
are so at once. What has nothing left to do is left out, so that the host goes on to the next.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch import Tensor

from stratagem.executor.actions import segment_actions
from stratagem.executor.actions.named_values import NamedValues
from stratagem.executor.actions.operator_parts import OperatorParts
from stratagem.executor.actions.parameter_actions import update_all
from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.actions.registry import Action
from stratagem.executor.actions.segment_actions import (
    Links,
    Live,
    SegmentMember,
    WideLeaves,
    parts_of,
)
from stratagem.executor.program.instructions import (
    Backward,
    Convert,
    Forward,
    Free,
    Instruction,
    Update,
)
from stratagem.executor.program.segments import Segment, segments
from stratagem.executor.state.gradient_lists import HANDFUL_BYTES
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype

Places = dict[int, Action]
"""Actions by the number of their instruction; where there is none, nothing is left to do."""


def untimed(actions: Sequence[Action], rank: RankState, stops: Set[int]) -> Places:
    """The actions of a rank's instructions where none is timed.

    Args:
        actions: those of each instruction by itself.
        rank: whose they are.
        stops: instructions in front of which something else is to be done.
    """
    made = dict(enumerate(actions))
    _join_updates(made, rank)
    _Segments(made, rank.parts, rank.mine.instructions, rank.memory).join(stops)
    return made


def _join_updates(made: Places, rank: RankState) -> None:
    """Put updates of several operators in the place of the first of them.

    What stands between updates lets go of gradients, or brings new values to their users.
    """
    run: dict[int, Update] = {}
    for number, each in enumerate([*rank.mine.instructions, None]):
        if type(each) is Update:
            run[number] = each
        elif run and not (each is not None and (each.only_frees or _publishes(each))):
            first, *others = run
            made[first] = update_all(list(run.values()), rank)
            for n in others:
                del made[n]
            run = {}


def _publishes(instruction: Instruction) -> bool:
    """Whether it brings the new value of a parameter to its users in this stage."""
    return (
        isinstance(instruction, Convert)
        and instruction.kind is TaskKind.GRADIENT_SYNC
        and not instruction.adds
    )


class _Segments:
    """Puts segments in the place of their instructions.

    `_hidden` are values that are not there in these steps, `_live` has what operators of segments
    make for one another.
    """

    def __init__(
        self,
        made: Places,
        parts: OperatorParts,
        instructions: Sequence[Instruction],
        memory: NamedValues,
    ) -> None:
        self._made, self._parts, self._memory = made, parts, memory
        self._instructions = instructions
        self._live: Live = {}
        self._written = Counter(name for each in instructions for name in each.writes)
        self._hidden: set[str] = set()
        self._outputs: set[str] = set()
        self._recorded: set[int] = set()
        self._parted: set[str] = set()

    def join(self, stops: Set[int]) -> None:
        """Join what can be joined; something else is to be done in front of `stops`."""
        found = segments(self._instructions, self._held_bytes, HANDFUL_BYTES, self._is_refused)
        inside = frozenset(name for segment in found for name in segment.inside)
        shown = self._shown(found, inside)
        for segment in found:
            self._join(segment, inside, shown)
        for number, each in enumerate(self._instructions):
            if type(each) is Free:
                self._free(number, each)
        self._record_together(stops)

    def _is_refused(self, backward: Backward) -> bool:
        return role_of(self._operator(backward)) is OperatorRole.PREFIX

    def _operator(self, instruction: Forward | Backward) -> Operator:
        return self._parts.program.operator(instruction.operator, instruction.microbatch)

    def _held_bytes(self, forward: Forward, backward: Backward) -> int:
        """Bytes of the gradients of weights that are added to others, or cast."""
        operator = self._operator(backward)
        sizes = self._parts.shards_of(operator, backward.microbatch).sizes
        dtypes, total = iter(backward.dtypes), 0
        for weight, value, name in zip(
            operator.weights, forward.weights, backward.weights, strict=True
        ):
            if name is None:
                continue
            dtype = torch_dtype(next(dtypes))
            there = self._memory.values.get(value)
            if self._written[name] > 1 or there is None or there.dtype != dtype:
                total += math.prod(shape_of(weight.layout, sizes)) * dtype.itemsize
        return total

    def _shown(self, found: Sequence[Segment], inside: Set[str]) -> frozenset[str]:
        """The values that are read otherwise than within a segment."""
        kept = {n: backward for each in found for n, backward in self._pairs(each)}
        shown: set[str] = set()
        for number, each in enumerate(self._instructions):
            if number not in kept or not isinstance(each, Forward):
                shown.update(each.reads)
                continue
            for operand, gradient in zip(each.inputs, kept[number].inputs, strict=True):
                if gradient not in inside:
                    shown.add(operand.value)
        return frozenset(shown)

    def _pairs(self, segment: Segment) -> Iterator[tuple[int, Backward]]:
        for number, back in zip(segment.forwards, segment.backwards, strict=True):
            backward = self._instructions[back]
            assert isinstance(backward, Backward)
            yield number, backward

    def _join(self, segment: Segment, inside: frozenset[str], shown: frozenset[str]) -> None:
        """Put a segment in the place of its passes."""
        leaves: list[Tensor | None] = []
        wide = WideLeaves(self._memory.values)
        members = {n: self._member(n, back, leaves, wide) for n, back in self._pairs(segment)}
        makers = {name: each for each in members.values() for name in each.forward.outputs}
        changed = frozenset(name for name in self._written if name not in makers)
        apart = _apart(members.values(), inside)
        self._parted.update(apart)
        links = Links(inside, shown, apart, changed)
        for number, member in members.items():
            self._made[number] = segment_actions.forward(
                member, links, makers, self._memory, self._live
            )
            self._hidden.add(member.backward.tape)
        first, *others = segment.backwards
        self._made[first] = segment_actions.backward(list(members.values()), links, self._memory)
        for number in others:
            del self._made[number]
        self._recorded.update(members)
        self._outputs.update(makers)
        self._hidden |= {*segment.inside, *(set(makers) - shown)}

    def _member(
        self, number: int, backward: Backward, leaves: list[Tensor | None], wide: WideLeaves
    ) -> SegmentMember:
        forward = self._instructions[number]
        assert isinstance(forward, Forward)
        operator, there = self._operator(forward), self._memory.values
        return SegmentMember(
            forward=forward,
            backward=backward,
            operator=operator,
            shards=self._parts.shards_of(operator, forward.microbatch),
            seat=self._parts.seat_of(operator.name),
            flows=self._parts.flows[operator.name],
            dtypes=[there[name].dtype if name in there else None for name in forward.weights],
            leaves=leaves,
            wide=wide,
        )

    def _free(self, number: int, free: Free) -> None:
        """Let go of what is there, attached to a graph or not."""
        live, memory = self._live, self._memory
        there = tuple(name for name in free.values if name not in self._hidden)
        attached = [name for name in free.values if name in self._outputs]
        attached += [parts_of(name) for name in attached if name in self._parted]

        def act() -> None:
            for name in attached:
                live.pop(name, None)
            if there:
                memory.free(there)

        if attached:
            self._made[number] = act
        elif there:
            self._made[number] = lambda: memory.free(there)
        else:
            del self._made[number]

    def _record_together(self, stops: Set[int]) -> None:
        """Let forward passes that follow one another, and what they free, be one action."""
        runs: list[list[int]] = [[]]
        for number, each in enumerate(self._instructions):
            if number not in self._made:
                continue
            recorded, freed = number in self._recorded, type(each) is Free
            if number in stops or not (recorded or freed):
                runs.append([])
            if recorded or (freed and runs[-1]):
                runs[-1].append(number)
        for run in filter(None, runs):
            self._put_together(run)

    def _put_together(self, run: Sequence[int]) -> None:
        actions: list[Action] = []
        entered = -1
        for number in run:
            each = self._instructions[number]
            if isinstance(each, Forward) and each.microbatch != entered:
                entered = each.microbatch
                actions.append(self._parts.entering(entered))
            actions.append(self._made.pop(number))

        def act() -> None:
            with torch.enable_grad():
                for action in actions:
                    action()

        self._made[run[0]] = act


def _apart(members: Iterable[SegmentMember], inside: Set[str]) -> dict[str, int]:
    """Values of which several that read them within a segment select an index of one dim."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for member in members:
        for operand, gradient, read in zip(
            member.forward.inputs, member.backward.inputs, member.operator.inputs, strict=True
        ):
            if gradient in inside and len(read.select) == 1:
                found[operand.value][read.select[0][0]] += 1
    most = {name: dims.most_common(1)[0] for name, dims in found.items()}
    return {name: dim for name, (dim, times) in most.items() if times > 1}
