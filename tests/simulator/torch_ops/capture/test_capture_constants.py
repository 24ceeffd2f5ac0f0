"""Capture looks at constants: masks that hide nothing or the future, and choices always made."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.simulator.torch_ops.aten.expressions import compact, mask_meaning
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import (
    assert_equal_to_torch,
    drawing,
    make_case,
    make_plan,
    sharding,
    whole,
)

SAMPLES, HEADS, ROWS, COLUMNS, FEATURES = 4, 2, 5, 5, 6


class Biased(nn.Module):
    """Attention with a learned bias that a constant mask may hide, as T5 has it."""

    def __init__(self, *, hides: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, ROWS, COLUMNS))
        self.into = nn.Linear(FEATURES, HEADS * FEATURES)
        self.hides = hides

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.into(x).view(SAMPLES, ROWS, HEADS, FEATURES).transpose(1, 2)
        past = (
            torch.arange(COLUMNS, device=x.device) <= torch.arange(ROWS, device=x.device)[:, None]
        )
        seen = past if self.hides == "future" else past | True
        if self.hides == "all":
            seen = past & False
        wide = seen.expand(SAMPLES, 1, ROWS, COLUMNS)
        mask = torch.where(wide, self.bias, -1e4)
        mixed = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return functional.cross_entropy(mixed.transpose(1, 2).flatten(2).mean(1), labels)


@pytest.mark.parametrize(
    ("hides", "choosing"), [("nothing", False), ("future", True), ("all", True)]
)
def test_a_choice_that_is_always_made_is_no_operator(hides: str, choosing: bool) -> None:
    torch.manual_seed(0)
    labels = torch.randint(HEADS * FEATURES, (SAMPLES,))
    case = make_case(Biased(hides=hides), x=torch.randn(SAMPLES, ROWS, FEATURES), labels=labels)
    kinds = [
        step[0]
        for operator in case.graph.operators
        if operator.kind == "elementwise"
        for step in operator.attributes["steps"]
    ]
    assert ("where" in kinds) is choosing
    assert_equal_to_torch(case, make_plan(case, whole, (1,)))
    assert_equal_to_torch(case, make_plan(case, sharding("sample"), (2,)))


class Extremes(nn.Module):
    """The smaller and the larger of two tensors, and of positions."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(6, device=x.device)
        shared = torch.max(places, torch.full_like(places, 3)) - torch.min(places, places.flip(0))
        return (torch.min(x, y) * torch.max(x, 2 * y) * shared).mean()


def test_extremes_of_two_tensors() -> None:
    torch.manual_seed(0)
    model, x, y = Extremes(), torch.randn(4, 6), torch.randn(4, 6)
    case = make_case(_scaled(model), x=x, y=y)
    assert_equal_to_torch(case, make_plan(case, sharding("sample"), (2,)))


def _scaled(model: nn.Module) -> nn.Module:
    """With a parameter, so that there is something to train."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.inner(x * self.scale, y)
            return loss

    return Scaled()


def test_an_extreme_over_a_dim_is_refused() -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.max(x, 1).values.mean()

    with pytest.raises(ValueError, match=r"aten.max.*an extreme over dims is not supported"):
        capture(Largest(), (torch.randn(3, 4),), fallback=False)


def test_compact_keeps_one_of_what_is_repeated() -> None:
    x = torch.arange(5.0)[:, None].expand(3, 5, 7)
    assert compact(x).shape == (1, 5, 1)
    assert torch.equal(compact(x).expand(3, 5, 7), x)


@pytest.mark.parametrize(
    ("mask", "meaning"),
    [
        (torch.ones(1, 1, dtype=torch.bool).expand(5, 5), "all"),
        (torch.ones(5, 5, dtype=torch.bool).tril().expand(3, 1, 5, 5), "causal"),
        (torch.ones(1, 5, dtype=torch.bool).triu(2).expand(5, 5), "other"),
        (torch.ones(5, 5, dtype=torch.bool).triu(), "other"),
        (torch.zeros(()).expand(5, 5), "all"),
    ],
)
def test_masks_mean_the_same_however_they_are_stored(mask: Tensor, meaning: str) -> None:
    assert mask_meaning(mask, (5, 5)) == mask_meaning(mask.contiguous(), (5, 5)) == meaning


def test_large_masks_take_little_memory() -> None:
    """One of 2²⁸ elements, spread over samples and heads, is worked out on one square."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(8, 16 * 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x).view(64, 512, 16, 8).transpose(1, 2)
            seen = torch.ones(512, 512, dtype=torch.bool, device=x.device).tril()
            mask = torch.where(seen.expand(64, 16, 512, 512), 0.0, -torch.inf)
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).mean()

    with torch.device("meta"):
        model, x = Masked(), torch.zeros(64, 512, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(model, (x,))
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert graph.operator("attention").attributes["causal"]
    assert more < 256 * 1024, "KiB"


def test_conditions_of_padding_are_looked_at_on_one_square(monkeypatch) -> None:
    """The capture of T5 took nine seconds to see that masks of all heads never choose."""
    looked_at: list[int] = []
    whole = Tensor.any
    monkeypatch.setattr(Tensor, "any", lambda x: looked_at.append(x.numel()) or whole(x))

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            seen = torch.ones(32, 32, dtype=torch.bool, device=x.device)
            return torch.where(seen.expand(16, 8, 32, 32), x, 0.0 * x).mean()

    graph = capture(Chooses(), (torch.zeros(16, 8, 32, 32),))
    assert set(looked_at) == {32 * 32}
    chosen = [op for op in graph.operators if "where" in str(op.attributes.get("steps", ""))]
    assert chosen == []


class Outer(nn.Module):
    """Computes beside its submodules, and has no loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2.0)


def test_operators_of_the_outer_model_are_captured_under_a_loss() -> None:
    graph = capture(
        Outer(),
        (torch.randn(5, 4),),
        loss=functional.cross_entropy,
        targets=torch.randint(3, (5,)),
    )
    names = [operator.name for operator in graph.operators]
    assert {"mul", "inner", "cross_entropy"} <= set(names)


class Numbers(nn.Module):
    """Makes tensors of numbers on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        scale = torch.tensor([0.5, 2.0, 3.0], device=x.device) * torch.tensor(2.0, device=x.device)
        least = torch.tensor(torch.finfo(h.dtype).min, dtype=h.dtype, device=x.device)
        h = torch.where(h > 0, h, least.clamp(min=-1.0)) * scale
        return h[:, [0, 2]].square().mean() + h[..., [-1]].mean() + torch.as_tensor(3).to(h)


def test_numbers_are_not_lost_where_nothing_is_computed() -> None:
    """On the meta device tensors of numbers have none, and capture ended as it read them."""
    x = torch.randn(4, 4)
    case = make_case(Numbers(), x=x)
    there = replace(case, graph=capture(Numbers().to("meta"), (x.to("meta"),)))
    assert_equal_to_torch(there, make_plan(there, whole, (1,)))
    assert_equal_to_torch(case, make_plan(case, drawing(2), (3,)))


def test_a_tensor_that_lost_its_numbers_is_refused() -> None:
    class Made(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.ones(3, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.made).mean()

    with pytest.raises(ValueError, match=r"test_capture_constants.*\(3,\) .*on the meta device"):
        capture(Made().to("meta"), (torch.randn(4, 4),))
