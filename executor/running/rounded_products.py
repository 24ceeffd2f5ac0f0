"""Products of one process of torch whose operands are rounded first, as a plan's may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stratagem.simulator.torch_ops.kernels.run_kernel import rounded

_OPERANDS: tuple[tuple[Any, str, tuple[int, ...]], ...] = (
    (functional, "linear", (0, 1)),
    *((functional, f"conv{places}d", (0, 1)) for places in (1, 2, 3)),
    *((functional, f"conv_transpose{places}d", (0, 1)) for places in (1, 2, 3)),
    (functional, "scaled_dot_product_attention", (0, 1, 2)),
    (torch, "addmm", (1, 2)),
    (torch, "einsum", (1, 2)),
    *((torch, name, (0, 1)) for name in ("matmul", "mm", "bmm")),
    *((Tensor, name, (0, 1)) for name in ("matmul", "mm", "bmm", "__matmul__")),
)
"""Where torch keeps functions that multiply, and which of their arguments."""


@contextmanager
def rounded_products(products: str) -> Iterator[None]:
    """Let torch round the operands of products; of no format it leaves them as they are.

    Example:
        >>> with rounded_products("bfloat16"):
        ...     torch.tensor([[1.001]]) @ torch.tensor([[1.0]])
        tensor([[1.]])
    """
    if not products:
        yield
        return
    before = [(home, name, getattr(home, name), places) for home, name, places in _OPERANDS]
    try:
        for home, name, multiply, places in before:
            setattr(home, name, _rounding(multiply, places, products))
        yield
    finally:
        for home, name, multiply, _ in before:
            setattr(home, name, multiply)


def _rounding(
    multiply: Callable[..., Tensor], places: tuple[int, ...], products: str
) -> Callable[..., Tensor]:
    @wraps(multiply)
    def rounding(*given: Any, **named: Any) -> Tensor:
        operands = (
            rounded(each, products) if place in places else each
            for place, each in enumerate(given)
        )
        return multiply(*operands, **named)

    return rounding
