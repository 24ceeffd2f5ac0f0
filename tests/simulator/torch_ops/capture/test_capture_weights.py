"""Layers whose weights are parts of parameters, or computed of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from tests.simulator.torch_ops.capture.test_capture_truth import (
    Loss,
    Small,
    assert_trains_as_torch,
    case_of,
)
from tests.support.plans import crossed, drawing

Batch = Mapping[str, Tensor]


def queries(s: Small, b: Batch) -> Tensor:
    return s.b(b["y"].unsqueeze(1) * torch.arange(1, 5)[:, None] / 2)


def memory(s: Small, b: Batch, channel: int = 0) -> Tensor:
    return s.a(b["image"][:, channel, :3, :5])


def attention(**options: int | bool) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(6, 2, batch_first=True, **options)  # type: ignore[arg-type]


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


WEIGHTS: dict[str, tuple[Loss, Callable[[], nn.Module] | None]] = {
    "keys and values of a memory": (
        lambda s, b: s.layer(queries(s, b), memory(s, b), memory(s, b))[0].square().mean(),
        attention(),
    ),
    "values of their own": (
        lambda s, b: (
            s.layer(queries(s, b), memory(s, b), memory(s, b, 1), need_weights=False)[0]
            .square()
            .mean()
        ),
        attention(),
    ),
    "keys and values of other sizes": (
        lambda s, b: (
            s.layer(queries(s, b), b["image"][:, 0, :3, :5], b["image"][:, 1, :3, :4])[0]
            .square()
            .mean()
            + s.hidden(b["x"]).mean()
        ),
        attention(kdim=5, vdim=4),
    ),
    "decoder layer": (
        lambda s, b: s.layer(queries(s, b), memory(s, b)).square().mean(),
        decoder_layer,
    ),
    "causal decoder": (
        lambda s, b: (
            s.layer(
                queries(s, b),
                memory(s, b),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(4).double(),
                tgt_is_causal=True,
            )
            .square()
            .mean()
        ),
        lambda: nn.TransformerDecoder(decoder_layer(), 2),
    ),
    "parts": (
        lambda s, b: (
            functional.linear(b["x"], s.a.weight[:3], s.a.bias[:3]).square().mean()
            + functional.linear(s.hidden(b["x"]), s.b.weight[1:].tanh()).mean()
        ),
        None,
    ),
    "rows and columns": (
        lambda s, b: (
            (s.hidden(b["x"]) * s.b.weight[2]).square().mean() * s.b.weight.unbind(1)[3].mean()
        ),
        None,
    ),
    "a computed bias": (
        lambda s, b: functional.linear(b["x"], s.a.weight, s.a.bias * 2).square().mean(),
        None,
    ),
    "normalised weights": (
        lambda s, b: (
            functional.linear(
                s.hidden(b["x"]),
                s.b.weight / s.b.weight.square().sum(1, keepdim=True).sqrt(),
                s.b.bias,
            )
            .square()
            .mean()
        ),
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", crossed(WEIGHTS, every=2))
def test_weights_that_are_parts_or_computed_train_as_in_torch(name: str) -> None:
    """Torch itself cuts the weight of an attention whose keys are not its queries."""
    loss, layer = WEIGHTS[name]
    case = case_of(loss) if layer is None else case_of(loss, layer=layer())
    assert_trains_as_torch(case)
    if 2 in case.graph.microbatch_counts:
        assert_trains_as_torch(case, 2, num_microbatches=2)
    for seed in range(2):
        assert_trains_as_torch(case, 2, choose=drawing(seed))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda s, b: functional.layer_norm(s.hidden(b["x"]), (6,), s.scale * 2).mean(),
            r"its weight of shape \(6,\) is computed",
        ),
        (
            lambda s, b: functional.rms_norm(s.hidden(b["x"]), (6,), s.scale + 1).mean(),
            r"its weight of shape \(6,\) is computed",
        ),
        (
            lambda s, b: functional.embedding(b["ids"], s.b.weight.tanh()).mean(),
            "its weight must be a stored parameter",
        ),
        (
            lambda s, b: functional.linear(b["y"][0], s.b.weight.tanh()).mean(),
            "a vector and a weight that is no parameter",
        ),
    ],
)
def test_computed_weights_of_other_kinds_are_refused(loss: Loss, message: str) -> None:
    """They were called unknown parameters, after capture."""
    with pytest.raises(ValueError, match=rf"test_capture_truth\.py:\d+ .*{message}"):
        case_of(loss, fallback=False)


def test_a_model_without_blocks_is_cut_by_time() -> None:
    graph, cluster = (
        mlp([8, 9, 10, 11], batch=8),
        Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2),
    )
    with pytest.raises(ValueError, match=r"repeated blocks, which 2 stages .*partition='time'"):
        TrainingSetup(pipeline=2).plan(graph, cluster)
    assert len(TrainingSetup(pipeline=2, partition="time").plan(graph, cluster).stages) == 2
