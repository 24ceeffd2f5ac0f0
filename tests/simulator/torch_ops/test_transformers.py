"""The transformers of `graph.models` compute and cost what those of the transformers package
do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.executor import execute
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.strategies import data_parallel, replicated, tensor_parallel
from stratagem.simulator.graph import models
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import KINDS
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.torch_ops.capture.capture import capture

SIZES: dict[str, Any] = {"num_layers": 2, "hidden": 24, "vocabulary": 60, "sequence": 10}
torch.set_num_threads(1)


def one_stage(graph: OperatorGraph, choices: Choices, shape: tuple[int, ...] = (1,)) -> Plan:
    axes = tuple(MeshAxis(f"axis{i}", ways) for i, ways in enumerate(shape))
    mesh = DeviceMesh(axes, tuple(range(torch.Size(shape).numel())))
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=1),
        training=Training(),
        stages=(Stage(graph.names, mesh, choices),),
        num_microbatches=1,
        schedule="1f1b",
    )


def random_state(graph: OperatorGraph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {each.name: 0.2 * torch.randn(each.shape) for each in graph.parameters}


def random_batch(graph: OperatorGraph, vocabulary: int = 60) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {given.name: torch.randint(vocabulary, given.shape) for given in graph.inputs}


def flops(graph: OperatorGraph) -> float:
    return sum(KINDS[o.kind].flops(o, o.sizes) for o in graph.operators)


# -- Llama --------------------------------------------------------------------------------------


def llama_model(num_layers: int = 2) -> nn.Module:
    zoo = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = zoo.LlamaConfig(
        num_hidden_layers=num_layers, vocab_size=60, num_key_value_heads=2, use_cache=False,
        hidden_size=24, num_attention_heads=4, intermediate_size=40, rope_theta=500.0,
    )  # fmt: skip
    return zoo.LlamaForCausalLM(config)


def llama_graph(batch: int = 4) -> OperatorGraph:
    return models.llama(
        **SIZES, num_heads=4, num_kv_heads=2, ffn=40, batch=batch, rotary_base=500.0
    )


def our_name(name: str) -> str:
    """What a parameter of transformers' Llama is called in ours."""
    for theirs, ours in (
        (r"^model\.", ""),
        (r"embed_tokens", "embed"),
        (r"self_attn\.([qkv])_proj", r"attn.\1"),
        (r"self_attn\.o_proj", "attn.out"),
        (r"mlp\.(\w+)_proj", r"mlp.\1"),
        (r"input_layernorm", "norm_1"),
        (r"post_attention_layernorm", "norm_2"),
    ):
        name = re.sub(theirs, ours, name)
    return name


def test_llama_costs_what_the_captured_one_costs() -> None:
    graph = llama_graph()
    ids = torch.zeros(4, 10, dtype=torch.int64)
    theirs = capture(llama_model(), kwargs={"input_ids": ids, "labels": ids.clone()})
    assert graph.num_parameters == theirs.num_parameters
    assert flops(graph) == flops(theirs)
    shapes = {our_name(p.name): p.shape for p in theirs.parameters}
    assert {p.name: p.shape for p in graph.parameters} == shapes


