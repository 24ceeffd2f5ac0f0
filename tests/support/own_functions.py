"""A function with a backward of its own, in a module that other processes can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Doubled(torch.autograd.Function):
    """Hands on what it is given, and gradients so many times."""

    @staticmethod
    def forward(ctx: Any, none: None, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.times * gradient, None


class Doubling(nn.Module):
    """Two layers with it between them."""

    def __init__(self, function: Any = Doubled) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.function.apply(None, self.up(x), 2.0)).square().mean()
        return made
