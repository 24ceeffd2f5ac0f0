"""One process of torch as the truth: the same model, the same batch, no plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from stratagem.executor.run import ExecutionResult

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

    The model takes the batch as keyword arguments and returns its loss. A model with batch norm is
    only equal to a plan with one microbatch, since statistics are those of a microbatch.

    Raises:
        ValueError: when the result has no gradients.
    """
    if result.gradients is None:
        raise ValueError("the result has no gradients; run it with gradients=True")
    truth = copy.deepcopy(model)
    loss: Tensor = truth(**batch)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = loss.detach()
    truths = {
        name: parameter.grad
        for name, parameter in truth.named_parameters()
        if name in result.gradients and parameter.grad is not None
    }
    return {
        LOSS_NAME: relative_error(expected.new_tensor(result.losses[0]), expected),
        **gradient_errors(result.gradients, truths),
    }
