"""One rank's parameters: gathered, synchronised, updated, published (`sharding.parameter_homes`).

    gradient as made ──sync──▶ home ──update──▶ home ──publish──▶ as operators use it
    gradient of a tied user ──↔──▲                 ╰──────↔──────▶ as the tied user uses it

Gradients are brought together as soon as an operator's last backward pass is over, or that of the
last operator of its bucket; backward goes on meanwhile. A weight is gathered for the operator that
reads it next, those of a bucket for the first that reads one; `passes.gathering_ahead` says how
much earlier that begins, `passes.bundling` what of a bucket goes together. A new value, or
those of a bucket, is published while others are updated. Updates wait for the end
of the step, when stages first exchange the gradients of the parameters that they share. Where
weights are stashed, each microbatch ends in updates of its stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from stratagem.executor.lowering.conversion_writer import Writer
from stratagem.executor.lowering.passes.drafts import BlockBegins, Fill, Gather, Ran
from stratagem.executor.lowering.stashed_versions import Stashes
from stratagem.executor.lowering.weight_uses import Weights, WeightUse
from stratagem.executor.program.instructions import (
    Convert,
    Direct,
    MeasuredParameter,
    Stash,
    Update,
    Updated,
)
from stratagem.executor.program.instructions.treatments import SentIn, StoredAs, Treatment
from stratagem.executor.program.programs import Stored
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import REPLICATE, Placements
from stratagem.simulator.pricing.stage_boundaries import summed
from stratagem.simulator.schedules.weight_versions import versions_seen
from stratagem.simulator.sharding.choice import ParameterMessage, sent_format
from stratagem.simulator.sharding.joint_mesh import after_sum, before_sum
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.sharding.parameter_homes import (
    ParameterUse,
    gather_buckets,
    gradient_buckets,
)


class ParameterWriter:
    """Writes what the ranks of one stage do with its parameters.

    `_held` has what an operator adds to its bucket. Of a block `_begun` are the operators whose
    buckets are brought, `_brought` the values of these.
    """

    def __init__(self, writer: Writer, weights: Weights) -> None:
        context = writer.context
        self._writer = writer
        self._weights = weights
        self._operators = context.operators[writer.stage]
        self._updates = context.updates(writer.stage)
        schedule = context.plan.make_schedule()
        self._stashes = Stashes(versions_seen(schedule, writer.stage) if context.stashes else {})
        self._remote = [
            use for uses in weights.of for use in uses if use.use is ParameterUse.TIED_ELSEWHERE
        ]
        # Others read the value behind a detach: they have no gradient to send.
        self._returned = [use for use in self._remote if context.runs_backward[use.user]]
        self._ready: list[int] = []
        self._held: list[Convert] = []
        nbytes = {i: weights.gradient_bytes(i) for i in self._operators}
        buckets = gradient_buckets(self._operators[::-1], nbytes, context.plan.bucket_bytes)
        segment = context.graph.segments
        self._together = {
            i: bucket[::-1]
            for bucket in gather_buckets(
                self._operators[::-1], nbytes, segment, context.plan.bucket_bytes
            )
            for i in bucket
            if context.plan.bucket_bytes and nbytes[i]
        }
        self._begun: set[int] = set()
        self._brought: dict[tuple[int, int], str | None] = {}
        self._closes = {bucket[-1] for bucket in buckets if nbytes[bucket[-1]]}
        self._in_buckets = context.plan.bucket_bytes > 0
        self._has_two_homes = context.plan.is_mirrored

    def stored(self) -> tuple[Stored, ...]:
        """Every parameter and buffer that this rank keeps for the stage."""
        found: dict[str, Stored] = {}
        for i in self._operators:
            for use in self._weights.of[i]:
                kept = [] if use.is_gathered else [use.used]
                if use.use is ParameterUse.OWNED or (use.is_gathered and not use.trained):
                    kept.append(use.home)
                for placements in filter(self._writer.holds, kept):
                    stored = use.stored(placements)
                    found.setdefault(stored.value, stored)
        return tuple(found.values())

    def begin_block(self) -> None:
        """Say that what is gathered from now on is so for a new block."""
        self._writer.write(BlockBegins())
        self._begun.clear()
        self._brought.clear()

    def ran(self, i: int, *, again: bool = False) -> None:
        """Say that operator `i` has been run."""
        if self._weights.of[i]:
            self._writer.write(Ran(again))

    def bring(self, i: int, label: str, microbatch: int, *, again: bool) -> tuple[str, ...]:
        """The values of the weights of operator `i`, gathered where they are sharded at home.

        Those of a bucket are so for the first that reads one. In the backward pass, `again`, they
        are those that the forward pass had.
        """
        if i in self._together and i not in self._begun:
            self._bring_bucket(self._together[i], label, microbatch)
        values: list[str] = []
        gathers: list[Convert] = []
        for use in self._weights.of[i]:
            value: str | None = use.used_value
            if use.trained:
                value = self._stashes.read(use.used_value, microbatch, again=again)
            if (i, use.slot) in self._brought:
                value = self._brought[i, use.slot]
            elif use.is_gathered:
                value = self._gather(use, label, microbatch, gathers)
            if value is not None:
                values.append(value)
        if gathers:
            self._writer.write(Gather(tuple(gathers), of_bucket=False))
        return tuple(values)

    def _bring_bucket(self, bucket: Sequence[int], label: str, microbatch: int) -> None:
        """Gather the weights of a bucket."""
        gathers: list[Convert] = []
        self._begun.update(bucket)
        for i in bucket:
            for use in self._weights.of[i]:
                if use.is_gathered and use.use is not ParameterUse.TIED_HERE:
                    made = self._gather(use, label, microbatch, gathers)
                    self._brought[i, use.slot] = made
        self._writer.write(Gather(tuple(gathers), of_bucket=True))

    def _gather(
        self, use: WeightUse, label: str, microbatch: int, into: list[Convert]
    ) -> str | None:
        name = self._name(use.user)
        return self._writer.convert(
            f"{name} gather",
            TaskKind.GRADIENT_SYNC,
            microbatch,
            source=use.home_value,
            target=f"{use.used_value} for {name} {label}",
            sizes=use.sizes,
            dtype=use.dtype,
            before=use.home,
            after=use.used,
            treatments=self._treatments(use, ParameterMessage.VALUE),
            later=True,
            into=into,
        )

    def gathered(self, i: int, microbatch: int) -> tuple[int, ...]:
        """Which weights of operator `i` no tape keeps: backward gathers them, or has a copy."""
        stashed = self._stashes.is_stashed(microbatch)
        return tuple(
            use.slot for use in self._weights.of[i] if use.is_gathered or (stashed and use.trained)
        )

    def gradient_dtypes(self, i: int) -> tuple[str, ...]:
        """The dtypes in which gradients of the trained weights of operator `i` are added up."""
        return tuple(use.gradient_dtype for use in self._weights.of[i] if use.trained)

    def gradients(self, i: int, microbatch: int) -> tuple[str | None, ...]:
        """The values to which operator `i` adds its weight gradients."""
        name = self._name(i)
        return tuple(
            use.gradient(microbatch, name) if use.trained else None for use in self._weights.of[i]
        )

    def after_backward(self, i: int, microbatch: int) -> None:
        """Sync the gradients of operator `i`, once its bucket is full, if it is time to."""
        is_last = microbatch in self._updates
        for use in self._weights.of[i]:
            if use.use is ParameterUse.OWNED and (is_last or use.zero >= 2):
                if use.made != use.home:
                    self._reduce(use, f"{self._name(i)} sync", microbatch)
            elif use.use is ParameterUse.TIED_HERE and is_last and not use.joins_owner:
                self._reduce(use, self._tie(use), microbatch)
        self._fill(i)
        if is_last:
            self._ready.append(i)

    def _fill(self, i: int) -> None:
        """Write what operator `i` adds to its bucket, which is full with the last of its own."""
        if self._held or i in self._closes:
            self._writer.write(Fill(self._writer.stage, tuple(self._held), i in self._closes))
            self._held.clear()

    # -- the end of a step ----------------------------------------------------------------------

    def send_gradients(self) -> None:
        """Send those of parameters that belong to another stage."""
        for use in self._returned:
            if use.stage == self._writer.stage:
                self._send_gradient(use)

    def receive_gradients(self) -> None:
        """Add up those that come from other stages."""
        for use in self._returned:
            if use.owner_stage == self._writer.stage:
                transfer = self._to_home(use)
                self._receive(use, use.home_gradient(-1), transfer, adds=True)

    def gradients_at_home(self) -> list[tuple[str, int, Placements]]:
        """The gradients of what this rank updates: value, stage and placements.

        What is there twice belongs to its first home.
        """
        if self._writer.context.upward:
            return []
        return [
            (self._total(use), use.owner_stage, use.home)
            for i in self._ready
            for use in self._weights.of[i]
            if use.use is ParameterUse.OWNED and self._writer.holds(use.home)
        ]

    def measured(self) -> list[MeasuredParameter]:
        """What this rank updates, as it is to be measured before."""
        counts = not self._writer.context.upward
        return [
            MeasuredParameter(self._updated(use, -1), use.owner_stage, use.home, counts)
            for i in self._ready
            for use in self._weights.of[i]
            if use.use is ParameterUse.OWNED and self._writer.holds(use.home)
        ]

    @property
    def _share(self) -> float:
        """Of what is updated in a step, what one update is."""
        return 1 / len(self._updates)

    def _updated(self, use: WeightUse, microbatch: int) -> Updated:
        return Updated(use.parameter, use.home_value, self._total(use, microbatch))

    def update(self, norm: str | None) -> None:
        """Update every parameter that this stage owns, and bring it to its users here."""
        for i in self._ready:
            self._update(i, norm, -1)

    def update_amid(self, microbatch: int) -> None:
        """Update behind a microbatch, and keep the weights that others have seen."""
        for i in self._ready:
            self._stash(i, microbatch)
            self._update(i, None, microbatch)
        self._ready.clear()
        self._stashes.advance()

    def send_values(self) -> None:
        """Send new values to other stages."""
        for use in self._remote:
            if use.owner_stage == self._writer.stage and self._writer.holds(use.home):
                self._send(use, use.home_value, self._to_user(use), adds=False)

    def receive_values(self) -> None:
        """Receive new values from the stages that own the parameters."""
        for use in self._remote:
            if use.stage == self._writer.stage:
                self._receive(use, use.used_value, self._to_user(use), adds=False)

    # -- gradients ------------------------------------------------------------------------------

    def _reduce(self, use: WeightUse, task: str, microbatch: int) -> None:
        """Add a gradient to that at the parameter's home on this mesh, with its bucket."""
        self._writer.convert(
            task,
            TaskKind.GRADIENT_SYNC,
            microbatch,
            source=use.gradient(microbatch, self._name(use.user)),
            target=use.home_gradient(microbatch),
            sizes=use.sizes,
            dtype=use.gradient_dtype,
            before=use.made,
            after=use.home,
            treatments=self._treatments(use, ParameterMessage.GRADIENT),
            adds=True,
            later=True,
            into=self._held,
        )

    def _send_gradient(self, use: WeightUse) -> None:
        made = use.gradient(-1, self._name(use.user))
        value = self._writer.convert(
            f"{self._name(use.user)} sync",
            TaskKind.GRADIENT_SYNC,
            -1,
            source=made,
            target=f"{made} summed",
            sizes=use.sizes,
            dtype=use.gradient_dtype,
            before=use.made,
            after=summed(use.made),
            treatments=self._treatments(use, ParameterMessage.GRADIENT),
        )
        if value is not None:
            self._send(use, value, self._to_home(use), adds=True)

    def _send(self, use: WeightUse, value: str, transfer: Transfer, *, adds: bool) -> None:
        task, what = self._tie(use), "gradient" if adds else "value"
        self._writer.send_pieces(
            f"{task}, {what} of {use.parameter}",
            task,
            TaskKind.GRADIENT_SYNC,
            -1,
            value,
            transfer,
            use.gradient_dtype if adds else use.dtype,
        )

    def _receive(self, use: WeightUse, value: str, transfer: Transfer, *, adds: bool) -> None:
        task, what = self._tie(use), "gradient" if adds else "value"
        self._writer.receive(
            f"{task}, {what} of {use.parameter}",
            task,
            TaskKind.GRADIENT_SYNC,
            -1,
            value,
            transfer,
            use.gradient_dtype if adds else use.dtype,
            layout=use.weight.layout,
            adds=adds,
        )

    # -- both homes -----------------------------------------------------------------------------

    def sum_homes(self, *, tied: bool) -> None:
        """Add up the gradients at both homes of the stage, if it has two, bucket by bucket.

        Those that come from other stages too, the `tied` ones, wait for them.
        """
        if not self._has_two_homes:
            return
        awaited = {use.parameter for use in self._returned}
        joint = self._writer.on_both_homes()
        for i in self._operators[::-1]:
            for use in self._weights.of[i]:
                if use.use is ParameterUse.OWNED and (use.parameter in awaited) == tied:
                    self._sum_homes(use, joint)
            self._fill(i)

    def _sum_homes(self, use: WeightUse, joint: Writer) -> None:
        joint.convert(
            f"{self._name(use.user)} sync of both homes",
            TaskKind.GRADIENT_SYNC,
            -1,
            source=use.home_gradient(-1),
            target=self._total(use),
            sizes=use.sizes,
            dtype=use.gradient_dtype,
            before=before_sum(use.home),
            after=after_sum(use.home),
            treatments=self._treatments(use, ParameterMessage.GRADIENT),
            later=True,
            into=self._held,
        )

    def _total(self, use: WeightUse, microbatch: int = -1) -> str:
        """The gradient with which a parameter is updated."""
        own = use.home_gradient(microbatch)
        return f"{own} of both homes" if self._has_two_homes else own

    # -- values ---------------------------------------------------------------------------------

    @cached_property
    def _used(self) -> dict[int, dict[str, None]]:
        """Per owner the trained values that this rank's operators read, in order."""
        found: dict[int, dict[str, None]] = {}
        for i in self._operators:
            for use in self._weights.of[i]:
                if use.trained and self._writer.holds(use.used):
                    found.setdefault(use.owner, {})[use.used_value] = None
        return found

    def _stash(self, owner: int, microbatch: int) -> None:
        """Copy the weights that operator `owner` updates, as this stage uses them."""
        copies = [(value, self._stashes.kept(value)) for value in self._used.get(owner, ())]
        kept = tuple((value, copy) for value, copy in copies if copy is not None)
        if kept:
            self._writer.write(Stash(self._name(owner), microbatch, kept))

    def _update(self, i: int, norm: str | None, microbatch: int) -> None:
        """Update what operator `i` owns, and bring the new values to their users in this stage."""
        owned = [use for use in self._weights.of[i] if use.use is ParameterUse.OWNED]
        here = [use for use in owned if self._writer.holds(use.home)]
        directions = {use.parameter: self._direct(use, norm, microbatch) for use in owned}
        if here:
            parameters = tuple(
                replace(self._updated(use, microbatch), direction=directions[use.parameter])
                for use in here
            )
            self._writer.write(Update(self._name(i), parameters, norm, self._share))
        done = {use.home_value for use in owned}
        into = self._held if self._in_buckets else None
        for use in owned:
            if not use.is_gathered:
                self._publish(use, f"{self._name(i)} publish", microbatch, done, into)
        self._fill(i)
        for use in self._weights.tied_to(i):
            if use.stage == self._writer.stage:
                self._publish(use, self._tie(use), microbatch, done, None)

    def _direct(self, use: WeightUse, norm: str | None, microbatch: int) -> str | None:
        """Make the direction of a matrix that Muon trains, and bring it to all of the stage."""
        context = self._writer.context
        training = context.plan.training.for_parameter(use.parameter)
        if training.optimizer != "muon":
            return None
        updated = self._updated(use, microbatch)
        own = f"direction of {use.parameter}"
        if self._writer.holds(use.home):
            self._writer.write(Direct(updated, own, norm, self._share))
        return self._writer.convert(
            f"{own}, whole",
            TaskKind.OTHER,
            microbatch,
            source=own,
            target=f"{own}, whole",
            sizes=use.sizes,
            dtype=training.formats.states if training.master_bytes else use.dtype,
            before=use.home,
            after=(REPLICATE,) * len(use.home),
            treatments=(StoredAs(use.weight.layout),),
        )

    def _publish(
        self,
        use: WeightUse,
        task: str,
        microbatch: int,
        done: set[str],
        into: list[Convert] | None,
    ) -> None:
        if use.used_value in done:
            return
        done.add(use.used_value)
        self._writer.convert(
            task,
            TaskKind.GRADIENT_SYNC,
            microbatch,
            source=use.home_value,
            target=use.used_value,
            sizes=use.sizes,
            dtype=use.dtype,
            before=use.home,
            after=use.used,
            treatments=self._treatments(use, ParameterMessage.VALUE),
            alias=False,
            later=True,
            into=into,
        )

    # -- between stages -------------------------------------------------------------------------

    def _to_home(self, use: WeightUse) -> Transfer:
        context = self._writer.context
        user, owner = context.mesh(use.stage), context.mesh(use.owner_stage)
        return Transfer(use.sizes, user, summed(use.made), owner, use.home)

    def _to_user(self, use: WeightUse) -> Transfer:
        context = self._writer.context
        user, owner = context.mesh(use.stage), context.mesh(use.owner_stage)
        return Transfer(use.sizes, owner, use.home, user, use.used)

    # -- on the way -----------------------------------------------------------------------------

    def _treatments(self, use: WeightUse, what: ParameterMessage) -> tuple[Treatment, ...]:
        """What is done to a gradient or a value between its home and where it is used.

        What is tied to another operator goes as devices hold it.
        """
        stored = StoredAs(use.weight.layout)
        if use.use is ParameterUse.TIED_HERE:
            return (stored,)
        held = use.gradient_dtype if what is ParameterMessage.GRADIENT else use.dtype
        sent = sent_format(self._writer.context.plan.choice(self._name(use.user)), what, held)
        return (stored,) if sent == held else (SentIn(sent), stored)

    def _name(self, i: int) -> str:
        return self._writer.context.graph.operators[i].name

    def _tie(self, use: WeightUse) -> str:
        """Name of a tie in the timeline: owner and user."""
        return f"{self._name(use.owner)} ↔ {self._name(use.user)}"
