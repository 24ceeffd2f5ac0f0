"""The file of what a forward pass gave back."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.simulator.base.files import atomic_path


def save_outputs(result: ExecutionResult, path: str | Path) -> None:
    """Write the outputs of a result as safetensors, by their names.

    Example:
        >>> save_outputs(sg.execute(plan, model, batch), "logits.safetensors")  # doctest: +SKIP

    Raises:
        ValueError: the result has none, as that of training, or that of a rank other than 0.
        OSError: the file cannot be written.
    """
    if result.outputs is None:
        raise ValueError(
            f"the result of plan {result.plan!r} has no outputs to write to {path}: a training "
            "step has a loss; capture the model with forward=True"
        )
    whole = {name: tensor.contiguous() for name, tensor in result.outputs.items()}
    with atomic_path(path) as temporary:
        save_file(whole, temporary)
