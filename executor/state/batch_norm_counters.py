"""How often batch norms have normalised: torch counts it, and no step reads it.

So no rank keeps these counters: from where they began, and how many steps were made since, follows
what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.executor.program.programs import Program
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics

COUNTER = "num_batches_tracked"
_RUNNING_MEAN = 2
"""Position among the weights of a batch norm."""


@dataclass(frozen=True)
class Counters:
    """The counters of a model's batch norms, by name.

    Example:
        >>> Counters(10, {"norm.num_batches_tracked": 20}, {"norm.num_batches_tracked": 2}).at(13)
        {'norm.num_batches_tracked': 26}

    Attributes:
        step: how many steps the run had made where they were read.
        values: what they were then.
        per_step: by how much a step counts each up: once for each use and microbatch.
    """

    step: int
    values: Mapping[str, int]
    per_step: Mapping[str, int]

    def at(self, step: int) -> dict[str, int]:
        """What they are when the run has made so many steps."""
        made = step - self.step
        return {name: value + made * self.per_step[name] for name, value in self.values.items()}

    def going_on(self, step: int, values: Mapping[str, int]) -> Counters:
        """Those of a run that goes on from a checkpoint; one that lacks them began as this run."""
        return Counters(step, values, self.per_step) if values else self


def counters_of(program: Program, state: Mapping[str, Tensor]) -> Counters:
    """The counters that a program's batch norms have in a model's state; modules have them.

    Args:
        program: from `lower`.
        state: parameters and buffers of the model at the begin of training, by name.
    """
    per_step: Counter[str] = Counter()
    for operator in program.graph.operators:
        if takes_statistics(operator):
            path, dot, _ = operator.weights[_RUNNING_MEAN].parameter.rpartition(".")
            per_step[f"{path}{dot}{COUNTER}"] += program.plan.num_microbatches
    values = {name: int(state[name]) for name in per_step if name in state}
    return Counters(0, values, per_step)


def as_tensors(values: Mapping[str, int]) -> dict[str, Tensor]:
    """Counters as the buffers that torch has of them."""
    return {name: torch.tensor(value) for name, value in values.items()}
