"""Captured graphs mean what the torch model means: their plain evaluation gives its loss."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.operators.kinds.operator_kinds import KINDS
from stratagem.simulator.operators.operator import (
    DimKind,
    Input,
    Operator,
    Weight,
    factor_sizes,
    factors,
    shape_of,
)
from stratagem.simulator.operators.step_programs import (
    SOURCE_FUNCTIONS,
    STEP_FUNCTIONS,
    is_reference,
)
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import assert_equal_to_torch, drawing, make_case, make_plan

_SPEC = importlib.util.spec_from_file_location(
    "example_models", Path(__file__).parents[4] / "examples" / "models.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
models = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(models)

# ---- a plain evaluation of graphs, written against the conventions of the rule table alone ----


def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask, torch.tensor(value, dtype=x.dtype), x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "alias": lambda x: x,
    "masked_fill": _masked_fill,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda x: ~x,
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": lambda x, approximate: functional.gelu(x, approximate=approximate),
    "cast": lambda x, dtype: x.to(getattr(torch, dtype)),
    "arange": lambda a, b, step, dtype: torch.arange(a, b, step, dtype=getattr(torch, dtype)),
    "full": lambda shape, v, dtype: torch.full(shape, v, dtype=getattr(torch, dtype)),
    "tensor": lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype)),
    "view": lambda x, shape: x.reshape(shape),
    "expand": lambda x, shape: x.expand(shape),
    "slice": lambda x, dim, start, stop, step: x.narrow(dim, start, stop - start)[:],
    "pad": lambda x, amounts, value: functional.pad(x, amounts, value=value),
    "index": lambda x, indices: x[tuple(slice(None) if i is None else i for i in indices)],
    "sum": lambda x, dims, keep: x.sum() if dims is None else x.sum(dims, keep),
    "cat": lambda xs, dim: torch.cat(xs, dim),
}


def run_steps(steps: list[Any], known: dict[tuple[str, Any], Tensor]) -> Tensor:
    results = dict(known)

    def value(argument: Any) -> Any:
        if is_reference(argument):
            return results[argument[0], argument[1]]
        return [value(each) for each in argument] if isinstance(argument, list) else argument

    for position, (name, arguments) in enumerate(steps):
        function = _FUNCTIONS.get(name) or getattr(torch, name)
        results["step", position] = function(*(value(each) for each in arguments))
    return results["step", len(steps) - 1]


class Evaluation:
    """All tensors of a graph, one axis per factor."""

    def __init__(self, graph: OperatorGraph, feeds: dict[str, Tensor], stored: dict[str, Tensor]):
        self.graph, self.feeds, self.stored = graph, feeds, stored
        self.made: dict[tuple[str, int], Tensor] = {}
        for operator in graph.operators:
            made = getattr(self, operator.kind)(operator)
            layout = operator.outputs[0].layout
            assert tuple(made.shape) == shape_of(layout, operator.sizes), operator.name
            assert str(made.dtype) == f"torch.{operator.outputs[0].dtype}", operator.name
            self.made[operator.name, 0] = made.reshape(factor_sizes(layout, operator.sizes))
        self.loss = self.made[graph.loss, 0]

    def read(self, operator: Operator, read: Input) -> Tensor:
        whole = self.made[read.source, read.output]
        index: list[Any] = [slice(None)] * whole.dim()
        for position, at in read.select:
            index[position] = at
        left = [i for i in range(whole.dim()) if i not in dict(read.select)]
        seen = whole[tuple(index)].permute([left.index(position) for position in read.order])
        return seen.reshape(shape_of(read.layout, operator.sizes))

    def inputs(self, operator: Operator) -> list[Tensor]:
        return [self.read(operator, read) for read in operator.inputs]

    def weights(self, operator: Operator) -> list[Tensor]:
        return [self.stored[weight.parameter] for weight in operator.weights]

    def aligned(self, operator: Operator, x: Tensor, own: Input | Weight, to: Any) -> Tensor:
        """`x` with one axis per factor of `to`, size 1 where it has none."""
        names, wanted = factors(own.layout), factors(to)
        x = x.reshape([operator.sizes[name] for name in names])
        x = x.permute([names.index(name) for name in wanted if name in names])
        return x.reshape([operator.sizes[n] if n in names else 1 for n in wanted])

    def source(self, o: Operator) -> Tensor:
        return run_steps(o.attributes["steps"], {("input", k): v for k, v in self.feeds.items()})

    def elementwise(self, o: Operator) -> Tensor:
        to = o.outputs[0].layout
        known = {}
        for kind, tensors, uses in (
            ("in", self.inputs(o), o.inputs),
            ("weight", self.weights(o), o.weights),
        ):
            for i, (x, use) in enumerate(zip(tensors, uses, strict=True)):
                known[kind, i] = self.aligned(o, x, use, to)
        made = run_steps(o.attributes["steps"], known)
        return made.expand(factor_sizes(to, o.sizes)).reshape(shape_of(to, o.sizes))

    def linear(self, o: Operator) -> Tensor:
        (x,), (weight, *bias) = self.inputs(o), self.weights(o)
        return functional.linear(x, weight.T if o.attributes["transposed"] else weight, *bias)

    def matmul(self, o: Operator) -> Tensor:
        a, b = self.inputs(o)
        return a @ b

    def conv2d(self, o: Operator) -> Tensor:
        (x,), (weight, *bias) = self.inputs(o), self.weights(o)
        return functional.conv2d(x, weight, bias[0] if bias else None, **o.attributes)

    def embedding(self, o: Operator) -> Tensor:
        return functional.embedding(self.inputs(o)[0], self.weights(o)[0])

    def layer_norm(self, o: Operator) -> Tensor:
        (x,), weights = self.inputs(o), self.weights(o)
        return functional.layer_norm(x, weights[0].shape, *weights, eps=o.attributes["eps"])

    def rms_norm(self, o: Operator) -> Tensor:
        (x,), weights = self.inputs(o), self.weights(o)
        return functional.rms_norm(x, weights[0].shape, *weights, eps=o.attributes["eps"])

    def batch_norm(self, o: Operator) -> Tensor:
        (x,), (weight, bias, mean, variance) = self.inputs(o), self.weights(o)
        a = o.attributes
        return functional.batch_norm(
            x, mean.clone(), variance.clone(), weight, bias, a["training"], a["momentum"], a["eps"]
        )

    def attention(self, o: Operator) -> Tensor:
        leading = o.inputs[0].layout[:-2]
        aligned = []
        for x, use in zip(self.inputs(o), o.inputs, strict=True):
            to = (*leading, *use.layout[-2:])
            if any(not group for group in use.layout[-2:]):
                to = use.layout
            sizes = shape_of(to, o.sizes)
            full = self.aligned(o, x, use, to).expand(factor_sizes(to, o.sizes))
            aligned.append(full.reshape(sizes))
        q, k, v, *mask = aligned
        return functional.scaled_dot_product_attention(
            q, k, v, *mask, is_causal=o.attributes["causal"], scale=o.attributes["scale"]
        )

    def softmax(self, o: Operator) -> Tensor:
        return torch.softmax(self.inputs(o)[0], o.attributes["dim"])

    def pool2d(self, o: Operator) -> Tensor:
        a = o.attributes
        pool = functional.max_pool2d if a["mode"] == "max" else functional.avg_pool2d
        return pool(self.inputs(o)[0], a["kernel"], a["stride"], a["padding"])

    def reduce(self, o: Operator) -> Tensor:
        names = factors(o.inputs[0].layout)
        x = self.inputs(o)[0].reshape([o.sizes[name] for name in names])
        kept = factors(o.outputs[0].layout)
        gone = [i for i, name in enumerate(names) if name not in kept]
        total = x.sum(gone) if gone else x
        return (total * o.attributes["scale"]).reshape(shape_of(o.outputs[0].layout, o.sizes))

    def cat(self, o: Operator) -> Tensor:
        return torch.cat(self.inputs(o), o.attributes["dim"])

    def narrow(self, o: Operator) -> Tensor:
        return self.inputs(o)[0].narrow(
            *(o.attributes[name] for name in ("dim", "start", "length"))
        )

    def cross_entropy(self, o: Operator) -> Tensor:
        logits, target, count = self.inputs(o)
        ignored = o.attributes["ignore_index"]
        flat = logits.reshape(-1, logits.shape[-1])
        total = functional.cross_entropy(
            flat, target.reshape(-1), ignore_index=ignored, reduction="sum"
        )
        return total / count


def check(
    model: nn.Module, feeds: dict[str, Tensor], expected: Tensor, **options: Any
) -> OperatorGraph:
    """Capture `model`, evaluate the graph, compare loss and counts; the graph is returned."""
    graph = capture(model, kwargs=feeds, **options)
    stored = {name: value.detach() for name, value in model.named_parameters()}
    stored |= dict(model.named_buffers())
    known = {**feeds, **dict(model.named_buffers())}
    if "targets" in options:
        known["targets"] = options["targets"]
    result = Evaluation(graph, known, stored)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    assert OperatorGraph.from_json(graph.to_json()) == graph
    for operator in graph.operators:
        assert operator.kind in KINDS
        known_steps = SOURCE_FUNCTIONS if operator.is_source else STEP_FUNCTIONS
        for name, _ in operator.attributes.get("steps", []):
            assert name in known_steps
    return graph


def tokens(rng: np.random.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, vocabulary, shape))


def token_feeds(seed: int, vocabulary: int, batch: int, sequence: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    labels = tokens(rng, vocabulary, batch, sequence)
    labels[0, : sequence // 3] = -100
    return {"input_ids": tokens(rng, vocabulary, batch, sequence), "labels": labels}


# ---- models of our own ----


@pytest.mark.parametrize("seed", range(3))
def test_mlp(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    sizes = [int(n) for n in rng.integers(2, 20, 4)]
    batch = int(rng.integers(2, 9))
    feeds = {"x": torch.randn(batch, sizes[0]), "target": tokens(rng, sizes[-1], batch)}
    model = models.MLP(sizes)
    check(model, feeds, model(**feeds))
    feeds["target"] = torch.randn(batch, sizes[-1])
    model = models.MLP(sizes, loss="mse")
    check(model, feeds, model(**feeds))


@pytest.mark.parametrize("tied", [True, False])
def test_small_gpt(tied: bool) -> None:
    torch.manual_seed(0)
    model = models.SmallGPT(num_layers=3, hidden=24, num_heads=3, vocabulary=50, tied=tied)
    feeds = token_feeds(0, 50, 4, 32)
    graph = check(model, feeds, model(**feeds))
    assert [(b.length, b.count) for b in repeated_blocks(graph)] == [(10, 3)]


@pytest.mark.parametrize("training", [True, False])
def test_convolution_nets(training: bool) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    feeds = {"images": torch.randn(4, 3, 16, 16), "labels": tokens(rng, 10, 4)}
    for model in (models.SmallCNN(), models.SmallResNet(channels=(4, 8, 8))):
        model.train(training)
        graph = capture(model, kwargs=feeds)
        check(model, feeds, model(**feeds))
        norm = graph.operator("norm1" if isinstance(model, models.SmallCNN) else "norm")
        assert norm.attributes["training"] is training
        buffers = {p.name for p in graph.parameters if not p.trainable}
        assert buffers == {n for n, _ in model.named_buffers() if "running" in n}


class Views(nn.Module):
    """Every kind of view, narrow, cat, a masked softmax attention and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(12, 12), nn.Linear(12, 12)
        self.shared = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.randn(12))
        self.token = nn.Parameter(torch.randn(1, 1, 12))

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        q, k = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.q, self.k))
        scores = q @ k.mT / math.sqrt(4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = (weights @ k).transpose(1, 2).flatten(2) * self.scale
        x = self.shared(torch.relu(self.shared(x)))[:, 1:]
        a, b, c = x.split([2, 4, 6], dim=-1)
        x = torch.stack([a.sum(-1), b.mean(-1), c.square().sum(-1)], dim=-1)
        keep = (ids > 1).unsqueeze(-1)
        return torch.where(keep, x - y, 0.1 * x).abs().mean()


def test_views_masks_and_shared_layers() -> None:
    torch.manual_seed(0)
    model = Views()
    rng = np.random.default_rng(0)
    feeds = {"x": torch.randn(3, 5, 12), "y": torch.randn(3, 5, 3), "ids": tokens(rng, 4, 3, 5)}
    graph = check(model, feeds, model(**feeds))
    kinds = {operator.kind for operator in graph.operators}
    assert {"cat", "narrow", "softmax", "matmul", "reduce", "elementwise"} <= kinds
    shared = [o for o in graph.operators if o.module == "shared"]
    assert [o.name for o in shared] == ["shared", "shared_1"]


def test_loss_given_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x, targets = torch.randn(8, 6), tokens(np.random.default_rng(0), 4, 8)
    expected = functional.cross_entropy(model(x), targets)
    graph = check(model, {"input": x}, expected, loss=functional.cross_entropy, targets=targets)
    assert [p.name for p in graph.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [given.name for given in graph.inputs] == ["input", "targets"]
    assert all(given.sample_dim == 0 for given in graph.inputs)


class AddsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("loss", [functional.cross_entropy, nn.CrossEntropyLoss()])
def test_loss_behind_operators_of_the_model_itself(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(8, 6), tokens(np.random.default_rng(0), 6, 8)
    model = AddsItself()
    graph = check(model, {"x": x}, loss(model(x), targets), loss=loss, targets=targets)
    names = [operator.name for operator in graph.operators]
    assert {"inner", "add"} <= set(names)
    assert not [name for name in names if name.startswith("model")]


def test_dropout_in_training_is_a_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25))
    options = {"loss": functional.mse_loss, "targets": torch.zeros(2, 4)}
    graph = capture(model, (torch.zeros(2, 4),), **options)
    steps = [s for o in graph.operators for s in o.attributes.get("steps", [])]
    assert ["dropout", [["in", 0], 0.25]] in steps
    graph = capture(model.eval(), (torch.zeros(2, 4),), **options)
    assert "dropout" not in str([o.attributes for o in graph.operators])


# ---- models of transformers ----


def tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    zoo = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
    feeds = token_feeds(0, 60, 3, 10)
    if name == "gpt2":
        config = zoo.GPT2Config(
            n_embd=24, n_layer=2, n_head=3, vocab_size=60, n_positions=16, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        return zoo.GPT2LMHeadModel(config), feeds
    if name == "bert":
        config = zoo.BertConfig(num_hidden_layers=2, vocab_size=60, **sizes)
        return zoo.BertForMaskedLM(config).eval(), feeds
    if name == "llama":
        config = zoo.LlamaConfig(
            num_hidden_layers=2, vocab_size=60, num_key_value_heads=2, use_cache=False, **sizes
        )
        return zoo.LlamaForCausalLM(config), feeds
    config = zoo.ViTConfig(num_hidden_layers=2, image_size=16, patch_size=4, **sizes)
    labels = tokens(np.random.default_rng(0), 2, 3)
    return zoo.ViTForImageClassification(config).eval(), {
        "pixel_values": torch.randn(3, 3, 16, 16),
        "labels": labels,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit"])
def test_transformers(name: str) -> None:
    model, feeds = tiny(name)
    graph = check(model, feeds, model(**feeds).loss)
    (block,) = repeated_blocks(graph)
    assert block.count == 2
    attention = [o for o in graph.operators if o.kind == "attention"]
    assert len(attention) == 2
    assert all(len(o.inputs) == 3 for o in attention)
    assert all(o.attributes["causal"] == (name in ("gpt2", "llama")) for o in attention)


@pytest.mark.slow
def test_padding_mask_becomes_a_source() -> None:
    model, feeds = tiny("gpt2")
    feeds["attention_mask"] = torch.ones(3, 10, dtype=torch.int64)
    feeds["attention_mask"][0, 7:] = 0
    graph = check(model, feeds, model(**feeds).loss)
    mixed = graph.operator("transformer.h.1.attn.attention")
    assert len(mixed.inputs) == 4
    assert mixed.inputs[3].layout == (("sample",), (), ("query",), ("key",))
    assert graph.operator(mixed.inputs[3].source).is_source


class Encoder(nn.Module):
    """Torch's own transformer layers, and a masked attention with a buffer as nanoGPT has."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("bias", torch.ones(1, 8, 8).tril())
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers(x)
        scores = (x @ x.mT).masked_fill(self.bias[:, :6, :6] == 0, float("-inf"))
        x = functional.softmax(scores, dim=-1) @ x
        return functional.cross_entropy(self.head(x).transpose(1, 2), y)


def test_encoder_layers_and_mask_buffer() -> None:
    torch.manual_seed(0)
    model = Encoder()
    feeds = {"x": torch.randn(4, 6, 12), "y": tokens(np.random.default_rng(0), 5, 4, 6)}
    graph = check(model, feeds, model(**feeds))
    assert [(i.name, i.sample_dim) for i in graph.inputs] == [("x", 0), ("y", 0), ("bias", None)]


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_flops_agree_with_torch(name: str) -> None:
    model, feeds = tiny(name)
    graph = capture(model, kwargs=feeds)
    with FlopCounterMode(display=False) as counter:
        model(**feeds)
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    expected = sum(n for op, n in counted.items() if "attention" not in op)
    kinds = ("linear", "matmul", "conv2d")
    ours = sum(KINDS[o.kind].flops(o, o.sizes) for o in graph.operators if o.kind in kinds)
    assert ours == expected


def test_gpt2_is_what_tensor_parallelism_needs() -> None:
    model, feeds = tiny("gpt2")
    graph = capture(model, kwargs=feeds)
    kinds = {dim.name: dim.kind for dim in graph.operator("transformer.h.0.attn.c_attn").dims}
    assert kinds == {
        "sample": DimKind.SAMPLE,
        "sequence": DimKind.ATTRIBUTE,
        "in": DimKind.REDUCTION,
        "out0": DimKind.PARAMETER,
        "head": DimKind.PARAMETER,
        "head_dim": DimKind.PARAMETER,
    }
    mixed = graph.operator("transformer.h.0.attn.attention")
    assert [dim.name for dim in mixed.dims if not dim.whole] == ["sample", "head", "query"]
    assert [read.select for read in mixed.inputs] == [((2, 0),), ((2, 1),), ((2, 2),)]
    back = graph.operator("transformer.h.0.attn.c_proj")
    assert back.dim("head").kind is DimKind.REDUCTION
    assert len(graph.operator("transformer.h.0.mlp.act").attributes["steps"]) == 8


_MEMORY = """
import json, torch
from transformers import GPT2Config, GPT2LMHeadModel
from stratagem.simulator.torch_ops.capture.capture import capture
with torch.device("meta"):
    off = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = GPT2LMHeadModel(GPT2Config(**off))
def peak():  # kB since this program began: ru_maxrss would count the process that started it
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0])
ids, labels = (torch.zeros(32, 1024, dtype=torch.int64, device="meta") for _ in range(2))
before = peak()
graph = capture(model, kwargs={"input_ids": ids, "labels": labels})
after = peak()
print(json.dumps([before, after, graph.num_parameters, len(graph.operators)]))
"""


@pytest.mark.long
def test_gpt2_of_124_million_parameters_without_its_weights() -> None:
    pytest.importorskip("transformers")
    ran = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True, timeout=300
    )
    before, after, num_parameters, num_operators = json.loads(ran.stdout.splitlines()[-1])
    assert num_parameters == 124_439_808
    assert num_operators == 130
    assert after * 1024 < 1e9
    assert (after - before) * 1024 < 4 * num_parameters


# ---- refusals ----


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sort(-1).values.mean()


def test_unsupported_operator_is_named() -> None:
    where = r"aten\.sort.* at .*test_capture\.py:\d+ on tensors of shapes \[\(3, 4\)\]"
    with pytest.raises(ValueError, match=where + r".*aten\.sort is not supported"):
        capture(Sorts(), (torch.zeros(3, 4),), fallback=False)


class BranchesOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() if x.sum() > 0 else x.mean()


class SelectsByValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[torch.nonzero(x[:, 0])[:, 0]].mean()


@pytest.mark.filterwarnings("ignore")
def test_what_depends_on_values_is_refused_at_its_line() -> None:
    with pytest.raises(ValueError, match=r"test_capture\.py:\d+ \(return x\.sum\(\) if .*where"):
        capture(BranchesOnValues(), (torch.zeros(3, 4),))
    with pytest.raises(ValueError, match=r"nonzero.* at .*test_capture\.py:\d+ .*shape \('u0'"):
        capture(SelectsByValues(), (torch.zeros(3, 4),))


def test_model_without_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="no scalar float to minimise"):
        capture(nn.Linear(3, 3), (torch.zeros(2, 3),))
    with pytest.raises(ValueError, match="needs targets"):
        capture(nn.Linear(3, 3), (torch.zeros(2, 3),), loss=functional.mse_loss)


class Likelihood(nn.Module):
    """A loss by a distribution, whose arguments torch checks number by number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self.layer(x).unbind(-1)
        likely = torch.distributions.Normal(mean, functional.softplus(spread)).log_prob(y)
        return -likely.mean()


def test_distributions_are_captured_without_checks_of_values() -> None:
    """The check of arguments was refused as a branch on values."""
    torch.manual_seed(0)
    case = make_case(Likelihood(), x=torch.randn(8, 5), y=torch.randn(8))
    assert_equal_to_torch(case, make_plan(case, drawing(0), (2,)))
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, torch.tensor(-1.0))
