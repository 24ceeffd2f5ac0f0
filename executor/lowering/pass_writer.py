"""One stage's forward and backward passes, microbatch by microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stratagem.executor.lowering.conversion_writer import Writer
from stratagem.executor.lowering.forward_results import value_of
from stratagem.executor.lowering.loss_writer import LossWriter
from stratagem.executor.lowering.operator_pieces import (
    Pieces,
    named,
    piece_sizes,
    pieces_of,
    portion,
)
from stratagem.executor.lowering.parameter_writer import ParameterWriter
from stratagem.executor.lowering.passes.drafts import Step
from stratagem.executor.lowering.plan_context import BoundaryTensor, Context
from stratagem.executor.lowering.prefix_values import PrefixValues
from stratagem.executor.lowering.shared_copies import Copies
from stratagem.executor.lowering.weight_uses import Weights
from stratagem.executor.program.instructions import (
    Backward,
    BackwardPart,
    Forward,
    Join,
)
from stratagem.executor.program.instructions.operands import Cut, Operand, Piece, Portion
from stratagem.executor.program.instructions.treatments import PortionOf
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import REPLICATE, Placements
from stratagem.simulator.operators.kinds.operator_kinds import saved_slots
from stratagem.simulator.operators.operator import Edge, factors
from stratagem.simulator.schedules.actions import Action, ActionKind


class PassWriter:
    """Writes the blocks of one stage as the schedule asks for them.

    `_arrived` has per (producer, output, microbatch) the values whose sum is the gradient, and
    `_waiting` the gradients of weights that are to be made later. `_went` has the edges that were
    converted piece by piece, with their pieces and the factor that is cut, `_came` those of which
    the gradient was. `_copies` has what was converted for the first of several readers, `_summed`
    the sums of gradients that were begun.

    Where tokens are sliced, each slice has a writer with the graph of that slice, and "microbatch"
    is the number of a pass (see `Context`); what they have in common is that of the `first`.
    """

    def __init__(
        self,
        context: Context,
        weights: Weights,
        stage: int,
        device: int,
        steps: list[Step],
        first: PassWriter | None = None,
    ) -> None:
        self.writer = Writer(context, stage, device, steps)
        self.parameters: ParameterWriter = (
            first.parameters if first else ParameterWriter(self.writer, weights)
        )
        self.loss = LossWriter(self.writer)
        self._prefixes: PrefixValues = PrefixValues(context, first._prefixes if first else None)
        self._context = context
        self._operators = context.operators[stage]
        self._triggers = context.triggers(stage)
        self._arrived: dict[tuple[int, int, int], list[str]] = defaultdict(list)
        self._waiting: dict[tuple[int, int], list[Backward]] = {}
        self._pieces = {i: pieces_of(context, i) for i in range(len(context.graph.operators))}
        self._went: dict[tuple[Edge, int], tuple[Pieces, int]] = {}
        self._came: dict[tuple[Edge, int], tuple[Pieces, int]] = {}
        self._copies = Copies(context, self._triggers)
        self._summed: set[str] = set()

    def write(self, action: Action) -> None:
        """Write one block."""
        microbatch = self._context.pass_of(action)
        match action.kind:
            case ActionKind.FORWARD:
                self._forward_block(microbatch)
            case ActionKind.BACKWARD:
                self._backward_block(microbatch, split=False)
            case ActionKind.INPUT_GRADIENT:
                self._backward_block(microbatch, split=True)
            case ActionKind.WEIGHT_GRADIENT:
                self._weight_block(microbatch)

    # -- forward --------------------------------------------------------------------------------

    def _forward_block(self, microbatch: int) -> None:
        self._receive_all(self._context.crossings, microbatch)
        self.parameters.begin_block()
        for i in self._operators:
            self._forward(i, microbatch)
            for crossing in self._context.crossings:
                if crossing.edge.producer == i:
                    self.writer.send(crossing, microbatch, self._made(crossing.edge, microbatch))

    def _receive_all(self, crossings: tuple[BoundaryTensor, ...], microbatch: int) -> None:
        """Receive what a block needs of other stages; note gradients where they belong."""
        for crossing in crossings:
            if crossing.target_stage != self.writer.stage:
                continue
            value = self._receive(crossing, microbatch)
            if value is not None and crossings is self._context.returns:
                edge = crossing.edge
                self._arrived[edge.producer, edge.output, microbatch].append(value)

    def _receive(self, crossing: BoundaryTensor, microbatch: int) -> str | None:
        """Receive a tensor, and bring its parts together where each rank fetched only one."""
        task, value = crossing.task(microbatch), f"{crossing.value} m{microbatch}"
        transfer = crossing.transfer
        lands = transfer.target_placements
        landed = value if lands == crossing.after else f"{value} landed"
        self.writer.receive(
            value, task, TaskKind.COMMUNICATION, microbatch, landed, transfer, crossing.dtype
        )
        return self.writer.convert(
            task,
            TaskKind.COMMUNICATION,
            microbatch,
            source=landed,
            target=value,
            sizes=transfer.sizes,
            dtype=crossing.dtype,
            before=lands,
            after=crossing.after,
        )

    def _forward(self, i: int, microbatch: int) -> None:
        self._run(i, microbatch, again=False)
        if i == self.loss.operator and self.writer.holds(self._context.configs[i]):
            self.loss.add(self._output(i, 0, microbatch), microbatch)

    def _run(self, i: int, microbatch: int, *, again: bool) -> None:
        """Run an operator where it runs at all; in the backward pass, it runs again."""
        self._write_run(i, microbatch, again=again)
        self.parameters.ran(i, again=again)

    def _write_run(self, i: int, microbatch: int, *, again: bool) -> None:
        """Write an operator's run, in pieces if it has some."""
        context, label = self._context, "R" if again else "F"
        operator, pieces = context.graph.operators[i], self._pieces[i]
        weights = self.parameters.bring(i, f"{label}{microbatch}", microbatch, again=again)
        operands = [self._operands(edge, microbatch, again=again) for edge in context.incoming[i]]
        if not self.writer.holds(context.configs[i]):
            return
        outputs = [
            self._output(i, n, microbatch, again=again) for n in range(len(operator.outputs))
        ]
        before = self._prefixes.before(i, microbatch, [o[0] for o in operands], again=again)
        keeps = context.runs_backward[i] and not context.recomputes[i]
        taped = keeps or (again and context.runs_backward[i])
        for number, piece in enumerate(pieces or (None,)):
            what = f"{operator.name} {label}{microbatch}{piece or ''}"
            self.writer.write(
                Forward(
                    operator=operator.name,
                    microbatch=microbatch,
                    inputs=(*_there([each[number] for each in operands]), *before),
                    weights=weights,
                    outputs=tuple(named(value, piece) for value in outputs),
                    dtypes=self._dtypes(i),
                    tape=named(self._tape(i, microbatch), piece) if taped else None,
                    gathered=self.parameters.gathered(i, microbatch) if keeps else (),
                    remade=self._remade(i) if keeps else (),
                    again=again,
                    piece=piece,
                    meetings=self.writer.inner_meetings(i, what),
                )
            )
            if piece is not None and not again:
                for edge in context.outgoing[i]:
                    self._convert_piece(edge, microbatch, piece)
        if pieces is not None and self._is_read_whole(i, microbatch, again=again):
            self._join(outputs[0], pieces, pieces.of_output(operator), microbatch)

    # -- pieces ---------------------------------------------------------------------------------

    def _join(self, value: str, pieces: Pieces, factor: int, microbatch: int) -> None:
        names = tuple(named(value, piece) for piece in pieces)
        self.writer.write(Join(microbatch, names, value, factor))

    def _is_read_whole(self, i: int, microbatch: int, *, again: bool) -> bool:
        """Whether anybody reads the result of an operator in pieces as it is made."""
        outgoing = self._context.outgoing[i]
        return again or any(
            (self._copies.first(edge, microbatch), microbatch) not in self._went
            or self._context.is_made_again(edge)
            or self._context.recomputes[edge.consumer]
            for edge in outgoing
        )

    def _convert_piece(self, edge: Edge, microbatch: int, piece: Piece) -> None:
        """Convert a piece of a result for its readers, if it can go by itself."""
        context = self._context
        if self._copies.first(edge, microbatch) != edge:
            return
        producer, pieces = context.graph.operators[edge.producer], self._pieces[edge.producer]
        assert pieces is not None
        before, after = context.made(edge), context.wanted(edge)
        factor = pieces.of_output(producer)
        if context.stage_of[edge.consumer] == self.writer.stage:
            sizes = piece_sizes(self.writer, edge, factor, pieces.count, before, after)
            if sizes is not None:
                source = named(self._made(edge, microbatch), piece)
                self._send_piece(edge, "→", microbatch, piece, source, sizes, before, after)
                self._went[edge, microbatch] = pieces, factor

    def _send_piece(
        self,
        edge: Edge,
        arrow: str,
        microbatch: int,
        piece: Piece,
        source: str,
        sizes: tuple[int, ...],
        before: Placements,
        after: Placements,
        part: Portion | None = None,
    ) -> str | None:
        """Convert a piece on an edge while the next instructions run."""
        context = self._context
        return self.writer.convert(
            f"{self._task(edge, arrow)}{piece}",
            TaskKind.COMMUNICATION,
            microbatch,
            source=source,
            target=named(f"{context.name(edge, arrow)} m{microbatch}", piece),
            sizes=sizes,
            dtype=context.dtype(edge),
            before=before,
            after=after,
            later=True,
            treatments=() if part is None else (PortionOf(part),),
        )

    def _operands(self, edge: Edge, microbatch: int, *, again: bool) -> Sequence[Operand | None]:
        """What each piece of an edge's consumer reads; one operand where it runs as a whole."""
        context = self._context
        consumer, pieces = context.graph.operators[edge.consumer], self._pieces[edge.consumer]
        if pieces is None:
            return (self._operand(edge, microbatch, again=again),)
        factor = pieces.of_input(consumer.inputs[edge.slot])
        before, after = context.made(edge), context.wanted(edge)
        sizes = None
        if not again and (edge, microbatch) not in self._went:
            sizes = piece_sizes(self.writer, edge, factor, pieces.count, before, after)
        if sizes is None:
            whole = self._operand(edge, microbatch, again=again)
            parts = (portion(factor, piece) for piece in pieces)
            return [None if whole is None else replace(whole, portion=part) for part in parts]
        source = self._made(edge, microbatch)
        values = [
            self._send_piece(
                *(edge, "→", microbatch, piece, source, sizes, before, after),
                portion(factor, piece),
            )
            for piece in pieces
        ]
        return [None if value is None else Operand(value) for value in values]

    # -- what is read ---------------------------------------------------------------------------

    def _remade(self, i: int) -> tuple[int, ...]:
        """The inputs of an operator that backward needs, but that are dropped until then."""
        needed = saved_slots(self._context.graph.operators[i])
        return tuple(
            edge.slot
            for edge in self._context.incoming[i]
            if edge.slot in needed and self._context.is_made_again(edge)
        )

    def _dtypes(self, i: int) -> tuple[str, ...]:
        outputs = self._context.graph.operators[i].outputs
        return tuple(self._context.output_dtype(i, n) for n in range(len(outputs)))

    def _tape(self, i: int, microbatch: int) -> str:
        return f"{self._context.graph.operators[i].name} tape m{microbatch}"

    def _output(self, i: int, output: int, microbatch: int, *, again: bool = False) -> str:
        return value_of(self._context.graph.operators[i].name, output, microbatch, again=again)

    def _made(self, edge: Edge, microbatch: int) -> str:
        return self._output(edge.producer, edge.output, microbatch)

    def _operand(self, edge: Edge, microbatch: int, *, again: bool = False) -> Operand | None:
        """What the consumer of an edge reads on this rank; None when it reads nothing.

        In the backward pass, what was dropped is there `again`, and what was converted is
        converted once more.
        """
        context = self._context
        if context.is_source[edge.producer]:
            return self._slice(edge, microbatch)
        if context.crosses(edge):
            crossing = next(c for c in context.crossings if edge in c.edges)
            held = self.writer.holds(crossing.after)
            return Operand(f"{crossing.value} m{microbatch}") if held else None
        return self._copies.operand(
            edge, microbatch, again, lambda: self._converted(edge, microbatch, again=again)
        )

    def _converted(self, edge: Edge, microbatch: int, *, again: bool) -> Operand | None:
        """What the consumer of an edge reads of another operator of its stage."""
        context, wanted = self._context, self._context.wanted(edge)
        name, suffix = context.name(edge, "→"), " again" if again else ""
        if not again and (edge, microbatch) in self._went:
            if not self.writer.holds(wanted):
                return None
            self._join(f"{name} m{microbatch}", *self._went[edge, microbatch], microbatch)
            return Operand(f"{name} m{microbatch}")
        dropped = again and context.is_dropped(edge)
        value = self.writer.convert(
            self._task(edge, "→") + suffix,
            TaskKind.COMMUNICATION,
            microbatch,
            source=self._output(edge.producer, edge.output, microbatch, again=dropped),
            target=f"{name}{suffix} m{microbatch}",
            sizes=context.sizes(edge),
            dtype=context.dtype(edge),
            before=context.made(edge),
            after=wanted,
        )
        return None if value is None else Operand(value)

    def _task(self, edge: Edge, arrow: str) -> str:
        operators = self._context.graph.operators
        return f"{operators[edge.producer].name} {arrow} {operators[edge.consumer].name}"

    def _slice(self, edge: Edge, microbatch: int) -> Operand | None:
        """The local part of a source, of which every rank has the whole batch."""
        context = self._context
        source = context.graph.operators[edge.producer]
        names = factors(source.outputs[edge.output].layout)
        placements = context.wanted(edge)
        if not self.writer.holds(placements):
            return None
        offset = tuple(context.offset(edge.producer, name, microbatch) for name in names)
        value, sizes = f"{source.name} whole", context.sizes(edge)
        whole = context.whole.operator(source.name).sizes
        if sizes == tuple(whole[name] for name in names) and set(placements) <= {REPLICATE}:
            return Operand(value)
        return Operand(value, Cut(sizes, placements, offset))

    # -- backward -------------------------------------------------------------------------------

    def _backward_block(self, microbatch: int, *, split: bool) -> None:
        """Gradients of a microbatch; those of weights are left for later where it is `split`."""
        context = self._context
        self._receive_all(context.returns, microbatch)
        self.parameters.begin_block()
        for place, i in enumerate(reversed(self._operators)):
            for j in self._triggers.at.get(place, ()):
                self._run(j, microbatch, again=True)
            if not context.runs_backward[i]:
                continue
            apart = (split or context.plan.inputs_first) and context.weighs(i)
            self._backward(i, microbatch, BackwardPart.INPUTS if apart else BackwardPart.ALL)
            self.parameters.ran(i)
            for edge in context.incoming[i]:
                if context.flows_back(edge):
                    self._return(edge, microbatch, later=apart and not split)
            if not split:
                self._weight_gradient(i, microbatch)
                self.parameters.after_backward(i, microbatch)

    def _weight_block(self, microbatch: int) -> None:
        for i in reversed(self._operators):
            if self._context.runs_backward[i]:
                self._weight_gradient(i, microbatch)
                self.parameters.after_backward(i, microbatch)

    def _weight_gradient(self, i: int, microbatch: int) -> None:
        """Make the gradients of weights, if that was left for later."""
        for backward in self._waiting.pop((i, microbatch), ()):
            self.writer.write(backward)

    def _backward(self, i: int, microbatch: int, part: BackwardPart) -> None:
        """Make the gradients of an operator, in pieces if it has some."""
        context, operator = self._context, self._context.graph.operators[i]
        anew = self._anew(i, microbatch)
        if not self.writer.holds(context.configs[i]):
            return
        gradients = tuple(
            tuple(self._arrived.pop((i, n, microbatch), ())) for n in range(len(operator.outputs))
        )
        pieces = self._pieces[i]
        for piece in pieces or (None,):
            made = self._backward_piece(i, microbatch, part, gradients, anew, piece)
            made = self._prefixes.backward(i, microbatch, made)
            self.writer.write(made)
            if part is BackwardPart.INPUTS:
                later = replace(made, part=BackwardPart.WEIGHTS, meetings=())
                self._waiting.setdefault((i, microbatch), []).append(later)
            if piece is not None:
                for edge in context.incoming[i]:
                    self._return_piece(edge, microbatch, piece)
        if pieces is not None:
            self._join_gradients(i, microbatch, pieces)

    def _backward_piece(
        self,
        i: int,
        microbatch: int,
        part: BackwardPart,
        gradients: tuple[tuple[str, ...], ...],
        anew: tuple[Operand, ...],
        piece: Piece | None,
    ) -> Backward:
        """A backward pass, or a piece of it."""
        context, operator = self._context, self._context.graph.operators[i]
        factors_cut = [self._factor(edge) for edge in context.incoming[i]]
        inputs = tuple(
            None
            if not context.flows_back(edge)
            else named(self._gradient(edge, microbatch), piece if factor is not None else None)
            for edge, factor in zip(context.incoming[i], factors_cut, strict=True)
        )
        later = piece is not None and piece.number > 0
        added = [
            value
            for value, factor in zip(inputs, factors_cut, strict=True)
            if value is not None and (value in self._summed or (later and factor is None))
        ]
        self._summed.update(
            value
            for value, edge in zip(inputs, context.incoming[i], strict=True)
            if value is not None and edge in context.sums
        )
        totals = tuple(
            named(f"∂{self._output(i, n, microbatch)} total", piece)
            for n, values in enumerate(gradients)
            if part is not BackwardPart.ALL and (values or i == self.loss.operator)
        )
        pieces = self._pieces[i]
        cut = None if pieces is None else pieces.of_output(operator)
        remade = () if context.recomputes[i] else self._remade(i)
        return Backward(
            operator=operator.name,
            microbatch=microbatch,
            tape=named(self._tape(i, microbatch), piece),
            gradients=gradients,
            seed=context.seed if i == self.loss.operator else 0.0,
            inputs=inputs,
            weights=self.parameters.gradients(i, microbatch),
            dtypes=self.parameters.gradient_dtypes(i),
            anew=tuple(
                replace(operand, portion=portion(factors_cut[remade[n]], piece))
                if n < len(remade)
                else operand
                for n, operand in enumerate(anew)
            ),
            remade=remade,
            meetings=self.writer.inner_meetings(i, f"{operator.name} B{microbatch}{piece or ''}"),
            part=part,
            totals=totals,
            piece=piece,
            portion=portion(cut, piece),
            added=tuple(added),
        )

    def _factor(self, edge: Edge) -> int | None:
        """The factor of what an edge brings that its consumer cuts in pieces."""
        pieces = self._pieces[edge.consumer]
        consumer = self._context.graph.operators[edge.consumer]
        return None if pieces is None else pieces.of_input(consumer.inputs[edge.slot])

    def _return_piece(self, edge: Edge, microbatch: int, piece: Piece) -> None:
        """Bring a piece of a gradient back to its producer, if it can go by itself."""
        context, pieces, factor = self._context, self._pieces[edge.consumer], self._factor(edge)
        assert pieces is not None
        if not context.flows_back(edge) or factor is None:
            return
        before, after = context.gradient_made(edge), context.gradient_wanted(edge)
        sizes = piece_sizes(self.writer, edge, factor, pieces.count, before, after)
        if sizes is not None:
            source = named(self._gradient(edge, microbatch), piece)
            self._send_piece(edge, "←", microbatch, piece, source, sizes, before, after)
            self._came[edge, microbatch] = pieces, factor

    def _join_gradients(self, i: int, microbatch: int, pieces: Pieces) -> None:
        """Put gradients of inputs together that did not go in pieces."""
        for edge in self._context.incoming[i]:
            factor = self._factor(edge)
            if factor is None or not self._context.flows_back(edge):
                continue
            if (edge, microbatch) not in self._came:
                self._join(self._gradient(edge, microbatch), pieces, factor, microbatch)

    def _anew(self, i: int, microbatch: int) -> tuple[Operand, ...]:
        """What the tape of an operator did not keep, brought back: inputs, then weights."""
        if self._context.recomputes[i]:
            return ()
        remade = set(self._remade(i))
        inputs = [
            self._operand(edge, microbatch, again=True)
            for edge in self._context.incoming[i]
            if edge.slot in remade
        ]
        gathered = self.parameters.gathered(i, microbatch)
        weights: tuple[str, ...] = ()
        if gathered:
            weights = self.parameters.bring(i, f"B{microbatch}", microbatch, again=True)
        if not self.writer.holds(self._context.configs[i]):
            return ()
        return (*_there(inputs), *(Operand(weights[slot]) for slot in gathered))

    def _gradient(self, edge: Edge, microbatch: int) -> str:
        """The gradient of an input as its consumer makes it.

        Inputs that read one tensor share it where it goes to the producer as it is, or where
        operators make it alike and the sum is converted.
        """
        context = self._context
        if not context.crosses(edge) and context.gradient_made(edge) == context.gradient_wanted(
            edge
        ):
            consumer = context.graph.operators[edge.consumer].name
            return f"∂{self._made(edge, microbatch)} of {consumer}"
        return f"∂{context.name(context.sums.get(edge, edge), '→')} m{microbatch}"

    def _return(self, edge: Edge, microbatch: int, *, later: bool) -> None:
        """Bring the gradient along an edge to its producer, `later` while weights' are made."""
        context = self._context
        made = self._gradient(edge, microbatch)
        if context.crosses(edge):
            crossing = next(c for c in context.returns if c.edge == edge)
            self.writer.send(crossing, microbatch, made)
            return
        if context.sums.get(edge, edge) != edge:
            return
        if (edge, microbatch) in self._came:
            if not self.writer.holds(context.gradient_wanted(edge)):
                return
            target = f"{context.name(edge, '←')} m{microbatch}"
            self._join(target, *self._came[edge, microbatch], microbatch)
            self._arrived[edge.producer, edge.output, microbatch].append(target)
            return
        value = self.writer.convert(
            self._task(edge, "←"),
            TaskKind.COMMUNICATION,
            microbatch,
            source=made,
            target=f"{context.name(edge, '←')} m{microbatch}",
            sizes=context.sizes(edge),
            dtype=context.dtype(edge),
            before=context.gradient_made(edge),
            after=context.gradient_wanted(edge),
            later=later,
        )
        arrived = self._arrived[edge.producer, edge.output, microbatch]
        if value is not None and value not in arrived:
            arrived.append(value)


def _there(operands: Sequence[Operand | None]) -> tuple[Operand, ...]:
    """The operands of an operator that runs on this rank: all of them."""
    found = tuple(operand for operand in operands if operand is not None)
    assert len(found) == len(operands)
    return found
