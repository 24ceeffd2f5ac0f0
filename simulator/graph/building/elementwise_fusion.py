"""Elementwise chains: pointwise operators whose result is read once become one operator.

mul ─┐
pow ─ mul ─ add ─ mul ─ tanh ─ add ─ mul      (a GELU: one operator of 8 steps)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from stratagem.simulator.graph.building.factor_unification import leaves_of
from stratagem.simulator.graph.building.operator_drafts import (
    Loop,
    OperatorDraft,
    Read,
    view_key,
)
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.step_programs import shift_steps

Reference = tuple[str, Any]


def fuse_elementwise(drafts: Sequence[OperatorDraft]) -> list[OperatorDraft]:
    """The drafts with every elementwise one that is read once, whole and unbroadcast, merged.

    Two operators are merged when the second is elementwise too and its output has the same shape.
    """
    readers: defaultdict[int, list[tuple[OperatorDraft, Read]]] = defaultdict(list)
    for draft in drafts:
        for read in draft.reads:
            readers[id(read.tensor.node)].append((draft, read))
    kept: list[OperatorDraft] = []
    for draft in drafts:
        used = readers[id(draft)]
        if not _can_merge(draft, used):
            kept.append(draft)
            continue
        after = used[0][0]
        _merge(draft, after)
        for node in {id(read.tensor.node) for read in after.reads}:
            others = [pair for pair in readers[node] if pair[0] not in (draft, after)]
            mine = [(after, read) for read in after.reads if id(read.tensor.node) == node]
            readers[node] = others + mine
    return kept


def _can_merge(draft: OperatorDraft, used: Sequence[tuple[OperatorDraft, Read]]) -> bool:
    if (
        role_of(draft) is not OperatorRole.CHAIN
        or not used
        or len({id(by) for by, _ in used}) != 1
    ):
        return False
    after = used[0][0]
    made = draft.outputs[0]
    if role_of(after) is not OperatorRole.CHAIN or made.differentiable != made.dtype.startswith(
        ("float", "bfloat")
    ):
        return False
    target = after.outputs[0].loops
    same = all(
        read.tensor.is_plain
        and len(read.loops) == len(target)
        and all(a is b for a, b in zip(read.loops, target, strict=True))
        for _, read in used
    )
    return same and not _reads_in_two_ways(draft, after)


def _reads_in_two_ways(before: OperatorDraft, after: OperatorDraft) -> bool:
    """Whether both read a trained parameter, each in another view: no operator reads one twice."""
    places = {
        id(mine): id(theirs)
        for mine, theirs in zip(before.outputs[0].loops, after.outputs[0].loops, strict=True)
    }
    ways: dict[int, set[str]] = {}
    for draft in (before, after):
        for read in draft.weights:
            if read.tensor.is_trained_parameter:
                loops = [places.get(id(loop), id(loop)) for loop in read.loops]
                way = repr((view_key(read.tensor), loops))
                ways.setdefault(id(read.tensor.node), set()).add(way)
    return any(len(each) > 1 for each in ways.values())


def _merge(before: OperatorDraft, after: OperatorDraft) -> None:
    """Put `before`, whose only reader is `after`, in front of it."""
    same = {
        id(mine): theirs
        for mine, theirs in zip(before.outputs[0].loops, after.outputs[0].loops, strict=True)
        if mine is not None and theirs is not None
    }
    reads, weights = _Slots("in"), _Slots("weight")
    first = _adopt(before, reads, weights, same)
    count = len(before.attributes["steps"])
    own: dict[int, Loop] = {id(loop): loop for loop in after.loops}
    second = _adopt(after, reads, weights, own, skip=before)
    for index, read in enumerate(after.reads):
        if read.tensor.node is before:
            second["in", index] = ["step", count - 1]
    for index in range(len(after.attributes["steps"])):
        second["step", index] = ["step", index + count]
    steps = shift_steps(before.attributes["steps"], first)
    after.attributes["steps"] = steps + shift_steps(after.attributes["steps"], second)
    after.reads, after.weights = reads.kept, weights.kept


class _Slots:
    """Distinct reads of a merged operator; equal ones share a slot."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.kept: list[Read] = []
        self._slot: dict[str, int] = {}

    def add(self, read: Read) -> list[Any]:
        loops = [[id(leaf) for leaf in leaves_of(loop.factors)] for loop in read.loops if loop]
        key = repr((view_key(read.tensor), loops))
        if key not in self._slot:
            self._slot[key] = len(self.kept)
            self.kept.append(read)
        return [self.kind, self._slot[key]]


def _adopt(
    draft: OperatorDraft,
    reads: _Slots,
    weights: _Slots,
    loops: dict[int, Loop],
    skip: OperatorDraft | None = None,
) -> dict[Reference, list[Any]]:
    """Add what `draft` reads to the slots, in terms of `loops`; how its references change."""
    renamed: dict[Reference, list[Any]] = {}
    for slots, given in ((reads, draft.reads), (weights, draft.weights)):
        for index, read in enumerate(given):
            if read.tensor.node is not skip:
                mapped = tuple(None if x is None else loops[id(x)] for x in read.loops)
                renamed[slots.kind, index] = slots.add(Read(read.tensor, mapped))
    return renamed
