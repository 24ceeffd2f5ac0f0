"""Operators of torch without a rule of their own train as in one process of torch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stratagem.profiler.timing.random_operands import random_operands, viewed
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.generics import is_generic
from stratagem.simulator.operators.operator import DimKind, Operator
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.generic.calls import function_of
from stratagem.simulator.torch_ops.generic.ties import find_ties
from stratagem.simulator.torch_ops.generic.trials import OperandShape
from stratagem.simulator.torch_ops.kernels.run_kernel import run_kernel
from stratagem.simulator.torch_ops.kernels.shards import whole
from tests.support.operators.torch_operators import OPERATORS, case_of
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    crossed,
    drawing,
    make_case,
    make_plan,
    sharding,
)

torch.set_num_threads(1)

MIXES_SAMPLES = {
    "var_of_samples": "the variance is that of all samples",
    "index_pairs": "rows are taken by a list of numbers, which may be any",
    "embedding_bag_max": "bags are cut by numbers of the whole batch",
    "embedding_scaled": "gradients are divided by how often the batch has a row",
}
"""Operators whose batch stays whole, and why."""


class Scaled(nn.Module):
    """Multiplies features by a parameter."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features))


def generics(graph: OperatorGraph) -> list[Operator]:
    return [operator for operator in graph.operators if is_generic(operator)]


@pytest.mark.parametrize("name", crossed(OPERATORS, every=2))
def test_every_operator_trains_like_torch(name: str) -> None:
    """On two ranks and on three, with every operator's dims split at random."""
    case = case_of(OPERATORS[name])
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)))


@pytest.mark.parametrize("name", crossed(OPERATORS, every=3))
def test_samples_are_split_unless_the_operator_mixes_them(name: str) -> None:
    case = case_of(OPERATORS[name])
    if name in MIXES_SAMPLES:
        assert case.graph.whole_batch
        return
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=2))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 18))
@pytest.mark.parametrize("name", OPERATORS)
def test_many_configs_train_like_torch(name: str, seed: int) -> None:
    case = case_of(OPERATORS[name])
    shape = ((2,), (3,), (2, 2), (2, 3))[seed % 4]
    assert_equal_to_torch(case, make_plan(case, drawing(seed), shape))


@pytest.mark.parametrize("name", ["topk", "complex", "cumsum", "cosine_embedding", "lstm"])
def test_a_graph_with_calls_of_torch_is_read_as_it_was_written(name: str) -> None:
    graph = case_of(OPERATORS[name]).graph
    assert generics(graph)
    assert OperatorGraph.from_json(graph.to_json()) == graph


def free(case: Case) -> Iterable[str]:
    (operator,) = generics(case.graph)
    return [dim.name for dim in operator.dims if not dim.whole]


def test_a_mean_over_targets_that_are_counted_is_a_sum_over_their_count() -> None:
    """None is ignored in most batches, and a mean over shards would then look right."""
    calls = [["aten::nll_loss.default", [["in", 0], ["in", 1], None, 1, -100], {}]]
    operands = [OperandShape(((8,), (5,)), "float32"), OperandShape(((8,),), "int64")]
    assert not find_ties(calls, operands, ())
    for name in ("cross_entropy_ignored", "cross_entropy_weighted", "cross_entropy_smoothed"):
        assert "sample" in free(case_of(OPERATORS[name]))


def test_a_loss_that_looks_at_signs_is_tried_with_signs() -> None:
    """Targets drawn from a normal distribution are neither 1 nor -1: its loss is then always 0."""
    assert free(case_of(OPERATORS["cosine_embedding"])) == ["sample"]


def test_samples_that_are_merged_with_positions_stay_samples() -> None:
    """A loss on (batch · sequence) rows splits over the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            rows = self.head(x).flatten(0, 1)
            losses = functional.cross_entropy(rows, y.flatten(), reduction="none")
            return (losses * losses).mean()

    case = make_case(Model(), x=torch.randn(4, 3, 6), y=torch.randint(5, (4, 3)))
    assert "sample" in free(case)
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", crossed(sorted(set(OPERATORS) - {"embedding_bag_max"}), every=3))
def test_every_operator_can_be_timed(name: str) -> None:
    """On numbers that losses of probabilities take too, and no gradients of what was fed."""
    for operator in generics(case_of(OPERATORS[name]).graph):
        drawn = random_operands(operator, Training(), torch.device("cpu"))
        pairs = zip(drawn.inputs, operator.inputs, strict=True)
        inputs = [viewed(tensor, read, operator.sizes) for tensor, read in pairs]
        (made,) = run_kernel(operator, whole(operator), inputs, drawn.weights)
        if operator.outputs[0].differentiable:
            assert torch.autograd.grad(made.sum(), drawn.leaves, allow_unused=True)


def test_class_weights_in_a_module_are_no_parameters() -> None:
    """They are a buffer, and torch has no gradient of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)
            self.loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            made: Tensor = self.loss(self.head(x), y)
            return made

    case = make_case(Model(), x=torch.randn(4, 6), y=torch.randint(5, (4,)))
    assert_equal_to_torch(case, make_plan(case, drawing(3), (2,)))
    assert_equal_to_torch(case, make_plan(case, drawing(3), (2,), num_microbatches=2))


