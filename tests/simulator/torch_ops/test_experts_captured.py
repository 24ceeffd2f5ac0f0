"""Mixtures of experts from modules: those of transformers, and blocks that users write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stratagem as sg
from stratagem.searcher.space.strategies import expert_dims, expert_parallel
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.torch_ops.blocks import experts
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    chosen,
    crossed,
    drawing,
    few,
    make_case,
    make_plan,
    random_plan,
    slowly,
    whole,
)

TOKENS, SAMPLES, EXPERTS = 12, 4, 4
SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
SIZES |= {"num_experts_per_tok": 2, "max_position_embeddings": 32}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 40, "norm_topk_prob": True}

OTHERS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 0,
    },
    "GptOss": {"head_dim": 6, "num_local_experts": EXPERTS, "sliding_window": 4},
    "GraniteMoe": {"num_local_experts": EXPERTS},
}
"""Families whose blocks route by themselves."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
torch.set_num_threads(1)


def hugging_face(family: str, **changes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = pytest.importorskip("transformers")
    own: dict[str, Any] = {"intermediate_size": 40}
    if family == "Mixtral":
        own |= {"num_local_experts": EXPERTS}
    elif family in OTHERS:
        own |= OTHERS[family]
    elif family == "Qwen3Moe":
        own = {**QWEN, "head_dim": 6}
    else:
        own |= {"num_experts": EXPERTS, "norm_topk_prob": True, "eos_token_id": 2}
    torch.manual_seed(0)
    config = getattr(zoo, f"{family}Config")(**{**SIZES, **own, **changes})
    tokens = torch.randint(60, (SAMPLES, TOKENS))
    model = getattr(zoo, f"{family}ForCausalLM")(config)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def kinds(case: Case) -> list[str]:
    return [each.kind for each in case.graph.operators if each.module.endswith("layers.0.mlp")]


# -- transformers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3Moe", "Olmoe"])
def test_blocks_of_transformers_are_mixtures_that_drop_nothing(family: str) -> None:
    """Mixtral's too, among the examples."""
    model, batch = hugging_face(family, num_hidden_layers=1)
    case = make_case(model, **batch)
    made = [kind for kind in kinds(case) if kind != "elementwise"]
    assert made == ["softmax", "moe_dispatch", "expert_linear", "expert_linear", "moe_combine"]
    assert case.graph.operator("model.layers.0.mlp.dispatch").sizes["slot"] == TOKENS
    assert_equal_to_torch(case, make_plan(case, whole, (1,)))


@pytest.mark.parametrize("family", [*slowly("Qwen3Moe"), "Olmoe"])
def test_gates_that_are_not_divided_by_their_sum_stay_so(family: str) -> None:
    model, batch = hugging_face(family, num_hidden_layers=1, norm_topk_prob=False)
    case = make_case(model, **batch)
    assert "moe_combine" in kinds(case)
    assert not case.graph.whole_batch
    assert_equal_to_torch(case, make_plan(case, drawing(1), (2,)))


@pytest.mark.filterwarnings("ignore:capture. so that no token is dropped")
@pytest.mark.parametrize("family", few(OTHERS, 1))
def test_blocks_that_route_by_themselves_split_samples_and_experts(family: str) -> None:
    """Their sorts over the tokens of all samples kept the batch whole."""
    model, batch = hugging_face(family, num_hidden_layers=1)
    case = make_case(model, **batch)
    assert not case.graph.whole_batch
    assert "expert_linear" in {each.kind for each in case.graph.operators}
    assert_equal_to_torch(case, make_plan(case, drawing(1), (2,), num_microbatches=2))
    choices = expert_parallel(case.graph, (2,), zero=1)
    assert len(expert_dims(case.graph)) >= 2
    assert_equal_to_torch(case, make_plan(case, chosen(choices), (2,)))


def test_a_block_that_may_scale_choices_to_be_negative_is_left_as_it_is() -> None:
    """Gates say which experts are chosen by being the largest ones, so none may be below 0."""
    model, batch = hugging_face("GptOss", num_hidden_layers=1)
    router = model.get_submodule("model.layers.0.mlp.router")
    router.register_parameter("scale", nn.Parameter(torch.ones(EXPERTS)))
    case = make_case(model, **batch)
    assert "expert_linear" not in {each.kind for each in case.graph.operators}


@pytest.mark.parametrize(("shape", "microbatches"), [((4,), 1), ((2,), 2)])
def test_experts_of_transformers_can_be_shared_out(
    shape: tuple[int, ...], microbatches: int
) -> None:
    model, batch = hugging_face("Mixtral", num_hidden_layers=1)
    case = make_case(model, **batch)
    choices = expert_parallel(case.graph.microbatch(microbatches), shape, zero=1)
    assert len(expert_dims(case.graph)) == 3
    plan = make_plan(case, chosen(choices), shape, num_microbatches=microbatches)
    assert_equal_to_torch(case, plan)


def test_fewer_slots_on_request() -> None:
    """The truth is plain torch, token by token; without the limit the loss is another one."""
    changes = {"num_hidden_layers": 1, "initializer_range": 0.5}
    model, batch = hugging_face("Mixtral", **changes)
    dropless = float(model(**batch).loss.detach())
    sg.experts.limit_capacity(model, 0.75)
    case = make_case(model, **batch)
    slots = case.graph.operator("model.layers.0.mlp.dispatch").sizes["slot"]
    assert slots == 5  # 0.75 · 2 · 12 / 4, rounded up
    result = sg.execute(make_plan(case, whole, (1,)), model, batch, graph=case.graph)
    block = model.get_submodule("model.layers.0.mlp")
    block.forward = lambda x: _by_token(block, x, slots)  # type: ignore[method-assign]
    assert result.losses[0] == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5)
    assert abs(result.losses[0] / dropless - 1) > 1e-3


