"""The loss of a step: added up over microbatches, and brought to all ranks of its stage."""

from __future__ import annotations

from stratagem.executor.lowering.conversion_writer import Writer
from stratagem.executor.program.programs import LOSS
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import REPLICATE, Placements, output_placements
from stratagem.simulator.sharding.joint_mesh import after_sum, before_sum


class LossWriter:
    """Writes what the ranks of one stage do with the loss, if it is there.

    `operator` is the number of the operator that makes it; a forward pass has none.
    """

    def __init__(self, writer: Writer) -> None:
        context = writer.context
        self.operator = context.graph.index.get(context.graph.loss)
        self._writer = writer
        if self.operator is None:
            return
        output = context.graph.operators[self.operator].outputs[0]
        self._placements = output_placements(output, context.configs[self.operator])
        self._dtype = context.output_dtype(self.operator, 0)

    def add(self, value: str, microbatch: int) -> None:
        """Add what a microbatch has made to the loss of the step."""
        self._convert(value, "loss unreduced", microbatch, self._placements)

    def bring_home(self) -> None:
        """Bring the sum over microbatches to all ranks of the loss's stage."""
        context = self._writer.context
        if self.operator is None or context.stage_of[self.operator] != self._writer.stage:
            return
        replicated = tuple(REPLICATE for _ in self._placements)
        if not context.plan.is_mirrored:
            self._convert("loss unreduced", LOSS, -1, replicated)
            return
        self._convert("loss unreduced", "loss of this home", -1, replicated)
        self._writer.on_both_homes().convert(
            "loss",
            TaskKind.OTHER,
            -1,
            source="loss of this home",
            target=LOSS,
            sizes=(),
            dtype=self._dtype,
            before=before_sum(replicated),
            after=after_sum(replicated),
        )

    def _convert(self, source: str, target: str, microbatch: int, after: Placements) -> None:
        self._writer.convert(
            "loss",
            TaskKind.OTHER,
            microbatch,
            source=source,
            target=target,
            sizes=(),
            dtype=self._dtype,
            before=self._placements,
            after=after,
            adds=True,
        )
