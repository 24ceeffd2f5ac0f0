"""What a planner's solver returns: stages with their loads, and what is proved of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedStage:
    """Some nodes and the devices that run them.

    Attributes:
        nodes: identifiers of the nodes, as in the file.
        load: what the objective charges the stage, in the unit of the result; nan when unknown.
        replicas: devices (or groups of them) that take turns at it: data parallelism.
        shards: devices that share one run of it: tensor parallelism.
        device: the kind of device.
        options: how each node runs, where the input offers a choice.
    """

    nodes: tuple[int | str, ...]
    load: float = math.nan
    replicas: int = 1
    shards: int = 1
    device: str = "accelerator"
    options: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices that the stage occupies."""
        return self.replicas * self.shards


@dataclass(frozen=True)
class PlannerResult:
    """The best plan found for an input under another planner's objective.

    Attributes:
        input: what was planned, with the units that were corrected.
        objective: the objective, and what plans were allowed.
        value: objective of the plan.
        unit: unit of `value` and of `bound`.
        bound: no allowed plan is better than this.
        exact: whether the plan is proved to be the best one.
        stages: the plan.
        notes: what a reader must know, one sentence each.
        recurrence: the value as the solver's table has it, without the formula: they differ by
            rounding only. nan where there was no table.
    """

    input: str
    objective: str
    value: float
    unit: str
    bound: float
    exact: bool
    stages: tuple[PlannedStage, ...]
    notes: tuple[str, ...] = ()
    recurrence: float = math.nan

    @property
    def gap(self) -> float:
        """How much better the best plan could at most be, relative to this one."""
        return 0.0 if self.exact else max(0.0, (self.value - self.bound) / self.value)

    def __str__(self) -> str:
        """A few lines to read: the value, what is proved, and a line a stage."""
        proved = "the best there is" if self.exact else f"at most {self.gap:.2%} from the best"
        lines = [
            f"{self.input}: {self.value:.6g} {self.unit}, {proved}",
            f"  objective: {self.objective}",
        ]
        for number, stage in enumerate(self.stages):
            devices = f"{stage.replicas} × {stage.shards} {stage.device}"
            lines.append(
                f"  stage {number}: {stage.load:.6g} {self.unit} on {devices}, "
                f"{len(stage.nodes)} nodes from {stage.nodes[0]} to {stage.nodes[-1]}"
                f"{_counted(stage.options)}"
            )
        lines.extend(f"  {note}" for note in self.notes)
        return "\n".join(lines)


def _counted(options: Sequence[str]) -> str:
    """How many nodes run in which way."""
    kinds = sorted(set(options))
    return f" ({', '.join(f'{options.count(k)} {k}' for k in kinds)})" if kinds else ""
