"""Inception and LSTMs as built compute what plain torch computes with the same parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.searcher.space.strategies import data_parallel, tensor_parallel
from stratagem.simulator.graph import models
from stratagem.simulator.graph.models.inception import AUXILIARY_WEIGHT
from stratagem.simulator.graph.operator_graph import OperatorGraph
from tests.support.plans import assert_equal_to_torch, built_case, one_stage

State = Mapping[str, Tensor]


# -- Inception ----------------------------------------------------------------------------------


class Inception:
    """Inception v3 on a state dict with the names and layers of torchvision."""

    def __init__(self, state: State) -> None:
        self.state = state

    def conv(
        self, x: Tensor, name: str, stride: int = 1, pad: int | tuple[int, int] = 0
    ) -> Tensor:
        x = functional.conv2d(x, self.state[f"{name}.conv.weight"], stride=stride, padding=pad)
        kept = ("running_mean", "running_var", "weight", "bias")
        stored = [self.state[f"{name}.bn.{each}"] for each in kept]
        return functional.batch_norm(x, *stored, training=True, eps=1e-3).relu()

    def average(self, x: Tensor, name: str) -> Tensor:
        return self.conv(functional.avg_pool2d(x, 3, 1, 1), f"{name}.branch_pool")

    def a(self, x: Tensor, n: str) -> Tensor:
        five = self.conv(self.conv(x, f"{n}.branch5x5_1"), f"{n}.branch5x5_2", pad=2)
        three = self.conv(self.conv(x, f"{n}.branch3x3dbl_1"), f"{n}.branch3x3dbl_2", pad=1)
        three = self.conv(three, f"{n}.branch3x3dbl_3", pad=1)
        return torch.cat([self.conv(x, f"{n}.branch1x1"), five, three, self.average(x, n)], 1)

    def b(self, x: Tensor, n: str) -> Tensor:
        three = self.conv(self.conv(x, f"{n}.branch3x3dbl_1"), f"{n}.branch3x3dbl_2", pad=1)
        three = self.conv(three, f"{n}.branch3x3dbl_3", stride=2)
        single = self.conv(x, f"{n}.branch3x3", stride=2)
        return torch.cat([single, three, functional.max_pool2d(x, 3, 2)], 1)

    def c(self, x: Tensor, n: str) -> Tensor:
        seven, double = self.conv(x, f"{n}.branch7x7_1"), self.conv(x, f"{n}.branch7x7dbl_1")
        seven = self.conv(seven, f"{n}.branch7x7_2", pad=(0, 3))
        seven = self.conv(seven, f"{n}.branch7x7_3", pad=(3, 0))
        for i, pad in enumerate([(3, 0), (0, 3), (3, 0), (0, 3)], 2):
            double = self.conv(double, f"{n}.branch7x7dbl_{i}", pad=pad)
        return torch.cat([self.conv(x, f"{n}.branch1x1"), seven, double, self.average(x, n)], 1)

    def d(self, x: Tensor, n: str) -> Tensor:
        three = self.conv(self.conv(x, f"{n}.branch3x3_1"), f"{n}.branch3x3_2", stride=2)
        seven = self.conv(self.conv(x, f"{n}.branch7x7x3_1"), f"{n}.branch7x7x3_2", pad=(0, 3))
        seven = self.conv(seven, f"{n}.branch7x7x3_3", pad=(3, 0))
        seven = self.conv(seven, f"{n}.branch7x7x3_4", stride=2)
        return torch.cat([three, seven, functional.max_pool2d(x, 3, 2)], 1)

    def e(self, x: Tensor, n: str) -> Tensor:
        one, three = self.conv(x, f"{n}.branch1x1"), self.conv(x, f"{n}.branch3x3_1")
        double = self.conv(self.conv(x, f"{n}.branch3x3dbl_1"), f"{n}.branch3x3dbl_2", pad=1)
        forks = [
            self.conv(y, f"{n}.{fork}{side}", pad=pad)
            for y, fork in ((three, "branch3x3_2"), (double, "branch3x3dbl_3"))
            for side, pad in (("a", (0, 1)), ("b", (1, 0)))
        ]
        return torch.cat([one, *forks, self.average(x, n)], 1)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.conv(images, "Conv2d_1a_3x3", stride=2)
        x = self.conv(self.conv(x, "Conv2d_2a_3x3"), "Conv2d_2b_3x3", pad=1)
        x = self.conv(functional.max_pool2d(x, 3, 2), "Conv2d_3b_1x1")
        x = functional.max_pool2d(self.conv(x, "Conv2d_4a_3x3"), 3, 2)
        for letter in "bcd":
            x = self.a(x, f"Mixed_5{letter}")
        x = self.b(x, "Mixed_6a")
        for letter in "bcde":
            x = self.c(x, f"Mixed_6{letter}")
        second = self.second(x, labels) if "AuxLogits.fc.weight" in self.state else 0.0
        x = self.e(self.e(self.d(x, "Mixed_7a"), "Mixed_7b"), "Mixed_7c")
        return self.classified(x, "fc", labels) + AUXILIARY_WEIGHT * second

    def second(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.conv(functional.avg_pool2d(x, 5, 3), "AuxLogits.conv0")
        return self.classified(self.conv(x, "AuxLogits.conv1"), "AuxLogits.fc", labels)

    def classified(self, x: Tensor, name: str, labels: Tensor) -> Tensor:
        pooled = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        logits = functional.linear(
            pooled, self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        )
        return functional.cross_entropy(logits, labels)


def inception_state(graph: OperatorGraph) -> dict[str, Tensor]:
    """Random parameters that keep the size of features (He et al. 2015).

    With some seeds a ReLU switches by the last digit that two ranks round otherwise; not with 1.
    """
    torch.manual_seed(1)
    state = {}
    for each in graph.parameters:
        if each.name.endswith(("running_mean", "running_var")):
            state[each.name] = torch.ones(each.shape)
        else:
            fan = math.prod(each.shape[1:]) if len(each.shape) > 1 else 1
            spread = math.sqrt(2 / fan) if fan > 1 else 0.2
            # With biases this large few ReLUs switch: else float32's last digit changes gradients
            # of a network this deep, on batches this small, by percents.
            shifts = {"bn.weight": 1.0, "bn.bias": 3.0}
            shift = next((v for end, v in shifts.items() if each.name.endswith(end)), 0.0)
            state[each.name] = (shift + spread * torch.randn(each.shape)).requires_grad_()
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "auxiliary", "ways"),
    [(203, False, 2), pytest.param(299, True, 1, marks=pytest.mark.long)],
)
def test_inception_is_torchvisions(image: int, auxiliary: bool, ways: int) -> None:
    graph = models.inception_v3(batch=4, image=image, classes=10, auxiliary=auxiliary)
    state = inception_state(graph)
    batch = {"images": torch.randn(4, 3, image, image), "labels": torch.tensor([1, 7, 0, 7])}

    def loss(state: State, batch: State) -> Tensor:
        return Inception(state).loss(batch["images"], batch["labels"])

    case = built_case(graph, state, batch, loss)
    plan = one_stage(graph, data_parallel(graph, (ways,)), (ways,))
    assert_equal_to_torch(case, plan, tolerance=2e-3)


# -- translation --------------------------------------------------------------------------------


def nmt_loss(state: State, batch: State, num_layers: int) -> Tensor:
    """The same by `nn.LSTM`, whose second bias is 0."""
    hidden = state["head.weight"].shape[1]

    def run(
        side: str, ids: Tensor, states: list[tuple[Tensor, Tensor] | None]
    ) -> tuple[Tensor, list]:
        x, ended = functional.embedding(ids, state[f"{side}.embed.weight"]), []
        for i in range(num_layers):
            own = {
                "weight_ih_l0": state[f"{side}.{i}.input.weight"],
                "weight_hh_l0": state[f"{side}.{i}.recurrent.weight"],
                "bias_ih_l0": state[f"{side}.{i}.input.bias"],
                "bias_hh_l0": torch.zeros(4 * hidden),
            }
            layer = nn.LSTM(hidden, hidden, batch_first=True)
            given = (x,) if states[i] is None else (x, states[i])
            x, last = torch.func.functional_call(layer, own, given)
            ended.append(last)
        return x, ended

    seen, ended = run("encoder", batch["source_ids"], [None] * num_layers)
    made, _ = run("decoder", batch["target_ids"], ended)
    scores = made @ functional.linear(seen, state["attention.keys.weight"]).transpose(1, 2)
    context = scores.softmax(-1) @ seen
    weight = torch.cat([state["attention.context.weight"], state["attention.output.weight"]], 1)
    combined = torch.cat([context, made], -1) @ weight.T
    logits = functional.linear(combined.tanh(), state["head.weight"], state["head.bias"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("shape", "tensor"), [((1,), False), ((2,), False), ((2,), True), ((2, 2), True)]
)
def test_nmt_is_torchs(shape: tuple[int, ...], tensor: bool) -> None:
    graph = models.nmt(num_layers=2, hidden=8, vocabulary=24, sequence=5, batch=4)
    torch.manual_seed(0)
    state = {p.name: (0.4 * torch.randn(p.shape)).requires_grad_() for p in graph.parameters}
    batch = {name: torch.randint(24, (4, 5)) for name in ("source_ids", "target_ids", "labels")}
    case = built_case(graph, state, batch, lambda state, batch: nmt_loss(state, batch, 2))
    choices = (
        tensor_parallel(graph, shape, len(shape) - 1, sequence_parallel=False)
        if tensor
        else data_parallel(graph, shape)
    )
    assert_equal_to_torch(case, one_stage(graph, choices, shape), tolerance=2e-5)
