"""One rank's parameters: gathered, synchronised, updated, published (`simulator.parameters`).

    gradient as made ──sync──▶ home ──update──▶ home ──publish──▶ as operators use it
    gradient of a tied user ──↔──▲                 ╰──────↔──────▶ as the tied user uses it

A stage does this as soon as an operator's last backward pass is over, except for parameters that
another stage uses too: those wait for the end of the step, when every stage first sends its
gradients.
"""

from __future__ import annotations

from stratagem.executor.instructions import Update, Updated
from stratagem.executor.program import Stored
from stratagem.executor.weights import Weights, WeightUse
from stratagem.executor.writer import Writer
from stratagem.simulator.boundary import summed
from stratagem.simulator.parameters import Use
from stratagem.simulator.timeline import TaskKind
from stratagem.simulator.transfers import Transfer


class ParameterWriter:
    """Writes what one rank does with its parameters."""

    def __init__(self, writer: Writer, weights: Weights) -> None:
        self._writer = writer
        self._weights = weights
        self._last = writer.context.last_backward(writer.stage)
        self._remote = [
            use for uses in weights.of for use in uses if use.use is Use.TIED_ELSEWHERE
        ]

    def stored(self) -> tuple[Stored, ...]:
        """Every parameter and buffer that this rank keeps."""
        found: dict[str, Stored] = {}
        for i in self._writer.context.operators[self._writer.stage]:
            for use in self._weights.of[i]:
                kept = [] if use.is_gathered else [use.used]
                if use.use is Use.OWNED:
                    kept.append(use.home)
                for placements in filter(self._writer.holds, kept):
                    stored = use.stored(placements)
                    found.setdefault(stored.value, stored)
        return tuple(found.values())

    def bring(self, i: int, label: str, microbatch: int) -> tuple[str, ...]:
        """The values of the weights of operator `i`, gathered where they are sharded at home."""
        name = self._name(i)
        values: list[str] = []
        for use in self._weights.of[i]:
            value: str | None = use.used_value
            if use.is_gathered:
                value = self._writer.convert(
                    f"{name} gather",
                    TaskKind.GRADIENT_SYNC,
                    microbatch,
                    source=use.home_value,
                    target=f"{use.used_value} for {name} {label}",
                    sizes=use.sizes,
                    dtype=use.dtype,
                    before=use.home,
                    after=use.used,
                    layout=use.weight.layout,
                )
            if value is not None:
                values.append(value)
        return tuple(values)

    def gathered(self, i: int) -> tuple[int, ...]:
        """Which weights of operator `i` are gathered for each use."""
        return tuple(use.slot for use in self._weights.of[i] if use.is_gathered)

    def gradients(self, i: int, microbatch: int) -> tuple[str | None, ...]:
        """The values to which operator `i` adds its weight gradients."""
        name = self._name(i)
        return tuple(
            use.gradient(microbatch, name) if use.trained else None for use in self._weights.of[i]
        )

    def after_backward(self, i: int, microbatch: int) -> None:
        """What follows a backward pass of operator `i`: sync, and at the end the update."""
        is_last = microbatch == self._last
        for use in self._weights.of[i]:
            if use.use is Use.OWNED and (is_last or use.zero >= 2):
                if use.made != use.home:
                    self._reduce(use, f"{self._name(i)} sync", microbatch)
            elif use.use is Use.TIED_HERE and is_last and not use.joins_owner:
                self._reduce(use, self._tie(use), microbatch)
        if is_last and not any(use.owner == i for use in self._remote):
            self._update(i)

    def finish(self) -> None:
        """The end of the step: parameters that several stages use."""
        stage = self._writer.stage
        for use in self._remote:
            if use.stage == stage:
                self._send_gradient(use)
        for use in self._remote:
            if use.owner_stage == stage:
                transfer = self._to_home(use)
                self._receive(use, use.home_gradient, transfer, adds=True)
        for i in sorted({use.owner for use in self._remote if use.owner_stage == stage}):
            self._update(i)
        for use in self._remote:
            if use.owner_stage == stage and self._writer.holds(use.home):
                self._writer.send_pieces(
                    self._tie(use), TaskKind.GRADIENT_SYNC, -1, use.home_value, self._to_user(use)
                )
        for use in self._remote:
            if use.stage == stage:
                self._receive(use, use.used_value, self._to_user(use), adds=False)

    # -- gradients ------------------------------------------------------------------------------

    def _reduce(self, use: WeightUse, task: str, microbatch: int) -> None:
        """Add a gradient to that at the parameter's home on this mesh."""
        self._writer.convert(
            task,
            TaskKind.GRADIENT_SYNC,
            microbatch,
            source=use.gradient(microbatch, self._name(use.user)),
            target=use.home_gradient,
            sizes=use.sizes,
            dtype=use.dtype,
            before=use.made,
            after=use.home,
            layout=use.weight.layout,
            adds=True,
        )

    def _send_gradient(self, use: WeightUse) -> None:
        made = use.gradient(self._last, self._name(use.user))
        value = self._writer.convert(
            f"{self._name(use.user)} sync",
            TaskKind.GRADIENT_SYNC,
            -1,
            source=made,
            target=f"{made} summed",
            sizes=use.sizes,
            dtype=use.dtype,
            before=use.made,
            after=summed(use.made),
            layout=use.weight.layout,
        )
        if value is not None:
            task, kind = self._tie(use), TaskKind.GRADIENT_SYNC
            self._writer.send_pieces(task, kind, -1, value, self._to_home(use))

    def _receive(self, use: WeightUse, value: str, transfer: Transfer, *, adds: bool) -> None:
        self._writer.receive(
            self._tie(use),
            TaskKind.GRADIENT_SYNC,
            -1,
            value,
            transfer,
            use.dtype,
            layout=use.weight.layout,
            adds=adds,
        )

    # -- values ---------------------------------------------------------------------------------

    def _update(self, i: int) -> None:
        """Update what operator `i` owns, and bring the new values to their users in this stage."""
        owned = [use for use in self._weights.of[i] if use.use is Use.OWNED]
        here = [use for use in owned if self._writer.holds(use.home)]
        if here:
            parameters = tuple(
                Updated(use.parameter, use.home_value, use.home_gradient) for use in here
            )
            self._writer.write(Update(self._name(i), parameters))
        done = {use.home_value for use in owned}
        for use in owned:
            if not use.is_gathered:
                self._publish(use, f"{self._name(i)} publish", done)
        for use in self._weights.tied_to(i):
            if use.stage == self._writer.stage:
                self._publish(use, self._tie(use), done)

    def _publish(self, use: WeightUse, task: str, done: set[str]) -> None:
        if use.used_value in done:
            return
        done.add(use.used_value)
        self._writer.convert(
            task,
            TaskKind.GRADIENT_SYNC,
            -1,
            source=use.home_value,
            target=use.used_value,
            sizes=use.sizes,
            dtype=use.dtype,
            before=use.home,
            after=use.used,
            layout=use.weight.layout,
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

    def _name(self, i: int) -> str:
        return self._writer.context.graph.operators[i].name

    def _tie(self, use: WeightUse) -> str:
        """Name of a tie in the timeline: owner and user."""
        return f"{self._name(use.owner)} ↔ {self._name(use.user)}"
