"""Whatever goes wrong in capture is one ValueError that says where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.simulator.graph.building import base_builder
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.torch_ops.aten.arguments import reads
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS
from stratagem.simulator.torch_ops.capture import capture as capturing
from stratagem.simulator.torch_ops.capture import functional_form
from stratagem.simulator.torch_ops.capture.capture import capture


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h[:, 0] = 1.0
        return h.square().mean()


def fails(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("integer modulo by zero")


def captured() -> None:
    capture(Model(), (torch.ones(4, 5),))


LINE = r"test_capture_errors\.py:\d+ on tensors of shapes \[\(4, 6\)"


def test_a_handler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kind of its own it is an operator that torch runs; without, it is an error."""
    monkeypatch.setitem(HANDLERS, "tanh", reads("self")(fails))
    captured()
    said = r"capture: aten\.tanh\.default in inner\.1 at .* on tensors of shapes \[\(4, 6\)\]: "
    with pytest.raises(ValueError, match=said + r".*ZeroDivisionError.*other operators"):
        capture(Model(), (torch.ones(4, 5),), fallback=False)


def test_no_error_is_its_own_cause() -> None:
    """Whoever followed the causes of one went round for ever."""

    class Drawing(Model):
        def forward(self, x: Tensor) -> Tensor:
            return torch.poisson(self.inner(x).exp()).mean()

    with pytest.raises(ValueError, match="draws random numbers") as raised:
        capture(Drawing(), (torch.ones(4, 5),))
    error: BaseException | None = raised.value
    seen: list[BaseException] = []
    while error is not None:
        assert error not in seen
        seen.append(error)
        error = error.__cause__


def test_an_operator_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the builder finds in the end is said with the line of the operator, too."""
    original = base_builder.finish_operators

    def finish(drafts: Any) -> Any:
        for draft in drafts:
            if draft.kind == "reduce":
                fails()
        return original(drafts)

    monkeypatch.setattr(base_builder, "finish_operators", finish)
    with pytest.raises(ValueError, match=rf"capture: aten\.mean\.default .*{LINE}.*ZeroDivision"):
        captured()


def test_an_error_of_the_builder_that_names_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: GraphBuilder, loss: Any) -> Any:
        raise ValueError("operator 'inner.0' (linear): dim 'out' has size 0")

    monkeypatch.setattr(GraphBuilder, "build", refuses)
    with pytest.raises(
        ValueError, match=r"capture: aten\.linear\.default in inner\.0 at .*dim 'out' has size 0"
    ):
        captured()


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (
            functional_form,
            "_out_of_place",
            r"capture: aten\.fill_\.Tensor in .*py:\d+ .*ZeroDivision",
        ),
        (GraphBuilder, "build", r"capture of 'Model': no graph could be made.*integer modulo"),
        (capturing, "_batch", r"capture of 'Model': it could not be looked at.*integer modulo"),
        (capturing, "exchanged", r"capture of 'Model': it could not be looked at.*torch\.export"),
    ],
)
def test_every_part_of_capture(
    module: Any, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, fails)
    with pytest.raises(ValueError, match=said):
        captured()


def broken(model: Callable[[Tensor], Any]) -> nn.Module:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return model(super().forward(x))

    return Broken(5, 6)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda h: h.mean().item(), "returns no scalar float to minimise"),
        (lambda h: None, "returns no scalar float to minimise"),
        (lambda h: {"loss": "none"}, "returns no scalar float to minimise"),
        (lambda h: [h, 3], "returns no scalar float to minimise"),
        (lambda h: h.tolist()[0], "capture of 'Broken'"),
        (lambda h: h.numpy().mean(), "capture of 'Broken'"),
        (lambda h: h.nonzero().float().mean(), "shape .* depends on the values"),
        (lambda h: torch.linalg.svd(h)[1].unique().mean(), "shape .* depends on the values"),
    ],
)
def test_models_that_cannot_be_followed(model: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        capture(broken(model), (torch.ones(4, 5),))


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.vmap(lambda weight: (x @ weight).tanh())(self.weights)
        return made.square().mean()


class Choosing(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        made: Tensor = torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))
        return made.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Ensemble, r"torch\.vmap runs operators .*einsum.* \(at .*test_capture_errors\.py:\d+\)"),
        (Choosing, r"depends on the values of a tensor \(torch\.cond\).*write .* as torch\.where"),
    ],
)
def test_what_is_no_operator_of_tensors_is_said_with_its_line(
    kind: type[nn.Module], said: str
) -> None:
    """One ended in an error of its storage, the other in a list of convolutions that are near."""
    with pytest.raises(ValueError, match=said):
        capture(kind(), (torch.ones(4, 5),))


class ByHand(nn.Module):
    """A mixture that goes to its experts by places, truth values, or lists of counts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Linear(5, 2)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        if self.how == "lists":
            counts = torch.bincount(chosen.flatten(), minlength=2).tolist()
            parts = x[chosen.flatten().argsort()].split(counts)
            return torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)]).mean()
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.how == "places":
                rows, slot = torch.where(chosen == number)
                made = made.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
            else:
                mine = chosen[:, 0] == number
                made[mine] = made[mine] + expert(x[mine]) * weights[:, 0][mine].unsqueeze(-1)
        return made.square().mean()


@pytest.mark.parametrize("how", ["places", "truths", "lists"])
def test_a_mixture_by_hand_is_told_of_the_experts_that_can_be_planned(how: str) -> None:
    """Two errors said to mask or to decide outside, the third showed a symbol of torch."""
    said = r"test_capture_errors\.py:\d+.*sg\.experts"
    with pytest.raises(ValueError, match=said) as raised:
        capture(ByHand(how), (torch.ones(6, 5),))
    assert "depends on the values" in str(raised.value)
    assert "GuardOn" not in str(raised.value)


def test_what_chooses_nothing_is_not_told_of_experts() -> None:
    with pytest.raises(ValueError, match="depends on the values") as raised:
        capture(broken(lambda h: h[h > 0].sum()), (torch.ones(4, 5),))
    assert "sg.experts" not in str(raised.value)


class Turned(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.inner, self.turn = nn.Linear(5, 5), nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.inner(x) * self.turn).square().mean()


def test_a_complex_parameter_or_input_is_refused_with_its_name() -> None:
    """It was said that there is no such dtype, and not what to do."""
    with pytest.raises(ValueError, match=r"parameter 'turn' is complex64, .*view_as_complex"):
        capture(Turned(), (torch.ones(4, 5),))
    with pytest.raises(ValueError, match=r"input 'x' is complex64, .*view_as_complex"):
        capture(Model(), (torch.ones(4, 5, dtype=torch.complex64),))
