"""Writing one rank's instructions: conversions and transfers, as far as this rank takes part."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.executor.context import Context, Crossing
from stratagem.executor.instructions import Convert, Instruction, Meeting, Piece, Receive, Send
from stratagem.simulator.collectives import Collective
from stratagem.simulator.graph import Layout
from stratagem.simulator.placement import Config, Pin, Placements, Shard
from stratagem.simulator.resharding import Step
from stratagem.simulator.rules import rule_of
from stratagem.simulator.timeline import TaskKind
from stratagem.simulator.transfers import Box, Transfer, bounds_at


class Writer:
    """The instructions of one rank so far, and the seat from which it sees the plan."""

    def __init__(self, context: Context, device: int) -> None:
        self.context = context
        self.device = device
        self.rank = context.ranks[device]
        self.stage = next(
            s for s, stage in enumerate(context.plan.stages) if device in stage.mesh.devices
        )
        self.mesh = context.mesh(self.stage)
        self.coordinates = self.mesh.coordinates(device)
        self.instructions: list[Instruction] = []
        self._summed: dict[str, str | None] = {}
        self._groups = [
            tuple(context.ranks[d] for d in self.mesh.group_of(device, axis))
            for axis in range(len(self.mesh.axes))
        ]

    def write(self, instruction: Instruction) -> None:
        """Append an instruction."""
        self.instructions.append(instruction)

    def box(self, sizes: Sequence[int], placements: Placements) -> Box | None:
        """What this rank holds of a tensor; None for nothing."""
        return bounds_at(sizes, placements, self.mesh.shape, self.coordinates)

    def holds(self, placements: Placements | Config) -> bool:
        """Whether nothing is pinned elsewhere."""
        return self.box((), placements) is not None

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
        layout: Layout | None = None,
        adds: bool = False,
    ) -> str | None:
        """Bring `source` from one placement to another on this rank's mesh.

        Returns:
            The value that has the result, `source` itself when there is nothing to do, None when
            this rank holds nothing of it.
        """
        if before == after and not adds:
            return source if self.holds(before) else None
        steps = self.context.path(self.stage, sizes, dtype, before, after)
        given = source if self.holds(before) else None
        got = target if self.holds(after) else None
        meetings = self._meetings(f"{task} m{microbatch} of {target}", before, steps)
        if given is not None or got is not None or meetings:
            self.write(
                Convert(
                    task,
                    kind,
                    microbatch,
                    given,
                    got,
                    sizes,
                    dtype,
                    before,
                    steps,
                    layout,
                    adds,
                    meetings,
                )
            )
        return got

    def _meetings(
        self, what: str, before: Placements, steps: Sequence[Step]
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
            members = self._members(step)
            if self.holds(tuple(others)) and self.rank in members and len(members) > 1:
                met.append(Meeting(members, f"{what}, step {number}: {step}"))
            placed[step.axis] = step.target
        return tuple(met)

    def _members(self, step: Step) -> tuple[int, ...]:
        """The ranks that a step joins with this one."""
        group = self._groups[step.axis]
        if step.collective is Collective.SLICE:
            return ()
        if isinstance(step.source, Pin) and isinstance(step.target, Pin):
            return (group[step.source.index], group[step.target.index])
        return group

    def inner_meetings(self, i: int, what: str) -> tuple[Meeting, ...]:
        """The collectives inside the kernel of operator `i`."""
        operator, config = self.context.graph.operators[i], self.context.configs[i]
        inner = {
            name
            for each in rule_of(operator).inner(operator, operator.sizes)
            for name in each.dims
        }
        return tuple(
            Meeting(self._groups[axis], f"{what}, inside")
            for axis, placement in enumerate(config)
            if isinstance(placement, Shard)
            and placement.dim in inner
            and self.mesh.shape[axis] > 1
        )

    # -- between stages -------------------------------------------------------------------------

    def send(self, crossing: Crossing, microbatch: int, source: str) -> None:
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
            self.send_pieces(task, kind, microbatch, value, crossing.transfer)

    def send_pieces(
        self, task: str, kind: TaskKind, microbatch: int, value: str, transfer: Transfer
    ) -> None:
        """Send this rank's part of a transfer."""
        own = transfer.source_box(self.device)
        moves = [move for move in transfer.moves if move.sender == self.device]
        if own is None or not moves:
            return
        pieces = tuple(
            Piece(self.context.ranks[move.receiver], _within(own, move.box)) for move in moves
        )
        self.write(Send(task, kind, microbatch, value, _shape(own), pieces))

    def receive(
        self,
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
        own = transfer.target_box(self.device)
        if own is None:
            return None
        pieces = tuple(
            Piece(self.context.ranks[move.sender], _within(own, move.box))
            for move in transfer.moves
            if move.receiver == self.device
        )
        self.write(
            Receive(task, kind, microbatch, value, _shape(own), dtype, pieces, layout, adds)
        )
        return value


def _within(own: Box, box: Box) -> Box:
    """A box counted from the start of another that contains it."""
    return tuple(
        (start - origin, stop - origin)
        for (origin, _), (start, stop) in zip(own, box, strict=True)
    )


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