class WithConstant(Scaled):
    """Products of samples times heads that add a constant, as attention with ALiBi does."""

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.scale).reshape(4, 5, 3, 2).transpose(1, 2).reshape(12, 5, 2)
        slopes = torch.arange(12.0).reshape(12, 1, 1) * torch.arange(5.0)
        return torch.baddbmm(slopes, h, h.mT, beta=0.3).sin().square().mean()


class Scattered(Scaled):
    """Gates that are written into zeros for each token, as those of Llama 4 are."""

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.scale).flatten(0, 1)
        value, index = h.topk(2, -1)
        gates = torch.full_like(h, float("-inf")).scatter(1, index, value)
        return (torch.sigmoid(gates) * h).square().mean()


@pytest.mark.parametrize("kind", [WithConstant, Scattered])
def test_a_constant_is_split_where_what_it_meets_is_samples_times_something(kind: type) -> None:
    """It has one factor where the others have two, and was taken to mix all samples."""
    torch.manual_seed(0)
    case = make_case(kind(6), x=torch.randn(4, 5, 6))
    assert generics(case.graph)
    assert not case.graph.whole_batch
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=2))
    assert_equal_to_torch(case, make_plan(case, drawing(2), (3,)))


def test_an_empty_rest_is_put_behind_what_was_rotated() -> None:
    """Rotary embeddings of a part of the features leave a rest, which may be none of them."""

    class Model(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            h = x * self.scale
            return torch.cat([h[..., :6].sin(), h[..., 6:]], -1).exp().mean()

    case = make_case(Model(6), x=torch.randn(4, 5, 6))
    assert not generics(case.graph)
    assert_equal_to_torch(case, make_plan(case, drawing(1), (3,)))


def test_strict_capture_refuses_as_before() -> None:
    called = OPERATORS["cumsum"]
    case = case_of(called)
    with pytest.raises(ValueError, match=r"aten\.cumsum is not supported.*fallback=True"):
        capture(case.model, (), case.batch, fallback=False)


def test_random_numbers_are_refused_with_the_remedy() -> None:
    class Noisy(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale * torch.randint_like(x, 5)).mean()

    with pytest.raises(ValueError, match=r"randint_like.*test_generic.*draws random numbers"):
        capture(Noisy(3), (torch.randn(4, 3),))


def test_what_nobody_expected_is_said_with_the_line() -> None:
    """An operator whose shapes cannot be computed on the meta device has a name and a line too."""

    class Odd(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale)[x[:, 0] > 0].mean()

    with pytest.raises(ValueError, match=r"aten\.index.*test_generic_operators\.py:\d+.*shape"):
        capture(Odd(3), (torch.randn(4, 3),))


@pytest.mark.parametrize("name", ["aten::from_file.default", "aten::nothing.default"])
def test_a_graph_file_names_no_function_but_those_of_tensors(name: str) -> None:
    with pytest.raises(ValueError, match=r"no tensors of tensors|does not know"):
        function_of(name)


class Turned(nn.Module):
    """Rotary embeddings by complex numbers, which it holds in a buffer or as an attribute."""

    turns: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(6, 16), nn.Linear(16, 3), how
        angles = torch.outer(torch.arange(9.0), 1 / 10 ** (torch.arange(0, 4, 2) / 4))
        turns = torch.polar(torch.ones_like(angles), angles)
        if how == "buffer":
            self.register_buffer("turns", turns)
        else:
            self.turns = turns

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.up(x).view(*x.shape[:2], 4, 4)
        pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], 2, 2))
        turned = torch.view_as_real(pairs * self.turns[: x.shape[1]].view(1, x.shape[1], 1, 2))
        if self.how == "conjugate":
            back = pairs.reshape(*x.shape[:2], 8) * self.turns[1 : x.shape[1] + 1].conj()[..., :1]
            turned = turned + torch.view_as_real(back).view(turned.shape)
        return functional.mse_loss(self.down(turned.flatten(2).tanh()), y)


@pytest.mark.parametrize("how", ["buffer", "attribute", "conjugate"])
def test_complex_numbers_that_a_model_holds_are_pairs_of_real_ones(how: str) -> None:
    """A view amid a program was told the shape of the program's result, and nothing was split."""
    torch.manual_seed(0)
    case = make_case(Turned(how), x=torch.randn(4, 5, 6), y=torch.randn(4, 5, 3))
    free = {dim.name for each in generics(case.graph) for dim in each.dims if not dim.whole}
    assert "sample" in free
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)))
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=2))
    by_head = [
        each for each in generics(case.graph) if len([d for d in each.dims if not d.whole]) > 1
    ]
    assert by_head or how == "conjugate"