def _by_token(block: Any, x: Tensor, slots: int) -> Tensor:
    """A block token by token, first choices first."""
    gates = functional.linear(x, block.gate.weight).softmax(-1)
    best, index = gates.topk(2)
    total = torch.zeros_like(x)
    for sample in range(len(x)):
        used = [0] * gates.shape[-1]
        for choice in range(2):
            for token in range(x.shape[1]):
                expert = int(index[sample, token, choice])
                used[expert] += 1
                if used[expert] <= slots:
                    gate_up = block.experts.gate_up_proj[expert] @ x[sample, token]
                    gate, up = gate_up.chunk(2)
                    made = block.experts.down_proj[expert] @ (functional.silu(gate) * up)
                    share = best[sample, token, choice] / best[sample, token].sum()
                    total[sample, token] += share * made
    return total


@pytest.mark.parametrize(
    ("tokens", "top_k", "near"), [(64, 1, 0.05), (512, 2, 0.02), (256, 7, 0.02)]
)
def test_slots_are_priced_by_what_the_busiest_expert_is_expected_to_fill(
    tokens: int, top_k: int, near: float
) -> None:
    """Against choices drawn at random; on half of the experts it is a little less."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6, 5))

        def forward(self, x: Tensor, scores: Tensor) -> Tensor:
            slots = experts.dispatch(x, scores, top_k=top_k, capacity=tokens)
            made = experts.linear(slots, self.weight, gates=scores, top_k=top_k)
            return experts.combine(made, scores, top_k=top_k).square().mean()

    torch.manual_seed(0)
    batch = {"x": torch.randn(4, tokens, 6), "scores": torch.rand(4, tokens, 8)}
    operator = capture(Block(), kwargs=batch).operator("weight")
    kind = kind_of(operator)
    drawn = torch.rand(200, 4, tokens, 8).argsort(-1)[..., :top_k]
    counts = functional.one_hot(drawn, 8).sum((-2, -3))
    for held in (8, 4):
        busiest = float(counts[..., :held].amax((-1, -2)).double().mean())
        sizes = {**operator.sizes, "expert": held}
        assert kind.flops(operator, sizes) == pytest.approx(
            2 * 4 * held * busiest * 6 * 5, rel=near
        )
        assert kind.product is not None
        assert kind.product.shape(operator, sizes)[0] == pytest.approx(4 * busiest, rel=near)


def test_slots_for_all_tokens_are_announced() -> None:
    model, batch = hugging_face("Mixtral", num_local_experts=8)
    said = r"2 blocks \(such as 'model.layers.0.mlp'\) have 4 times the slots"
    with pytest.warns(UserWarning, match=said):
        capture(model, kwargs=batch)
    sg.experts.limit_capacity(model, 1.0)
    capture(model, kwargs=batch)


@pytest.mark.parametrize(
    ("message", "family", "changes"),
    [
        ("router_jitter_noise is 0.1", "Mixtral", {"router_jitter_noise": 0.1}),
    ],
)
def test_what_a_plan_cannot_do_is_refused(
    message: str, family: str, changes: dict[str, Any]
) -> None:
    model, batch = hugging_face(family, **changes)
    with pytest.raises(ValueError, match=message):
        capture(model.train(), kwargs=batch)
    assert all("forward" not in vars(each) for each in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("family", few(["Mixtral", "Qwen3Moe", "Olmoe"], 1))
def test_losses_of_routers_are_those_of_torch(family: str) -> None:
    """They divide by the rows of a router's logits, which were samples instead of tokens."""
    model, batch = hugging_face(family, output_router_logits=True)
    case = make_case(model.train(), **batch)
    assert case.graph.whole_batch
    assert_equal_to_torch(case, make_plan(case, drawing(1), (2,)))


