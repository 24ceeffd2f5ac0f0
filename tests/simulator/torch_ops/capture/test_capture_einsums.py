"""Einsums of two tensors are products, whose letters are dims."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.plans import assert_equal_to_torch, drawing, make_case, make_plan

torch.set_num_threads(1)


class Lettered(nn.Module):
    """Attention as XLNet writes it, samples in the second place."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Parameter(torch.randn(8, 2, 4)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = torch.einsum("ibh,hnd->ibnd", x.transpose(0, 1), self.into)
        scores = torch.einsum("ibnd,jbnd->bnij", q, q).softmax(-1)
        made = torch.einsum("ibnd,hnd->ibh", torch.einsum("bnij,jbnd->ibnd", scores, q), self.out)
        return functional.mse_loss(made.transpose(0, 1), y)


@pytest.mark.parametrize("seed", range(3))
def test_einsums_are_products_split_along_any_letter(seed: int) -> None:
    torch.manual_seed(0)
    case = make_case(Lettered(), x=torch.randn(6, 5, 8), y=torch.randn(6, 5, 8))
    kinds = [operator.kind for operator in case.graph.operators]
    assert kinds.count("matmul") == 4
    assert not any("generic" in kind for kind in kinds)
    assert not case.graph.whole_batch
    assert_equal_to_torch(case, make_plan(case, drawing(seed), (2 + seed % 2,)))