class Sampled(nn.Module):
    """Looks at images where a network says, as spatial transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.turn = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        turns = torch.eye(2, 3, dtype=x.dtype) + 0.1 * self.turn(h.mean((2, 3))).view(-1, 2, 3)
        grid = functional.affine_grid(turns, [*h.shape], align_corners=False)
        seen = functional.grid_sample(h, grid, padding_mode="border", align_corners=False)
        return seen.square().mean()


@pytest.mark.slow
def test_places_are_no_nan_in_trials() -> None:
    """The kernel read at none of the numbers, which ended the process."""
    torch.manual_seed(0)
    case = make_case(Sampled(), x=torch.randn(4, 2, 6, 6))
    sampler = next(each for each in generics(case.graph) if "sampler" in each.name)
    assert "sample" in [dim.name for dim in sampler.dims if not dim.whole]


@pytest.mark.slow
def test_a_size_that_is_told_is_not_always_that_of_the_result() -> None:
    """Grids are made for images of some size, and were made for images of the grids' own."""
    torch.manual_seed(0)
    case = make_case(Sampled(), x=torch.randn(4, 2, 6, 6))
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)))


def test_means_of_what_is_not_nan_are_tried_with_some() -> None:
    calls = [["aten::nanmean.default", [["in", 0]], {}]]
    assert not find_ties(calls, [OperandShape(((8,), (5,)), "float32")], ())


RECURRENCES: dict[str, nn.Module] = {
    "both ways": nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True),
    "projected": nn.LSTM(6, 5, 2, bias=False, proj_size=3),
    "gated": nn.GRU(6, 5, 2, bidirectional=True),
    "plain": nn.RNN(6, 6, batch_first=True, nonlinearity="relu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", crossed(RECURRENCES, every=2))
def test_recurrences_are_split_by_samples(name: str) -> None:
    """Their kernels end the process where sizes do not fit, so none were tried: all were whole."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first = RECURRENCES[name], nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            made, last = self.inner(h if self.inner.batch_first else h.transpose(0, 1))
            ends = last if isinstance(last, Tensor) else torch.cat(last, -1)
            return made.square().mean() + ends.sin().mean(dim=(0, 2)).square().mean()

    torch.manual_seed(0)
    case = make_case(Model(), x=torch.randn(4, 6, 6))
    assert not case.graph.whole_batch
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, drawing(ways), (ways,)))
    samples = sharding(DimKind.SAMPLE.value)
    assert_equal_to_torch(case, make_plan(case, samples, (2,), num_microbatches=2))


def test_a_recurrence_of_unusual_reads_is_whole() -> None:
    """Nothing is guessed of it, however it is called."""
    doubled = ["aten::mul.Tensor", [["in", 1], 2], {}]
    gru = ["aten::gru.input", [["in", 0], ["step", 0], [], True, 1, 0.0, True, False, True], {}]
    calls = [doubled, gru, ["getitem", [["step", 1], 0], {}]]
    operands = [OperandShape(((4,), (3,), (5,)), "float32")]
    operands += [OperandShape(((1,), (4,), (6,)), "float32")]
    assert not find_ties(calls, operands, (4, 3, 6))


class Looked(nn.Module):
    """Looks rows up in a parameter that is seen in other dims."""

    def __init__(self, shape: tuple[int, ...], how: str) -> None:
        super().__init__()
        self.table, self.how = nn.Parameter(torch.randn(shape)), how

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        seen = {
            "turned": lambda: self.table.mT,
            "one": lambda: self.table[None],
            "folded": lambda: self.table.flatten(0, 1),
        }[self.how]()
        return functional.mse_loss(functional.embedding(ids, seen), y)


@pytest.mark.parametrize(
    ("how", "shape"), [("turned", (4, 4)), ("one", (4,)), ("folded", (2, 3, 4))]
)
def test_rows_of_a_parameter_that_is_seen_in_other_dims(how: str, shape: tuple[int, ...]) -> None:
    """A square table that was turned gave its columns for rows; others ended in torch's words."""
    torch.manual_seed(0)
    rows = {"turned": 4, "one": 1, "folded": 6}[how]
    batch = {"ids": torch.randint(rows, (6,)), "y": torch.randn(6, 4)}
    model = Looked(shape, how)
    case = Case(model, batch, capture(model, kwargs=batch))
    for ways in (2, 3):
        assert_equal_to_torch(case, make_plan(case, sharding("sample"), (ways,)))


class Turning(nn.Module):
    """Uses a square parameter turned: its sizes are those of the one that is stored."""

    def __init__(self, how: str) -> None:
        super().__init__()
        shape = (4, 4, 3, 3) if how == "conv2d" else (4, 4)
        self.how, self.weight = how, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "conv2d":
            return functional.conv2d(x, self.weight.transpose(0, 1), padding=1).square().mean()
        norm = getattr(functional, self.how)
        return norm(x, (4, 4), self.weight.mT).pow(4).mean()


@pytest.mark.parametrize("how", ["layer_norm", "rms_norm", "conv2d"])
def test_a_weight_that_is_turned_is_not_the_one_stored(how: str) -> None:
    """Norms and convolutions computed with it as it lies, in silence where it is square."""
    torch.manual_seed(0)
    model, batch = Turning(how), {"x": torch.randn(6, 4, 4, 4)}
    case = Case(model, batch, capture(model, kwargs=batch))
    assert_equal_to_torch(case, make_plan(case, sharding("sample"), (2,)))
