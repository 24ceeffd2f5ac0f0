"""Selective scans in plain PyTorch: a function for models to be written with, which capture reads.

    states decay by exp(dt · a) and take up dt · b · x; c says what is seen of them

A loop over a sequence would be thousands of operators, each of its own; torch.export keeps this
one as a call.
"""

from __future__ import annotations

from torch import Tensor

from stratagem.simulator.torch_ops.kernels.scans import scan_call

__all__ = ["selective_scan"]


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The recurrence of Mamba (Gu and Dao 2023, arXiv 2312.00752) along a sequence.

    ``h(t) = exp(dt(t) · a) · h(t − 1) + dt(t) · b(t) · x(t)``, from 0, and y is the sum of
    ``c(t) · h(t)`` over the states. What a model adds (softplus of dt, D · x, a gate) stays
    outside.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1, 3)
        >>> selective_scan(one, one, torch.zeros(1, 1), one, one).flatten().tolist()
        [1.0, 2.0, 3.0]

    Args:
        x: (sample, channel, time).
        dt: likewise, the length of each step.
        a: (channel, state), below 0 for states that fade.
        b: (sample, state, time).
        c: likewise.

    Returns:
        (sample, channel, time), in the dtype of x.

    Raises:
        ValueError: the shapes do not fit.
    """
    samples, channels, times = x.shape
    states = a.shape[-1]
    wanted = {
        "dt": (dt, (samples, channels, times)),
        "a": (a, (channels, states)),
        "b": (b, (samples, states, times)),
        "c": (c, (samples, states, times)),
    }
    for name, (given, shape) in wanted.items():
        if given.shape != shape:
            raise ValueError(
                f"selective_scan: {name} has shape {tuple(given.shape)}; beside x of "
                f"{tuple(x.shape)} and {states} states it must be {shape}"
            )
    made: Tensor = scan_call(x, dt, a, b, c)
    return made
