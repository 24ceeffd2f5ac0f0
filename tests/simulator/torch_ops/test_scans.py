"""Selective scans: chunks are the loop over time, and Mambas of transformers have one a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.simulator.operators.kinds.attentions import SCAN_CHUNK
from stratagem.simulator.operators.operator import DimKind
from stratagem.simulator.torch_ops.blocks import module_rules
from stratagem.simulator.torch_ops.blocks.scans import selective_scan
from tests.support.operators.kernel_cases import step_by_step
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    drawing,
    few,
    make_case,
    make_plan,
    sharding,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4, "time_step_rank": 3},
    "FalconMamba": {"state_size": 4, "time_step_rank": 3},
    "Jamba": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 4,
        "expert_layer_offset": 3,
    },
}


def operands(times: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, dt, a, b and c of 2 samples, 3 channels and 4 states."""
    torch.manual_seed(times)
    x, b, c = (torch.randn(2, n, times, dtype=dtype) for n in (3, 4, 4))
    dt, a = torch.rand(2, 3, times, dtype=dtype), -torch.rand(3, 4, dtype=dtype)
    return [each.requires_grad_() for each in (x, dt, a, b, c)]


@pytest.mark.parametrize("times", [1, 2, 7, SCAN_CHUNK - 1, SCAN_CHUNK, SCAN_CHUNK + 1, 150])
def test_chunks_are_the_loop_over_time(times: int) -> None:
    given = operands(times)
    weights = torch.randn(2, 3, times, dtype=torch.float64)
    truth, made = step_by_step(*given), selective_scan(*given)
    torch.testing.assert_close(made, truth, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((truth * weights).sum(), given)
    found = torch.autograd.grad((made * weights).sum(), given)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


def test_states_are_float32_where_sequences_are_not() -> None:
    """A sum of hundreds of steps in bfloat16 would be off by percents."""
    given = [each.detach().to(torch.bfloat16) for each in operands(200)]
    truth = step_by_step(*(each.double() for each in given))
    made = selective_scan(*given)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), truth, rtol=1e-2, atol=1e-2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, dt, a, b, c = operands(5)
    with pytest.raises(ValueError, match=r"b has shape \(2, 3, 5\).*must be \(2, 4, 5\)"):
        selective_scan(x, dt, a, b[:, :3], c)


def mamba(family: str, times: int, **changes: Any) -> Case:
    zoo = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
    config = getattr(zoo, f"{family}Config")(**{**sizes, **FAMILIES[family], **changes})
    tokens = torch.randint(40, (4, times))
    model: nn.Module = getattr(zoo, f"{family}ForCausalLM")(config)
    return make_case(model, input_ids=tokens, labels=tokens.clone())


def test_the_state_that_a_cache_keeps_is_that_of_transformers() -> None:
    """Jamba asks for it in training too."""
    home = pytest.importorskip("transformers.models.jamba.modeling_jamba")
    x, dt, a, b, c = (each.detach() for each in operands(SCAN_CHUNK + 9, torch.float32))
    truth, state = home.mamba_selective_scan(x, dt, a, b, c, return_last_state=True)
    made, last = module_rules._scan(x, dt, a, b, c, return_last_state=True)
    torch.testing.assert_close(made, truth)
    torch.testing.assert_close(last, state)


@pytest.mark.parametrize("family", few(FAMILIES, 1))
def test_mambas_of_transformers_have_one_scan_a_layer(family: str) -> None:
    """Their loop over time was six operators a step, 12,000 for a layer of 2,048 tokens."""
    case = mamba(family, 12)
    scans = [each for each in case.graph.operators if each.kind == "selective_scan"]
    assert len(scans) == (1 if family == "Jamba" else 2)
    assert len(case.graph.operators) == len(mamba(family, 24).graph.operators)
    assert {dim.name for dim in scans[0].dims if not dim.whole} >= {"sample"}
    assert sum(not dim.whole for dim in scans[0].dims) == 2
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=2))
    for seed in (1, 2):
        assert_equal_to_torch(case, make_plan(case, drawing(seed), ((2,), (2, 2))[seed - 1]))


class Written(nn.Module):
    """A model of one's own that calls the scan, whose channels are split."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.dt = nn.Linear(6, 8), nn.Linear(6, 8)
        self.b, self.c = nn.Linear(6, 3), nn.Linear(6, 3)
        self.a = nn.Parameter(torch.rand(8, 3))
        self.out = nn.Linear(8, 5)

    def forward(self, h: Tensor) -> Tensor:
        x, b, c = (each(h).mT for each in (self.x, self.b, self.c))
        dt = nn.functional.softplus(self.dt(h)).mT
        made = selective_scan(x, dt, -torch.exp(self.a), b, c)
        return self.out(made.mT).square().mean()


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_calls_it_trains_like_torch(seed: int) -> None:
    torch.manual_seed(0)
    case = make_case(Written(), h=torch.randn(6, 70, 6))
    (scan,) = (each for each in case.graph.operators if each.kind == "selective_scan")
    assert [dim.whole for dim in scan.dims if dim.whole] == [
        "all of them are summed up",
        "the recurrence runs along it",
    ]
    assert_equal_to_torch(case, make_plan(case, drawing(seed), ((2,), (4,), (2, 2))[seed]))
