"""What a model changes in itself is refused; what it changes among its results is captured."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.executor import model_state
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.simulator.torch_ops.capture.test_capture_truth import assert_trains_as_torch
from tests.support.plans import Case, few, make_case

Forward = Callable[["Stateful", Tensor, Tensor], Tensor]


class Stateful(nn.Module):
    """A layer beside state of every kind, and what a test does with it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.table = nn.Embedding(9, 6, max_norm=1.0)
        self.free = nn.Parameter(torch.rand(6))
        self.register_buffer("ema", torch.rand(6))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self.plain = torch.ones(6).double()
        self.step, self.size, self.loss = 0, 0, forward
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)


def case_of(forward: Forward) -> Case:
    model = Stateful(forward)
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 5).double(), "y": torch.randn(8, 6).double()}
    return Case(model, batch, capture(model, (), batch))


def moving_average(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    s.ema.mul_(0.5).add_(h.detach().mean(0))
    return (h - s.ema).square().mean()


def counter(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.count.add_(1)
    return s.layer(x).square().mean() / s.count


def assigned(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    s.ema = 0.9 * s.ema + 0.1 * h.detach().mean(0)
    return (h - s.ema).square().mean()


def added(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.count += 1
    return s.layer(x).square().mean() / s.count


def copied(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    made = (h - s.ema).square().mean()
    s.ema.copy_(h.detach().mean(0))
    return made


def a_part(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.seen[1] = 3
    return s.layer(x).square().mean() * s.seen.sum()


def by_index(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.ema[torch.tensor([0, 2])] = 1.0
    return (s.layer(x) * s.ema).mean()


def without_gradient(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        s.ema.lerp_(s.layer(x).mean(0), 0.1)
    return (s.layer(x) * s.ema).mean()


def through_a_view(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.ema.view(2, 3)[0].fill_(2.0)
    return (s.layer(x) * s.ema).mean()


def a_parameter(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        s.free.clamp_(0, 0.5)
    return (s.layer(x) * s.free).mean()


def renormalised(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    return (s.layer(x) * s.table(torch.arange(8))).mean()


def an_input(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    return (s.layer(x) - y.mul_(2)).square().mean()


def a_plain_tensor(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.plain.add_(1)
    return (s.layer(x) * s.plain).mean()


def a_tensor_of_the_last_step(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x) * s.plain
    s.plain = h.detach().mean(0)
    return h.mean()


def calls(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    s.step += 1
    return s.layer(x).square().mean() / s.step


def written_out(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mul(s.ema, 0.9, out=s.ema)
    return (s.layer(x) * s.ema).mean()


def counted_statistics(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    return s.norm(s.layer(x)).square().mean() / s.norm.num_batches_tracked


def read_statistics(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    return (s.norm(s.layer(x)) * s.norm.running_var).mean()


KEPT: dict[str, tuple[Forward, str]] = {
    "mul_ and add_": (moving_average, "buffer 'ema'"),
    "add_": (counter, "buffer 'count'"),
    "assignment": (assigned, "buffer 'ema'"),
    "+=": (added, "buffer 'count'"),
    "copy_": (copied, "buffer 'ema'"),
    "a part": (a_part, "buffer 'seen'"),
    "index_put_": (by_index, "buffer 'ema'"),
    "no_grad": (without_gradient, "buffer 'ema'"),
    "view": (through_a_view, "buffer 'ema'"),
    "out": (written_out, "buffer 'ema'"),
    "parameter": (a_parameter, "parameter 'free'"),
    "max_norm": (renormalised, "parameter 'table.weight'"),
    "input": (an_input, "input 'y'"),
    "tensor": (a_plain_tensor, "tensor 'plain'"),
    "counter of batch norm": (counted_statistics, "buffer 'norm.num_batches_tracked'"),
}


@pytest.mark.parametrize("name", KEPT)
def test_state_that_changes_in_forward_is_refused(name: str) -> None:
    """A moving average started from its first value in every step, and the loss was another."""
    forward, what = KEPT[name]
    line = r"test_capture_state\.py:\d+\), but "
    with pytest.raises(ValueError, match=rf"forward changes {re.escape(what)} in place .*{line}"):
        case_of(forward)


def test_state_outside_of_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'step' from 0 to 1 and then to 2, .* as an input"):
        case_of(calls)
    with pytest.raises(ValueError, match="reads its 'plain' and puts another tensor in its place"):
        case_of(a_tensor_of_the_last_step)
    with pytest.raises(ValueError, match=r"'norm\.running_var' .* give it to forward as an input"):
        case_of(read_statistics)


def in_a_row(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    h.mul_(2).add_(1).tanh_()
    return (h - y).square().mean()


def by_two_names(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    same = h.add_(1)
    same.mul_(2)
    return (h * same - y).square().mean()


def copied_to_the_same_dtype(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    same = h.to(torch.float64)
    same.mul_(2)
    return (h * same).mean()


def behind_a_view(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x).view(8, 2, 3)
    return ((h + 0.5).add_(1).flatten(1) - y).square().mean()


def a_view_alone(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x).view(4, 2, 6)
    return (h.mul_(3).view(8, 6) - y).square().mean()


def dropping_nothing(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    same = functional.dropout(functional.dropout(h, 0.5, training=False), 0.0)
    return (same.mul_(2) * h - y).square().mean()


def constants(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    m = torch.zeros(6, dtype=torch.float64)
    m.add_(5)
    return (torch.where(m > 1, s.layer(x), -s.layer(x)) * m - y).square().mean()


def noted(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    s.size, s.plain = len(x), h
    s.rows = len(x)
    return (s.plain - y).square().mean()


def normed_twice(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    return (s.norm(s.layer(x)) * s.norm(s.layer(-x).tanh()) - y).square().mean()


def shared(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    flat = h.view(-1)
    h.mul_(2)
    return (flat.square() * h.flatten()).mean()


def parts(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = torch.empty_like(y)
    h[:, :2] = s.layer(x)[:, 1:3]
    h[:, 2:] = s.layer(-x)[:, :4].tanh()
    h[:, 3] += 1
    return (h - y).square().mean()


def every_other(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x) + 0
    h[:, ::2] *= 3.0
    return (h * s.layer(-x) - y).square().mean()


def halves(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x) * 2
    one, two = h[:, :3], h[:, 3:]
    rows = h.view(4, 2, 6).transpose(0, 1)
    two.copy_(one)
    rows[1].clamp_(max=0.5)
    two.sub_(1)
    return (h - y).square().mean() + rows.tanh().sum() + one.mean()


def pieces_of_a_view(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x).unflatten(-1, (2, 3))
    first, second = h[:, 0], h.select(1, 1)
    second.copy_(first)
    first.narrow(-1, 1, 2).zero_()
    h[0] = 2
    return (h.flatten(1) - y).square().mean() + first.sin().sum()


def labels_moved(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    labels = (y > 0).long().argmax(-1)
    moved = labels.new_zeros(labels.shape)
    moved[1:] = labels[:-1].clone()
    moved[0] = 1
    moved.masked_fill_(moved == 5, 2)
    return functional.cross_entropy(h, moved)


def copied_to_another_shape(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = torch.zeros(8, 2, 6)
    h[:, 1] = s.layer(x)
    h[:, 0].copy_(y.mean(0))
    return (h * y[:, None]).mean()


def within_its_own_block(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        weights = torch.zeros(8, 6, dtype=torch.float64)
        weights[:, 1:4] = y[:, :3].sigmoid()
        weights[2:5].add_(0.5)
        first, second, _ = weights.split(2, -1)
        second.mul_(first)
        weights.unbind(0)[1].zero_()
    return (s.layer(x) * weights).mean()


CAPTURED: dict[str, Forward] = {
    "in a row": in_a_row,
    "by two names": by_two_names,
    "copied to the same dtype": copied_to_the_same_dtype,
    "behind a view": behind_a_view,
    "a view alone": a_view_alone,
    "dropping nothing": dropping_nothing,
    "constants": constants,
    "noted": noted,
    "a batch norm twice": normed_twice,
    "shared": shared,
    "parts": parts,
    "every other": every_other,
    "halves": halves,
    "pieces of a view": pieces_of_a_view,
    "labels moved": labels_moved,
    "copied to another shape": copied_to_another_shape,
    "within its own block": within_its_own_block,
}


@pytest.mark.parametrize("name", CAPTURED)
def test_what_changes_among_results_is_captured(name: str) -> None:
    """``h.mul_(2).add_(1)`` left h without the second change."""
    assert_trains_as_torch(case_of(CAPTURED[name]))


def within_a_block(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    with torch.no_grad():
        h.mul_(2)
    return h.square().mean()


def without_a_gradient(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    h.detach()[:, 1:].mul_(2)
    return h.square().mean()


def along_a_diagonal(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x) + 0
    h.diagonal().mul_(2)
    return h.square().mean()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (without_a_gradient, "shares memory with one that is changed in place"),
        (along_a_diagonal, "shares memory with one that is changed in place"),
        (within_a_block, "in place within a block, such as torch.no_grad"),
    ],
)
def test_changes_that_another_name_sees_are_refused(forward: Forward, message: str) -> None:
    with pytest.raises(ValueError, match=rf"test_capture_state\.py:\d+ .*{message}"):
        case_of(forward)


class Written(nn.Module):
    """Views and changes in place, drawn at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer, self.seed = nn.Linear(5, 24).double(), seed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        h = self.layer(x)
        views = [h * 1]
        for _ in range(rng.randint(4, 12)):
            if rng.random() < 0.5:
                views.append(self._view(rng, rng.choice(views)))
            else:
                self._change(rng, rng.choice(views), rng.choice(views))
        seen = [(v.sin() * (i + 1)).sum() for i, v in enumerate(views)]
        return (h.square().mean() + sum(seen)) / y.sum()

    def _view(self, rng: random.Random, v: Tensor) -> Tensor:
        dim = rng.randrange(v.dim())
        size = v.shape[dim]
        start = rng.randrange(size)
        made = [
            lambda: v.narrow(dim, start, rng.randint(1, size - start)),
            lambda: v.transpose(dim, rng.randrange(v.dim())),
            lambda: v.unsqueeze(dim),
            lambda: v.select(dim, start) if v.dim() > 2 else v,
            lambda: v.flatten(1) if v.is_contiguous() else v.permute(*range(v.dim())[::-1]),
            lambda: v.unflatten(dim, (2, -1)) if size % 2 == 0 else v.view_as(v),
        ]
        return rng.choice(made)()

    def _change(self, rng: random.Random, v: Tensor, other: Tensor) -> None:
        changes = [
            lambda: v.mul_(1.5),
            lambda: v.add_(other.mean()),
            lambda: v.copy_(other.clone()) if other.shape == v.shape else v.neg_(),
            lambda: v.fill_(0.5) if v.numel() < 60 else v.sub_(0.5),
            lambda: v.zero_() if v.numel() < 60 else v.add_(1),
        ]
        rng.choice(changes)()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3, *few(range(4, 60), 4)])
def test_changes_drawn_at_random_are_captured(seed: int) -> None:
    model = Written(seed)
    torch.manual_seed(seed)
    batch = {"x": torch.randn(4, 5).double(), "y": torch.rand(4, 2).double() + 1}
    assert_trains_as_torch(Case(model, batch, capture(model, (), batch)))


def test_capture_leaves_the_model_as_it_was() -> None:
    model = Stateful(noted)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, (torch.ones(8, 5).double(), torch.ones(8, 6).double()))
    assert "forward" not in vars(model)
    assert model.size == 0
    assert not hasattr(model, "rows")
    assert torch.equal(model.plain, torch.ones(6).double())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_hooks_itself_at_its_first_call_does_so_once() -> None:
    """Capture let it forget its first call and not its hook, which then counted twice."""

    class Hooked(nn.Module):
        hooked = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not self.hooked:
                self.layer.register_forward_hook(lambda module, args, made: made + 1)
                self.hooked = True
            return self.layer(x).square().mean()

    model = Hooked()
    capture(model, (torch.ones(2, 3),))
    assert not model.layer._forward_hooks
    expected = (model.layer(torch.ones(2, 3)) + 1).square().mean()
    assert torch.equal(model(torch.ones(2, 3)), expected)


# -- what torch.export cannot follow ------------------------------------------------------------


def data(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    h = s.layer(x)
    return (h - h.data).square().mean()


def gradients_of_gradients(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    made = s.layer(x).square().mean()
    (found,) = torch.autograd.grad(made, s.layer.weight, create_graph=True)
    return made + found.square().sum()


def wrong_shapes(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    return (s.layer(x) + torch.ones(5)).mean()


def branches(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    made = s.layer(x).mean()
    return made if made > 0 else -made


def raises(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
    raise KeyError("tokens")


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (data, r".*\.data is read at .*use \.detach\(\)"),
        (gradients_of_gradients, r".*autograd\.grad is called at .*differentiates the loss once"),
        (wrong_shapes, r".*'Stateful': .* at .*torch\.ones\(5\).*RuntimeError: .*length 5"),
        (branches, r".*'Stateful': .* at .*\(return made if made > 0.*torch\.where"),
        (raises, r".*'Stateful': .* at .*KeyError: 'tokens'"),
    ],
)
def test_what_export_cannot_follow_is_one_error_at_its_line(
    forward: Forward, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch showed its own frames and graphs, thirty lines of them, before the error."""
    with pytest.raises(ValueError, match=rf"(?s){message}") as caught:
        case_of(forward)
    assert "test_capture_state.py:" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_mean_over_all_steps_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, momentum=None))
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm2d\) has momentum=None.*momentum=0\.1"):
        capture(model, (torch.zeros(2, 2, 3, 3),), loss=functional.mse_loss, targets=torch.ones(1))


def test_what_the_model_writes_to_stderr_is_still_seen(capfd: pytest.CaptureFixture[str]) -> None:
    def speaks(s: Stateful, x: Tensor, y: Tensor) -> Tensor:
        import sys

        sys.stderr.write("a word\n")
        return s.layer(x).mean()

    case_of(speaks)
    with pytest.raises(ValueError, match="values of a tensor"):
        case_of(lambda s, x, y: speaks(s, x, y) if x.sum() > 0 else x.mean())
    assert capfd.readouterr().err == "a word\n"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case_of(noted)
    assert not caught


class BySeveralNames(nn.Module):
    """A norm and a buffer that a second module has, too, and that are called there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(5)
        self.register_buffer("scale", torch.rand(6))
        self.body = nn.Sequential(self.norm, self.layer)
        self.body.register_buffer("scale", self.scale)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scaled = self.body(x) * self.get_buffer("body.scale")
        return (scaled - y * self.scale).square().mean()


def test_buffers_that_modules_share_are_one() -> None:
    """Under the first name, as a model's state has them: export takes any other."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 5).double(), torch.randn(8, 6).double()
    case = make_case(BySeveralNames().double(), x=x, y=y)
    named = {each.name for each in case.graph.parameters}
    assert named == {name for name in model_state(case.model) if "num_batches" not in name}
    assert_trains_as_torch(case, 2)
