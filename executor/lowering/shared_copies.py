"""Converted copies of tensors that several operators read, as lowering writes them."""

from __future__ import annotations

from collections.abc import Callable

from stratagem.executor.lowering.plan_context import Context
from stratagem.executor.program.instructions.operands import Operand
from stratagem.simulator.operators.operator import Edge
from stratagem.simulator.stage.recompute_triggers import Triggers


class Copies:
    """What a stage has converted so far: each copy once for all its readers (see
    `shared_conversions`).

    What runs again at one time reads one copy, and so does what only has its inputs converted
    again.
    """

    def __init__(self, context: Context, triggers: Triggers) -> None:
        self._context, self._triggers = context, triggers
        self._made: dict[object, Operand | None] = {}
        self._first: dict[object, Edge] = {}

    def operand(
        self,
        edge: Edge,
        microbatch: int,
        again: bool,
        convert: Callable[[], Operand | None],
    ) -> Operand | None:
        """What the consumer of an edge reads: what is there, or what `convert` writes."""
        key = self._key(edge, microbatch, again)
        if key is None:
            return convert()
        if key not in self._made:
            self._made[key] = convert()
        return self._made[key]

    def first(self, edge: Edge, microbatch: int) -> Edge:
        """The edge for which the forward copy is made that the consumer of an edge reads.

        It is the first that asks.
        """
        key = self._key(edge, microbatch, False)
        return edge if key is None else self._first.setdefault(key, edge)

    def _key(self, edge: Edge, microbatch: int, again: bool) -> object:
        """What readers of one copy have in common; None if it is the consumer's own."""
        context = self._context
        if not context.is_converted(edge) or not context.has_company(edge, again=again):
            return None
        choice = context.plan.choice(context.graph.operators[edge.consumer].name)
        when: object = "forward"
        if again and context.recomputes[edge.consumer]:
            when = self._triggers.of[edge.consumer]
        elif again:
            when = None if choice.recompute else "backward"
        if when is None:
            return None
        return edge.producer, edge.output, context.wanted(edge), microbatch, when