@pytest.mark.parametrize("ways", [1, 2])
def test_llama_trains_as_that_of_transformers(ways: int) -> None:
    graph, model = llama_graph(), llama_model()
    batch = random_batch(graph)
    choices = tensor_parallel(graph, (ways,), 0)
    state = {our_name(name): value.detach() for name, value in model.named_parameters()}
    result = execute(one_stage(graph, choices, (ways,)), graph, state, batch, gradients=True)
    logits = model(input_ids=batch["input_ids"]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    truths = {our_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert result.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.gradients is not None
    assert max(gradient_errors(result.gradients, truths).values()) < 1e-4


def fused_parameter(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """A parameter of the fused Llama with 4 heads, from those of the other one."""
    layer, _, last = name.rpartition(".attn.qkv.")
    if layer:
        parts = [state[f"{layer}.attn.{part}.{last}"] for part in "qkv"]
        # With shared key heads each has its queries, itself and its values one after the other.
        groups = 1 if parts[1].shape == parts[0].shape else 2
        return torch.cat([part.reshape(groups, -1, 24) for part in parts], 1).reshape(-1, 24)
    layer, _, last = name.rpartition(".mlp.gate_up.")
    if layer:
        return torch.cat([state[f"{layer}.mlp.{part}.{last}"] for part in ("gate", "up")])
    return state[name]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("ways", [1, 2])
def test_fused_llama_trains_as_the_other(kv_heads: int, ways: int) -> None:
    sizes: dict[str, Any] = {**SIZES, "num_heads": 4, "num_kv_heads": kv_heads, "ffn": 40}
    plain, fused = (models.llama(**sizes, batch=4, fused=each) for each in (False, True))
    assert fused.num_parameters == plain.num_parameters
    state = random_state(plain)
    batch = random_batch(plain)
    expected = execute(one_stage(plain, replicated(plain, (1,))), plain, state, batch)
    together = {each.name: fused_parameter(each.name, state) for each in fused.parameters}
    choices = tensor_parallel(fused, (ways,), 0, sequence_parallel=True)
    result = execute(one_stage(fused, choices, (ways,)), fused, together, batch)
    assert result.losses[0] == pytest.approx(expected.losses[0], rel=1e-5)
    assert choices["layers.0.attn.qkv"].config != choices["layers.0.norm_1"].config


def test_llama_refuses_odd_heads() -> None:
    with pytest.raises(ValueError, match="llama: a head has 9 features"):
        models.llama(num_layers=1, hidden=18, num_heads=2, ffn=8, batch=2)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key and value heads"):
        models.llama(num_layers=1, hidden=16, num_heads=4, num_kv_heads=3, ffn=8, batch=2)


# -- GPT ----------------------------------------------------------------------------------------


def trained(graph: OperatorGraph, choices: Choices, shape: tuple[int, ...] = (1,)) -> Any:
    plan = one_stage(graph, choices, shape)
    return execute(plan, graph, random_state(graph), random_batch(graph), gradients=True)


def check_equal(one: Any, two: Any) -> None:
    assert one.losses[0] == pytest.approx(two.losses[0], rel=1e-5)
    assert max(gradient_errors(one.gradients, two.gradients).values()) < 1e-4


@pytest.mark.parametrize("positions", ["learned", "alibi", "none"])
def test_unfused_attention_computes_what_fused_does(positions: str) -> None:
    options: dict[str, Any] = {**SIZES, "num_heads": 3, "batch": 4, "positions": positions}
    fused, unfused = (models.gpt(**options, attention=each) for each in models.ATTENTIONS)
    whole = trained(fused, replicated(fused, (1,)))
    check_equal(trained(unfused, replicated(unfused, (1,))), whole)
    split = tensor_parallel(unfused, (3,), 0, sequence_parallel=True)
    assert any("head" in str(choice.config) for choice in split.values())
    check_equal(trained(unfused, split, (3,)), whole)
    check_equal(trained(fused, tensor_parallel(fused, (3,), 0), (3,)), whole)
    check_equal(trained(unfused, data_parallel(unfused, (2,)), (2,)), whole)


def test_alibi_looks_back_less_the_farther() -> None:
    """Against scores that the slopes of the paper are added to, with queries of zeros."""
    graph = models.gpt(**{**SIZES, "num_layers": 1}, num_heads=2, batch=1, positions="alibi")
    state = random_state(graph)
    state["h.0.attn.qkv.weight"][:24] = 0
    state["h.0.attn.qkv.bias"][:24] = 0
    result = execute(one_stage(graph, replicated(graph, (1,))), graph, state, random_batch(graph))
    expected = _alibi_loss(state, random_batch(graph))
    assert result.losses[0] == pytest.approx(expected, rel=1e-5)


def _alibi_loss(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> float:
    norm, linear = nn.functional.layer_norm, nn.functional.linear

    def pair(name: str) -> tuple[Tensor, Tensor]:
        return state[f"{name}.weight"], state[f"{name}.bias"]

    x = state["wte.weight"][batch["input_ids"][0]]
    y = linear(norm(x, (24,), *pair("h.0.ln_1")), *pair("h.0.attn.qkv"))
    values = y[:, 48:].reshape(10, 2, 12)
    far = torch.arange(10)[None, :] - torch.arange(10)[:, None]
    mixed = []
    for head, slope in enumerate((2.0**-4, 2.0**-8)):
        scores = (slope * far).masked_fill(far > 0, float("-inf"))
        mixed.append(scores.softmax(-1) @ values[:, head])
    x = x + linear(torch.cat(mixed, -1), *pair("h.0.attn.out"))
    up = linear(norm(x, (24,), *pair("h.0.ln_2")), *pair("h.0.mlp.up"))
    x = x + linear(nn.functional.gelu(up, approximate="tanh"), *pair("h.0.mlp.down"))
    logits = norm(x, (24,), *pair("ln_f")) @ state["wte.weight"].T
    return float(nn.functional.cross_entropy(logits, batch["labels"][0]))


def test_parameters_of_options() -> None:
    """MPT's of 70 billion as published, and what each option adds or leaves out."""
    mpt = models.gpt(
        num_layers=80, hidden=8192, num_heads=64, vocabulary=50368, sequence=2048, batch=1
    )
    assert mpt.num_parameters == 64_862_437_376
    base = models.gpt(**SIZES, num_heads=3, batch=2).num_parameters

    def more(**options: Any) -> int:
        return models.gpt(**SIZES, num_heads=3, batch=2, **options).num_parameters - base

    assert more(fused_qkv=False) == more(attention="unfused") == more(dropout=0.1) == 0
    assert more(positions="none") == more(positions="alibi") == -24 * 10
    assert more(bias=False) == -2 * (9 + 2) * 24 - 24
    assert more(ffn=100) == 2 * (2 * 24 + 1) * 4


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("gpt: no attention 'sparse'; there are flash, unfused", {"attention": "sparse"}),
        ("gpt: no positions 'sine'; there are learned, alibi, none", {"positions": "sine"}),
        ("gpt: dropout is 1.0; it is a probability", {"dropout": 1.0}),
        ("gpt: ffn is 0", {"ffn": 0}),
    ],
)
def test_impossible_options_are_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        models.gpt(**SIZES, num_heads=3, batch=2, **options)
