"""One rank's forward and backward passes over the operators of its stage."""

from __future__ import annotations

from collections import defaultdict

from stratagem.executor.context import Context, Crossing
from stratagem.executor.instructions import Backward, Forward, Operand
from stratagem.executor.parameters import ParameterWriter
from stratagem.executor.program import LOSS
from stratagem.executor.weights import Weights
from stratagem.executor.writer import Writer
from stratagem.simulator.graph import DimKind, Edge, factors
from stratagem.simulator.placement import REPLICATE, Placements, output_placements
from stratagem.simulator.schedule import ActionKind
from stratagem.simulator.timeline import TaskKind


class PassWriter:
    """Writes the blocks of one rank in the order of its schedule.

    `_arrived` has per (producer, output, microbatch) the values whose sum is the gradient.
    """

    def __init__(self, context: Context, weights: Weights, device: int) -> None:
        self.writer = Writer(context, device)
        self.parameters = ParameterWriter(self.writer, weights)
        self._context = context
        self._arrived: dict[tuple[int, int, int], list[str]] = defaultdict(list)

    def step(self) -> None:
        """Write a whole step."""
        stage = self.writer.stage
        for action in self._context.actions(stage):
            if action.kind is ActionKind.FORWARD:
                self._forward_block(action.microbatch)
            else:
                self._backward_block(action.microbatch)
        self.parameters.finish()
        if self._context.stage_of[self._loss] == stage:
            self._sum_loss()

    @property
    def _loss(self) -> int:
        return self._context.graph.index[self._context.graph.loss]

    # -- forward --------------------------------------------------------------------------------

    def _forward_block(self, microbatch: int) -> None:
        self._receive_all(self._context.crossings, microbatch)
        for i in self._context.operators[self.writer.stage]:
            self._forward(i, microbatch)
            for crossing in self._context.crossings:
                if crossing.edge.producer == i:
                    self.writer.send(crossing, microbatch, self._made(crossing.edge, microbatch))

    def _receive_all(self, crossings: tuple[Crossing, ...], microbatch: int) -> None:
        """Receive what a block needs of other stages; note gradients where they belong."""
        for crossing in crossings:
            if crossing.target_stage != self.writer.stage:
                continue
            value = self._receive(crossing, microbatch)
            if value is not None and crossings is self._context.returns:
                edge = crossing.edge
                self._arrived[edge.producer, edge.output, microbatch].append(value)

    def _receive(self, crossing: Crossing, microbatch: int) -> str | None:
        """Receive a tensor, and bring its parts together where each rank fetched only one."""
        task, value = crossing.task(microbatch), f"{crossing.value} m{microbatch}"
        transfer = crossing.transfer
        lands = transfer.target_placements
        landed = value if lands == crossing.after else f"{value} landed"
        self.writer.receive(
            task, TaskKind.COMMUNICATION, microbatch, landed, transfer, crossing.dtype
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
        operator = self._context.graph.operators[i]
        weights = self.parameters.bring(i, f"F{microbatch}", microbatch)
        operands = [self._operand(edge, microbatch) for edge in self._context.incoming[i]]
        if not self.writer.holds(self._context.configs[i]):
            return
        found = tuple(operand for operand in operands if operand is not None)
        assert len(found) == len(operands) == len(operator.inputs)
        taped = self._context.runs_backward[i]
        forward = Forward(
            operator=operator.name,
            microbatch=microbatch,
            inputs=found,
            weights=weights,
            outputs=tuple(self._output(i, n, microbatch) for n in range(len(operator.outputs))),
            tape=f"{operator.name} tape m{microbatch}" if taped else None,
            gathered=self.parameters.gathered(i),
            meetings=self.writer.inner_meetings(i, f"{operator.name} F{microbatch}"),
        )
        self.writer.write(forward)
        if i == self._loss:
            self._add_loss(forward.outputs[0], microbatch)

    def _output(self, i: int, output: int, microbatch: int) -> str:
        name = self._context.graph.operators[i].name
        number = f":{output}" if output else ""
        return f"{name}{number} m{microbatch}"

    def _made(self, edge: Edge, microbatch: int) -> str:
        return self._output(edge.producer, edge.output, microbatch)

    def _operand(self, edge: Edge, microbatch: int) -> Operand | None:
        """What the consumer of an edge reads on this rank; None when it reads nothing."""
        context = self._context
        if context.is_source[edge.producer]:
            return self._slice(edge, microbatch)
        if context.crosses(edge):
            crossing = next(c for c in context.crossings if edge in c.edges)
            held = self.writer.holds(crossing.after)
            return Operand(f"{crossing.value} m{microbatch}") if held else None
        name = context.name(edge, "→")
        value = self.writer.convert(
            self._task(edge, "→"),
            TaskKind.COMMUNICATION,
            microbatch,
            source=self._made(edge, microbatch),
            target=f"{name} m{microbatch}",
            sizes=context.sizes(edge),
            dtype=context.dtype(edge),
            before=context.made(edge),
            after=context.wanted(edge),
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
        box = self.writer.box(context.sizes(edge), context.wanted(edge))
        if box is None:
            return None
        cut = tuple(
            _moved(bounds, microbatch * source.sizes[name])
            if source.dim(name).kind is DimKind.SAMPLE
            else bounds
            for name, bounds in zip(names, box, strict=True)
        )
        whole = context.whole.operators[edge.producer].sizes
        is_whole = cut == tuple((0, whole[name]) for name in names)
        return Operand(f"{source.name} whole", None if is_whole else cut)

    # -- loss -----------------------------------------------------------------------------------

    def _add_loss(self, value: str, microbatch: int) -> None:
        placements = self._loss_placements()
        self.writer.convert(
            "loss",
            TaskKind.OTHER,
            microbatch,
            source=value,
            target="loss unreduced",
            sizes=(),
            dtype=self._context.graph.operators[self._loss].outputs[0].dtype,
            before=placements,
            after=placements,
            adds=True,
        )

    def _sum_loss(self) -> None:
        """Bring the sum over microbatches to all ranks of the loss's stage."""
        placements = self._loss_placements()
        self.writer.convert(
            "loss",
            TaskKind.OTHER,
            -1,
            source="loss unreduced",
            target=LOSS,
            sizes=(),
            dtype=self._context.graph.operators[self._loss].outputs[0].dtype,
            before=placements,
            after=tuple(REPLICATE for _ in placements),
            adds=True,
        )

    def _loss_placements(self) -> Placements:
        output = self._context.graph.operators[self._loss].outputs[0]
        return output_placements(output, self._context.configs[self._loss])

    # -- backward -------------------------------------------------------------------------------

    def _backward_block(self, microbatch: int) -> None:
        self._receive_all(self._context.returns, microbatch)
        for i in reversed(self._context.operators[self.writer.stage]):
            if self._context.runs_backward[i]:
                self._backward(i, microbatch)
                for edge in self._context.incoming[i]:
                    if self._context.flows_back(edge):
                        self._return(edge, microbatch)
                self.parameters.after_backward(i, microbatch)

    def _backward(self, i: int, microbatch: int) -> None:
        operator = self._context.graph.operators[i]
        gathered = self.parameters.bring(i, f"B{microbatch}", microbatch)
        if not self.writer.holds(self._context.configs[i]):
            return
        which = self.parameters.gathered(i)
        self.writer.write(
            Backward(
                operator=operator.name,
                microbatch=microbatch,
                tape=f"{operator.name} tape m{microbatch}",
                gradients=tuple(
                    tuple(self._arrived.pop((i, n, microbatch), ()))
                    for n in range(len(operator.outputs))
                ),
                seed=i == self._loss,
                inputs=tuple(
                    self._gradient(edge, microbatch) if self._context.flows_back(edge) else None
                    for edge in self._context.incoming[i]
                ),
                weights=self.parameters.gradients(i, microbatch),
                gathered=tuple(gathered[slot] for slot in which),
                meetings=self.writer.inner_meetings(i, f"{operator.name} B{microbatch}"),
            )
        )

    def _gradient(self, edge: Edge, microbatch: int) -> str:
        """The gradient of an input as its consumer makes it.

        Inputs that read one tensor share it where it goes to the producer as it is.
        """
        context = self._context
        if not context.crosses(edge) and context.gradient_made(edge) == context.gradient_wanted(
            edge
        ):
            consumer = context.graph.operators[edge.consumer].name
            return f"∂{self._made(edge, microbatch)} of {consumer}"
        return f"∂{self._context.name(edge, '→')} m{microbatch}"

    def _return(self, edge: Edge, microbatch: int) -> None:
        """Bring the gradient along an edge to its producer."""
        context = self._context
        made = self._gradient(edge, microbatch)
        if context.crosses(edge):
            crossing = next(c for c in context.returns if c.edge == edge)
            self.writer.send(crossing, microbatch, made)
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
        )
        arrived = self._arrived[edge.producer, edge.output, microbatch]
        if value is not None and value not in arrived:
            arrived.append(value)


def _moved(bounds: tuple[int, int], by: int) -> tuple[int, int]:
    return bounds[0] + by, bounds[1] + by
