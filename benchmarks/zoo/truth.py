"""One step of one process of torch, and how far that of a plan is from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.zoo.examples import Example
from stratagem.executor.running.torch_reference import (
    first_scalar,
    gradient_errors,
    relative_error,
    statistics_apart,
)

TOLERANCE = 1e-5
"""Of a step in float32 with sums in another order."""

ROUNDING = 8.0
"""How many times as far from float64 as torch's own value one may be."""


EXACT = 1e-9
"""Of a step in float64."""


@dataclass(frozen=True, eq=False)
class Step:
    """The loss of a step and its gradients by the names of parameters."""

    loss: float
    gradients: Mapping[str, Tensor]

    def errors_against(self, truth: Step) -> dict[str, float]:
        """Relative errors of the loss and of every gradient.

        Raises:
            KeyError: a gradient is missing here.
        """
        losses = torch.tensor([self.loss, truth.loss], dtype=torch.float64)
        return {
            "the loss": relative_error(losses[0], losses[1]),
            **gradient_errors(self.gradients, truth.gradients),
        }


def torch_step(example: Example, dtype: torch.dtype | None = None, *, parts: int = 1) -> Step:
    """What one process of torch makes.

    Args:
        example: the model and its batch.
        dtype: of all floats, where it is another one.
        parts: of the batch, each of which batch norms normalise on its own, as microbatches are.
    """
    model = copy.deepcopy(example.model)
    batch, targets = dict(example.batch), example.targets
    if dtype is not None:
        model = model.to(dtype)
        batch = {name: _cast(x, dtype) for name, x in batch.items()}
        targets = _cast(targets, dtype)
    torch.manual_seed(0)
    with statistics_apart(parts):
        loss = first_scalar(example.outcome(model, batch, targets))
    loss.backward()
    named = ((name, p.grad) for name, p in model.named_parameters())
    return Step(float(loss.detach()), {name: grad for name, grad in named if grad is not None})


def _grouped(rows: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of a grouped product: each row meets the weight of one group."""
    return 2 * math.prod(rows) * weight[-1]


_GROUPED = {torch.ops.aten._grouped_mm: _grouped}
"""What torch does not count itself. Those of transformers are of theirs, where there are any."""


def torch_flops(example: Example) -> float:
    """Operations of the products of a forward pass, as torch counts them, and of grouped ones."""
    grouped = dict(_GROUPED)
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        grouped[torch.ops.transformers.grouped_mm_fallback] = _grouped
    counter = FlopCounterMode(display=False, custom_mapping=grouped)
    model = copy.deepcopy(example.model)
    with counter:
        example.outcome(model, example.batch, example.targets)
    return float(counter.get_total_flops())


def worst_of(
    found: Step, example: Example, truth: Step, *, parts: int = 1
) -> tuple[str, float, float]:
    """The value that is farthest over what it may be off: its name, its error, and what it may be.

    What is not within the tolerance of float32 is compared with float64: it may be a few times as
    far from that as torch in float32 is.
    """
    errors = found.errors_against(truth)
    allowed = dict.fromkeys(errors, TOLERANCE)
    if any(errors[name] > allowed[name] for name in errors):
        exact = torch_step(example, torch.float64, parts=parts)
        own = truth.errors_against(exact)
        errors = found.errors_against(exact)
        allowed = {name: max(TOLERANCE, ROUNDING * own[name]) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    return worst, errors[worst], allowed[worst]


def doubled(example: Example) -> Example:
    """The same in float64."""
    return Example(
        copy.deepcopy(example.model).double(),
        {name: _cast(x, torch.float64) for name, x in example.batch.items()},
        example.loss,
        _cast(example.targets, torch.float64),
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value
