"""Writing instructions of one stage: conversions and transfers, as far as its ranks take part."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.executor.lowering.passes.drafts import Step
from stratagem.executor.lowering.plan_context import BoundaryTensor, Context
from stratagem.executor.program.instructions import Convert, Receive, Send
from stratagem.executor.program.instructions.numbered_meshes import joint_number
from stratagem.executor.program.instructions.operands import Meeting
from stratagem.executor.program.instructions.treatments import Treatment, carried_dtype
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import Config, Pin, Placements, Shard
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Layout
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.sharding.resharding_paths import ReshardingStep


class Writer:
    """The instructions so far, and the seat from which `device` sees a stage.

    What is written holds for every rank that has the same coordinate on axes with pins.
    """

    def __init__(self, context: Context, stage: int, device: int, steps: list[Step]) -> None:
        self.context = context
        self.stage = stage
        self._device = device
        self.mesh = context.mesh(stage)
        self.coordinates = self.mesh.coordinates(device)
        self._steps = steps
        self._summed: dict[str, str | None] = {}

    def write(self, step: Step) -> None:
        """Append an instruction, or a mark for a pass."""
        self._steps.append(step)

    def on_both_homes(self) -> Writer:
        """The same on the joint mesh of both homes of the stage."""
        number = joint_number(self.context.plan, self.stage)
        return Writer(self.context, number, self._device, self._steps)

    def holds(self, placements: Placements | Config) -> bool:
        """Whether nothing is pinned elsewhere."""
        return all(
            not isinstance(placement, Pin) or placement.index == index
            for placement, index in zip(placements, self.coordinates, strict=True)
        )

    def steps(
        self, sizes: tuple[int, ...], dtype: str, before: Placements, after: Placements
    ) -> tuple[ReshardingStep, ...]:
        """The steps of a conversion, but for axes of one device."""
        path = self.context.path(self.stage, sizes, dtype, before, after)
        return tuple(step for step in path if self.mesh.shape[step.axis] > 1)

    def convert(
        self,
        task: str,
        kind: TaskKind,
        microbatch: int,
        *,
        source: str,
        target: str,
        sizes: tuple[int, ...],
        dtype: str,
        before: Placements,
        after: Placements,
        treatments: tuple[Treatment, ...] = (),
        adds: bool = False,
        later: bool = False,
        alias: bool = True,
        into: list[Convert] | None = None,
    ) -> str | None:
        """Bring `source` from one placement to another on this rank's mesh.

        The instruction is appended, or goes `into` another list. With `alias` no target is made
        where there is nothing to do. What is only done to what links carry is left out where none
        do.

        Returns:
            The value that has the result, `source` itself when there is nothing to do, None when
            this rank holds nothing of it.
        """
        does_nothing = not adds and not any(each.acts_alone for each in treatments)
        if before == after and does_nothing:
            return source if self.holds(before) else None
        steps = self.steps(sizes, carried_dtype(dtype, treatments), before, after)
        if not steps:  # No link carries it.
            treatments = tuple(each for each in treatments if each.carried(dtype) == dtype)
        if alias and not steps and does_nothing:
            return source if self.holds(before) else None
        given = source if self.holds(before) else None
        got = target if self.holds(after) else None
        meetings = self._meetings(f"{task} m{microbatch} of {target}", before, steps)
        if given is not None or got is not None or meetings:
            made = Convert(
                stage=self.stage,
                task=task,
                kind=kind,
                microbatch=microbatch,
                source=given,
                target=got,
                sizes=sizes,
                dtype=dtype,
                before=before,
                steps=steps,
                treatments=treatments,
                adds=adds,
                later=later,
                meetings=meetings,
            )
            if into is None:
                self._steps.append(made)
            else:
                into.append(made)
        return got

    def _meetings(
        self, what: str, before: Placements, steps: Sequence[ReshardingStep]
    ) -> tuple[Meeting, ...]:
        """The collectives of a path in which this rank takes part."""
        placed = list(before)
        met: list[Meeting] = []
        for number, step in enumerate(steps):
            others = [
                placement
                if axis != step.axis or not isinstance(placement, Pin)
                else Pin(self.coordinates[axis])
                for axis, placement in enumerate(placed)
            ]
            size = self.mesh.shape[step.axis]
            if size > 1 and step.collective is not Collective.SLICE and self.holds(tuple(others)):
                pair = _pair(step)
                if pair is None or self.coordinates[step.axis] in pair:
                    what_step = f"{what}, step {number}: {step}"
                    met.append(Meeting(self.stage, step.axis, what_step, pair))
            placed[step.axis] = step.target
        return tuple(met)

    def inner_meetings(self, i: int, what: str) -> tuple[Meeting, ...]:
        """The collectives inside the kernel of operator `i`."""
        operator, config = self.context.graph.operators[i], self.context.configs[i]
        inner = {
            name
            for each in kind_of(operator).inner(operator, operator.sizes)
            for name in each.dims
        }
        return tuple(
            Meeting(self.stage, axis, f"{what}, inside")
            for axis, placement in enumerate(config)
            if isinstance(placement, Shard)
            and placement.dim in inner
            and self.mesh.shape[axis] > 1
        )

    # -- between stages -------------------------------------------------------------------------

    def send(self, crossing: BoundaryTensor, microbatch: int, source: str) -> None:
        """Carry out pending sums of `source` and send what other stages need of it."""
        task, kind = crossing.task(microbatch), TaskKind.COMMUNICATION
        if source not in self._summed:
            self._summed[source] = self.convert(
                task,
                kind,
                microbatch,
                source=source,
                target=f"{source} summed",
                sizes=crossing.transfer.sizes,
                dtype=crossing.dtype,
                before=crossing.before,
                after=crossing.transfer.source_placements,
            )
        value = self._summed[source]
        if value is not None:
            label = f"{crossing.value} m{microbatch}"
            transfer, dtype = crossing.transfer, crossing.dtype
            self.send_pieces(label, task, kind, microbatch, value, transfer, dtype)

    def send_pieces(
        self,
        label: str,
        task: str,
        kind: TaskKind,
        microbatch: int,
        value: str,
        transfer: Transfer,
        dtype: str,
    ) -> None:
        """Send to every rank what it needs of a transfer; nothing where this rank has none."""
        if transfer.source_part(self._device) is not None:
            self.write(Send(label, task, kind, microbatch, value, transfer, dtype))

    def receive(
        self,
        label: str,
        task: str,
        kind: TaskKind,
        microbatch: int,
        value: str,
        transfer: Transfer,
        dtype: str,
        *,
        layout: Layout | None = None,
        adds: bool = False,
    ) -> str | None:
        """Receive this rank's part of a transfer; None when it has none."""
        if transfer.target_part(self._device) is None:
            return None
        self.write(Receive(label, task, kind, microbatch, value, transfer, dtype, layout, adds))
        return value


def _pair(step: ReshardingStep) -> tuple[int, int] | None:
    """The two indices between which a step moves a tensor."""
    if isinstance(step.source, Pin) and isinstance(step.target, Pin):
        return step.source.index, step.target.index
    return None
