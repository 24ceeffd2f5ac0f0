"""Sums over samples that depend on no parameter become sources: values of the whole batch.

A loss divided by the sum of a mask, or targets less their mean, need the sum over all samples, not
that of a microbatch. Where no parameter takes part, every rank can make it of the inputs:

    mask ── reduce ─╮                    count (source: sum of mask, over the whole batch) ─╮
    loss ── reduce ── div      ──▶       loss ── reduce ──────────────────────────────────── div
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.simulator.graph.building.factor_unification import leaves_of, size_of
from stratagem.simulator.graph.building.operator_drafts import (
    DraftParameter,
    DraftTensor,
    Made,
    OperatorDraft,
    fixed_leaves,
    view_key,
)
from stratagem.simulator.operators.kinds.kind_record import Reference, Remade
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import SOURCE_KIND, DimKind
from stratagem.simulator.operators.step_programs import SOURCE_FUNCTIONS, Steps, shift_steps

WHOLE = "sources are computed in full on every rank"
"""Why no dim of a source is split."""


def sums_as_sources(drafts: Sequence[OperatorDraft]) -> None:
    """Turn what mixes samples, and depends on inputs and constants alone, into sources.

    What leads to nothing that depends on a parameter stays: it is trained by nobody.

    Args:
        drafts: live ones in order, before elementwise chains are fused. They are changed in place;
            what nobody reads any more is left among them.
    """
    free: set[int] = set()
    for draft in drafts:
        if _is_free(draft, free):
            free.add(id(draft))
    needed: set[int] = set()
    for draft in reversed(drafts):
        if id(draft) not in free or id(draft) in needed:
            needed.update(id(read.tensor.node) for read in draft.reads)
    for draft in drafts:
        if id(draft) in free & needed and not draft.is_source and _mixes_samples(draft):
            _make_source(draft)


def _is_free(draft: OperatorDraft, free: set[int]) -> bool:
    """Whether a source could make what a draft makes."""
    if kind_of(draft).as_source is None or draft.weights or len(draft.outputs) != 1:
        return False
    if any(function not in SOURCE_FUNCTIONS for function, _ in draft.attributes.get("steps", ())):
        return False
    return all(id(read.tensor.node) in free for read in draft.reads)


def _mixes_samples(draft: OperatorDraft) -> bool:
    """Whether one sample's results depend on others, or fewer than all are kept."""
    made = {id(loop) for loop in draft.outputs[0].loops}
    counted = 0
    for loop in draft.loops:
        if any(leaf.sample for leaf in leaves_of(loop.factors)):
            counted += 1
            if loop.whole or id(loop) not in made:
                return True
    return counted > 1


def _make_source(draft: OperatorDraft) -> None:
    program = _Program()
    program.made_by(draft)
    draft.kind, draft.reads, draft.attributes = SOURCE_KIND, [], {"steps": program.steps}
    (made,) = draft.outputs
    draft.loops = [loop for loop in made.loops if loop is not None]
    for loop in draft.loops:
        loop.kind, loop.whole = DimKind.ATTRIBUTE, WHOLE
    draft.outputs = [Made(made.loops, made.dtype, made.differentiable)]


class _Program:
    """The steps of a source under construction; what is read twice is written once."""

    def __init__(self) -> None:
        self.steps: Steps = []
        self._drafts: dict[int, Reference] = {}
        self._views: dict[str, Reference] = {}

    def add(self, function: str, *arguments: Any) -> Reference:
        """One more step."""
        self.steps.append([function, list(arguments)])
        return ["step", len(self.steps) - 1]

    def made_by(self, draft: OperatorDraft) -> Reference:
        """What a draft makes, as it made it."""
        if id(draft) not in self._drafts:
            self._drafts[id(draft)] = self._written(draft)
        return self._drafts[id(draft)]

    def _written(self, draft: OperatorDraft) -> Reference:
        write = kind_of(draft).as_source
        assert write is not None
        made = draft.outputs[0]
        return write(
            self,
            Remade(
                inputs=[self.read(read.tensor) for read in draft.reads],
                attributes=draft.attributes,
                reduced=[
                    at for at, loop in enumerate(draft.loops) if loop.kind is DimKind.REDUCTION
                ],
                keeps_dims=len(made.loops) == len(draft.loops),
                shape=[1 if loop is None else size_of(loop.factors) for loop in made.loops],
                dtype=""
                if {read.tensor.dtype for read in draft.reads} == {made.dtype}
                else made.dtype,
            ),
        )

    def read(self, tensor: DraftTensor) -> Reference:
        """A tensor as it is seen through its views."""
        assert not isinstance(tensor.node, DraftParameter)
        made = self.made_by(tensor.node)
        if tensor.is_plain:
            return made
        key = repr(view_key(tensor))
        if key not in self._views:
            self._views[key] = self._view(tensor, made)
        return self._views[key]

    def _view(self, tensor: DraftTensor, made: Reference) -> Reference:
        leaves = [leaf for group in tensor.own for leaf in leaves_of(group)]
        seen = self.add("view", made, [leaf.size for leaf in leaves])
        fixed = {id(leaf): index for leaf, index in fixed_leaves(tensor)}
        for at in reversed(range(len(leaves))):
            if id(leaves[at]) in fixed:
                seen = self.add("select", seen, at, fixed[id(leaves[at])])
        left = [id(leaf) for leaf in leaves if id(leaf) not in fixed]
        wanted = [leaf for group in tensor.dims for leaf in leaves_of(group)]
        order = [left.index(id(leaf)) for leaf in wanted if id(leaf) in left]
        seen = self.add("permute", seen, order)
        if len(wanted) > len(order):
            sizes = [leaf.size if id(leaf) in left else 1 for leaf in wanted]
            seen = self.add("view", seen, sizes)
            seen = self.add("expand", seen, [leaf.size for leaf in wanted])
        return self.add("view", seen, list(tensor.shape))

    def run(self, steps: Steps, inputs: Sequence[Reference] = ()) -> Reference:
        """The steps of another program, with `inputs` in the place of its own."""
        moved: dict[tuple[str, Any], Reference] = {
            ("in", number): given for number, given in enumerate(inputs)
        }
        for number, step in enumerate(steps):
            self.steps += shift_steps([step], moved)
            moved["step", number] = ["step", len(self.steps) - 1]
        return ["step", len(self.steps) - 1]