def test_impossible_factors_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no block of experts that capture knows; it"):
        sg.experts.limit_capacity(nn.Linear(2, 2), 1.25)
    with pytest.raises(ValueError, match="the factor is 0; it must be above 0"):
        sg.experts.limit_capacity(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="10 tokens cannot choose 5 of 4 experts"):
        experts.capacity(10, 4, 5)
    assert experts.capacity(10, 4, 2) == 10 == experts.capacity(10, 4, 2, 8.0)


# -- blocks that users write --------------------------------------------------------------------


class OwnBlock(nn.Module):
    """Top-2 experts with biases and too few slots, in the functions of `experts`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 10))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 10))
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, 10))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        slots = experts.dispatch(x, gates, top_k=2, capacity=5)
        y = functional.gelu(experts.linear(slots, self.up, self.up_bias))
        return experts.combine(experts.linear(y, self.down.mT), gates, top_k=2)


class OwnModel(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(6, 6), block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (x + self.block(x)).square().mean()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(SAMPLES, 8, 6)}


@pytest.mark.parametrize("seed", crossed(range(4), every=2))
def test_a_block_of_ones_own(batch: dict[str, Tensor], seed: int) -> None:
    torch.manual_seed(0)
    case = make_case(OwnModel(OwnBlock()), **batch)
    names = [o.name for o in case.graph.operators if o.kind == "expert_linear"]
    assert names == ["block.up", "block.down"]
    assert_equal_to_torch(case, random_plan(case, seed))


def test_gradients_of_the_functions() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(2, 5, EXPERTS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(EXPERTS, 4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(EXPERTS, 4, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor, gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        slots = experts.dispatch(x, gates, top_k=2, capacity=2)
        return experts.combine(experts.linear(slots, weight.mT, bias), gates, top_k=2)

    def dropless(x: Tensor, gates: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        slots = experts.dispatch(x, gates, top_k=2, capacity=5)
        made = experts.linear(slots, weight.mT, bias, gates=gates, top_k=2)
        return experts.combine(made, gates, top_k=2)

    for each in (forward, dropless):
        assert torch.autograd.gradcheck(each, (x, gates, weight, bias))
    slots = torch.randn(2, EXPERTS, 2, 3, dtype=torch.float64)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for call, given in (
        (experts._dispatch, (x, gates, 2, 2)),
        (experts._linear, (slots, weight.mT, bias, None, 1)),
        (experts._linear, (slots, weight.mT, bias, gates.detach()[:, :2], 2)),
        (experts._combine, (slots, gates, 2)),
    ):
        torch.library.opcheck(call, given, test_utils=checks)


def test_impossible_choices_are_refused() -> None:
    x, gates = torch.ones(1, 3, 2), torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match="5 of 4 experts with 1 slots each"):
        experts.dispatch(x, gates, top_k=5, capacity=1)
    with pytest.raises(ValueError, match="1 of 4 experts with 0 slots each"):
        experts.combine(torch.ones(1, 4, 0, 2), gates, top_k=1)


class Foreign(nn.Module):
    """A block that capture cannot read: it looks at which experts were hit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        best, index = self.router(x).softmax(-1).topk(1)
        total = torch.zeros_like(x)
        for expert in index.unique():
            sample, token, _ = (index == expert).nonzero(as_tuple=True)
            total[sample, token] = x[sample, token] @ self.weight[expert]
        return total * (best / best.sum(-1, keepdim=True))


def read_as(block: Any, x: Tensor) -> Tensor:
    gates = block.router(x).softmax(-1)
    slots = experts.dispatch(x, gates, top_k=1, capacity=x.shape[1])
    return experts.combine(experts.linear(slots, block.weight), gates, top_k=1)


def test_a_rule_for_a_block_of_others(batch: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    model = OwnModel(Foreign())
    with pytest.raises(ValueError, match="depends on the values"):
        capture(model, kwargs=batch)
    case = Case(model, batch, capture(model, kwargs=batch, rules={Foreign: read_as}))
    # gate 1 of 1 chosen: no gradient reaches the router, in torch neither
    assert_equal_to_torch(case, make_plan(case, whole, (1,)))
    assert_equal_to_torch(case, random_plan(case, 2))


def test_a_subclass_with_a_forward_of_its_own_is_not_covered(batch: dict[str, Tensor]) -> None:
    class Other(Foreign):
        def forward(self, x: Tensor) -> Tensor:
            return self.router(x) @ self.weight[:, 0]

    graph = capture(OwnModel(Other()), kwargs=batch, rules={Foreign: read_as})
    assert "expert_linear" not in {operator.kind for operator in graph.operators}
