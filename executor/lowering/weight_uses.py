"""Every use of every parameter: where its value and its gradient lie, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stratagem.executor.lowering.plan_context import Context
from stratagem.executor.program.executed_dtypes import executed_dtype, gradient_dtype
from stratagem.executor.program.programs import Home, Stored
from stratagem.simulator.graph.placement import (
    Placements,
    weight_gradient_placements,
    weight_placements,
)
from stratagem.simulator.operators.operator import Operator, Weight, factor_sizes
from stratagem.simulator.sharding.parameter_homes import (
    ParameterUse,
    home_placements,
    unsharded_gradient_bytes,
    use_of,
)
from stratagem.simulator.sharding.resharding_paths import placements_text

FROZEN = (ParameterUse.FROZEN, ParameterUse.FROZEN_HERE)


@dataclass(frozen=True)
class WeightUse:
    """How operator `user` uses its weight number `slot`.

    Attributes:
        owner: the operator at whose `home` the parameter is updated, in stage `owner_stage`.
        joins_owner: the gradient lies like that of the owner in the same stage (or is its own, or
            there is none).
        zero: the owner's ZeRO stage where `joins_owner`, else 0; that of the user where the
            parameter is frozen, which then has a home for each of its users.
        dtype: of the value that the operator reads.
        gradient_dtype: in which its gradients are added up and reduced.
        used: placements of the value that the operator reads.
        made: placements of the gradient that it makes.
        apart: whether every microbatch has an update, and so a gradient of its own.
    """

    user: int
    slot: int
    weight: Weight
    sizes: tuple[int, ...]
    dtype: str
    gradient_dtype: str
    use: ParameterUse
    owner: int
    stage: int
    owner_stage: int
    zero: int
    joins_owner: bool
    used: Placements
    made: Placements
    home: Placements
    apart: bool = False

    @property
    def parameter(self) -> str:
        """Name of the parameter."""
        return self.weight.parameter

    @property
    def trained(self) -> bool:
        """Whether it has a gradient."""
        return self.use not in (ParameterUse.BUFFER, *FROZEN)

    @property
    def is_gathered(self) -> bool:
        """Whether the value is brought together for each use and freed after it (ZeRO-3)."""
        return self.joins_owner and self.zero == 3 and self.home != self.used

    @property
    def used_value(self) -> str:
        """The value that the operator reads, unless it is gathered."""
        return self._value(self.used, self.stage)

    @property
    def home_value(self) -> str:
        """The value that the optimizer updates, or that is gathered."""
        return self._value(self.home, self.owner_stage if self.trained else self.stage)

    def _value(self, placements: Placements, stage: int) -> str:
        where = "" if stage == self.owner_stage else f" in stage {stage}"
        return f"{self.parameter} {placements_text(placements)}{where}"

    def home_gradient(self, microbatch: int) -> str:
        """The gradient that the optimizer reads."""
        each = f" m{microbatch}" if self.apart else ""
        return f"∂{self.parameter}{each}"

    def gradient(self, microbatch: int, operator: str) -> str:
        """The gradient as the operator makes it; summed over microbatches, but for ZeRO-2 and 3
        and where each has an update."""
        each = f" m{microbatch}" if self.apart or (self.joins_owner and self.zero >= 2) else ""
        if not self.joins_owner:
            return f"∂{self.parameter} of {operator}{each}"
        if self.made == self.home:
            return self.home_gradient(microbatch)
        return f"∂{self.parameter} unreduced{each}"

    def stored(self, placements: Placements) -> Stored:
        """The parameter kept with some placements."""
        value = self._value(placements, self.stage)
        layout = self.weight.layout
        dtype = self.dtype
        return Stored(self.stage, value, self.parameter, dtype, layout, self.sizes, placements)


class Weights:
    """Every use of every weight of a plan, by operator and by owner.

    Raises:
        ValueError: when an operator reads a trained parameter twice, two operators that share one
            see it with other factors, or the owner of a parameter never reaches the loss.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._owner = context.graph.owners
        self._first: dict[str, int] = {}
        for i, operator in enumerate(context.graph.operators):
            for weight in operator.weights:
                self._first.setdefault(weight.parameter, i)
        self.of: tuple[tuple[WeightUse, ...], ...] = tuple(
            tuple(self._use(i, slot) for slot in range(len(operator.weights)))
            for i, operator in enumerate(context.graph.operators)
        )
        for uses in self.of:
            _check_once(context.graph.operators, uses)

    def tied_to(self, owner: int) -> list[WeightUse]:
        """Uses of other operators whose gradient goes to the home of `owner` by itself."""
        return self._tied.get(owner, [])

    @cached_property
    def _tied(self) -> dict[int, list[WeightUse]]:
        found: dict[int, list[WeightUse]] = {}
        for i, uses in enumerate(self.of):
            for use in uses:
                if use.trained and i != use.owner and not use.joins_owner:
                    found.setdefault(use.owner, []).append(use)
        return found

    def gradient_bytes(self, i: int) -> int:
        """Bytes of the gradients that operator `i` reduces, unsharded: they fill buckets."""
        return unsharded_gradient_bytes(
            self._context.graph.operators[i],
            [use.use for use in self.of[i]],
            self._context.plan.training.gradient_bytes,
        )

    def homes(self) -> tuple[Home, ...]:
        """Where every parameter and buffer is authoritative."""
        found: dict[str, Home] = {}
        for use in (use for uses in self.of for use in uses):
            if use.user == use.owner or not use.trained:
                home = Home(use.trained, use.stored(use.home))
                found.setdefault(use.parameter, home)
        return tuple(found.values())

    def _use(self, i: int, slot: int) -> WeightUse:
        context = self._context
        graph, stage = context.graph, context.stage_of[i]
        operator = graph.operators[i]
        weight = operator.weights[slot]
        sizes = factor_sizes(weight.layout, operator.sizes)
        inside = set(context.operators[stage])
        use = use_of(graph, self._owner, operator, weight, inside)
        owner = self._first[weight.parameter]
        made = weight_gradient_placements(weight, context.configs[i])
        home = used = weight_placements(weight, context.configs[i])
        zero, joins = 0, True
        if use in FROZEN:
            choice = context.plan.choice(operator.name)
            if choice.zero == 3:
                home, zero = home_placements(weight, choice, context.mesh(stage).shape), 3
        elif use is not ParameterUse.BUFFER:
            owner = graph.index[self._owner[weight.parameter]]
            home, joins = self._home(owner, weight.parameter, sizes, operator, made)
            joins = joins and use in (ParameterUse.OWNED, ParameterUse.TIED_HERE)
            zero = context.plan.choice(graph.operators[owner].name).zero if joins else 0
        training = context.plan.training
        dtype = dtype_captured = graph.parameter_index[weight.parameter].dtype
        if use is not ParameterUse.BUFFER:
            dtype = executed_dtype(training, dtype_captured, weight.layout)
        return WeightUse(
            user=i,
            slot=slot,
            weight=weight,
            sizes=sizes,
            dtype=dtype,
            gradient_dtype=gradient_dtype(training, dtype_captured),
            use=use,
            owner=owner,
            stage=stage,
            owner_stage=context.stage_of[owner],
            zero=zero,
            joins_owner=joins,
            used=used,
            made=made,
            home=home,
            apart=context.stashes,
        )

    def _home(
        self,
        owner: int,
        parameter: str,
        sizes: tuple[int, ...],
        user: Operator,
        made: Placements,
    ) -> tuple[Placements, bool]:
        """The home of a parameter, and whether the owner's gradient lies as `made`."""
        context = self._context
        owning = context.graph.operators[owner]
        own = next(w for w in owning.weights if w.parameter == parameter)
        theirs = factor_sizes(own.layout, owning.sizes)
        if theirs != sizes:
            raise ValueError(
                f"operators {owning.name!r} and {user.name!r} share parameter {parameter!r}, but "
                f"see it with factors {theirs} and {sizes}; untie it, or reshape it alike in both"
            )
        if not context.runs_backward[owner]:
            raise ValueError(
                f"operator {owning.name!r} has parameter {parameter!r}, but does not reach the "
                f"loss {context.graph.loss!r}; freeze the parameter or leave out the operator"
            )
        mesh = context.mesh(context.stage_of[owner])
        choice = context.plan.choice(owning.name)
        home = home_placements(own, choice, mesh.shape)
        return home, weight_gradient_placements(own, choice.config) == made


def _check_once(operators: Sequence[Operator], uses: Sequence[WeightUse]) -> None:
    trained = [use.parameter for use in uses if use.trained]
    for use in uses:
        if trained.count(use.parameter) > 1:
            raise ValueError(
                f"operator {operators[use.user].name!r} reads parameter {use.parameter!r} twice; "
                f"use it in two operators"
            )
