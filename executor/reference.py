"""One process of torch as the truth: the same model, the same batch, no plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stratagem.executor.result import ExecutionResult
from stratagem.simulator.plan import Plan

LOSS_NAME = "loss"

NEGLIGIBLE = 1e-5
"""Share of the largest gradient below which a gradient counts as rounding error of 0."""


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest difference over largest magnitude; 0 for two tensors of zeros.

    Example:
        >>> import torch
        >>> round(relative_error(torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0])), 3)
        0.05
    """
    difference = float((value - truth).abs().max())
    return difference / max(float(truth.abs().max()), 1e-30) if difference else 0.0


def gradient_errors(
    gradients: Mapping[str, Tensor], truths: Mapping[str, Tensor]
) -> dict[str, float]:
    """Relative errors of gradients, by name.

    A gradient that is 0 but for rounding, such as that of a bias before a batch norm, has no
    relative error of its own: below `NEGLIGIBLE` of the largest gradient of all, it is compared
    with that one.
    """
    largest = max(float(truth.abs().max()) for truth in truths.values())
    errors: dict[str, float] = {}
    for name, truth in truths.items():
        value = gradients[name].cpu()
        if float(truth.abs().max()) < NEGLIGIBLE * largest:
            errors[name] = float((value - truth).abs().max()) / largest
        else:
            errors[name] = relative_error(value, truth)
    return errors


def errors_against(
    model: nn.Module, batch: Mapping[str, Tensor], result: ExecutionResult
) -> dict[str, float]:
    """Relative errors of the loss and of every gradient of a first step, by name.

    The model takes the batch as keyword arguments; its loss is the first scalar it returns, as in
    `capture`. A model with batch norm is only equal to a plan with one microbatch, since its
    statistics are those of a microbatch.

    Raises:
        ValueError: when the result has no gradients, or lacks one that the model has.
    """
    if result.gradients is None:
        raise ValueError("the result has no gradients; run it with gradients=True")
    truth = copy.deepcopy(model)
    loss = first_scalar(truth(**batch))
    loss.backward()  # type: ignore[no-untyped-call]
    expected = loss.detach()
    truths = {
        name: parameter.grad
        for name, parameter in truth.named_parameters()
        if parameter.grad is not None
    }
    missing = truths.keys() - result.gradients.keys()
    if missing:
        raise ValueError(f"the result lacks the gradients of {', '.join(sorted(missing))}")
    return {
        LOSS_NAME: relative_error(expected.new_tensor(result.losses[0]), expected),
        **gradient_errors(result.gradients, truths),
    }


def check_comparable(plan: Plan) -> None:
    """Refuse to compare a plan with one process whose gradients are all of one version.

    Raises:
        ValueError: when weights are updated amid the plan's step.
    """
    if plan.make_schedule().update_every is not None:
        raise ValueError(
            f"plan {plan.name!r} has schedule {plan.schedule!r}, whose gradients are of several "
            "versions of the weights, and one process has but one: compare the plan under 1f1b"
        )


def first_scalar(outputs: object) -> Tensor:
    """The loss among what a model returns: the first floating-point scalar.

    Raises:
        ValueError: when there is none.
    """
    for value in pytree.tree_leaves(outputs):
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
            return value
    raise ValueError("the model returns no scalar to train; let it return its loss")
