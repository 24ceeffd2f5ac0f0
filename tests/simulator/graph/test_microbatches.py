"""Which batches may be cut into microbatches: plans then train what torch does with all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stratagem as sg
from examples.models import SmallGPT
from stratagem.executor.running.execute import execute
from stratagem.executor.state.parameter_parts import model_state
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.space.graph_rewrites import steps
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.strategies import replicated
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.graph.token_slices import Slices
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.chain_shares import Share, step_shares
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import Case, crossed, make_plan, sharding, whole

BATCH = 8
EXACT = 1e-11
SGD = Training(optimizer="sgd")

Loss = Callable[["Small", Tensor, Tensor, Tensor], Tensor]


class Small(nn.Module):
    """Two layers, and a loss of their outputs, targets and a value a sample."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
        self.s = nn.Parameter(torch.tensor(0.3))
        self.loss = loss
        self.double()

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        made = self.b(torch.tanh(self.a(x)))
        return self.loss(self, made, y, m) + 0 * self.s


def case_of(loss: Loss) -> Case:
    torch.manual_seed(1)
    batch = {"x": torch.randn(BATCH, 5), "y": torch.randn(BATCH, 3), "m": torch.rand(BATCH)}
    batch["m"][:2] = 0
    batch = {name: value.double() for name, value in batch.items()}
    model = Small(loss)
    return Case(model, batch, capture(model, (), batch))


def assert_trains_the_whole_batch(case: Case) -> None:
    """Every number of microbatches, one and two ranks: loss and gradients are torch's with all."""
    model = copy.deepcopy(case.model)
    truth = model(**case.batch)
    truth.backward()
    for parts in case.graph.microbatch_counts:
        for choose, shape in ((whole, (1,)), (sharding("sample"), (2,))):
            plan = make_plan(case, choose, shape, num_microbatches=parts, training=SGD)
            state = model_state(case.model)
            result = execute(plan, case.graph, state, case.batch, gradients=True, timeout=60)
            assert result.losses[0] == pytest.approx(truth.item(), rel=EXACT, abs=EXACT)
            assert result.gradients is not None
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    difference = result.gradients[name] - parameter.grad
                    assert float(difference.abs().max()) < EXACT, (name, parts, shape)


def squares(made: Tensor, y: Tensor) -> Tensor:
    return (made - y).square().mean(-1)


ADDS_UP: dict[str, tuple[Loss, int]] = {
    "mean": (lambda s, o, y, m: squares(o, y).mean(), 8),
    "mean by a float mask": (lambda s, o, y, m: (squares(o, y) * m).sum() / m.sum(), 8),
    "mean by a clamped count": (
        lambda s, o, y, m: (squares(o, y) * m).sum() / m.sum().clamp(min=1.0),
        8,
    ),
    "penalty": (lambda s, o, y, m: squares(o, y).mean() + 0.1 * s.a.weight.pow(2).sum(), 8),
    "constant": (lambda s, o, y, m: 1 - squares(o, y).mean() + 2, 8),
    "uncertainty": (lambda s, o, y, m: torch.exp(-s.s) * squares(o, y).mean() + s.s, 8),
    "centred targets": (lambda s, o, y, m: squares(o, y - y.mean(0)).mean(), 8),
    "standardised targets": (
        lambda s, o, y, m: squares(o, y / (y - y.mean(0)).square().mean(0).sqrt()).mean(),
        8,
    ),
    "weights by a softmax over samples": (
        lambda s, o, y, m: (squares(o, y) * torch.softmax(m, 0)).sum(),
        8,
    ),
    "weighed sum of means": (
        lambda s, o, y, m: 0.5 * o.mean() + s.s * squares(o, y).mean() - s.s / 3,
        8,
    ),
    "pairs": (
        lambda s, o, y, m: (o.reshape(4, 2, 3)[:, 0] - o.reshape(4, 2, 3)[:, 1]).square().mean(),
        4,
    ),
    "halves": (lambda s, o, y, m: (o.chunk(2)[0] - o.chunk(2)[1]).square().mean(), 4),
    "rows of a fixed table": (
        lambda s, o, y, m: functional.cross_entropy(o @ y.T, torch.arange(BATCH)),
        8,
    ),
}


@pytest.mark.parametrize("name", crossed(ADDS_UP, every=2))
def test_losses_that_add_up_train_the_whole_batch(name: str) -> None:
    loss, most = ADDS_UP[name]
    case = case_of(loss)
    assert case.graph.whole_batch == ""
    assert case.graph.microbatch_counts[-1] == most
    assert_trains_the_whole_batch(case)


STAYS_WHOLE: dict[str, tuple[Loss, str]] = {
    "root": (lambda s, o, y, m: squares(o, y).mean().sqrt(), "takes the sqrt of a sum over"),
    "product": (lambda s, o, y, m: o.mean() * squares(o, y).mean(), "multiplies a sum by a sum"),
    "ratio": (lambda s, o, y, m: squares(o, y).sum() / o.exp().sum(), "divides by a sum over"),
    "centred outputs": (lambda s, o, y, m: squares(o - o.mean(0), y).mean(), "to each of them"),
    "Gram": (lambda s, o, y, m: (o @ o.T - y @ y.T).square().mean(), "with one another"),
    "softmax over samples": (lambda s, o, y, m: (torch.softmax(o, 0) * y).sum(), "mixes samples"),
    "one of the samples": (lambda s, o, y, m: (o[0] * o.mean(0)).sum(), "by their number"),
    "in-batch contrast": (
        lambda s, o, y, m: functional.cross_entropy(o @ o.T, torch.arange(BATCH)),
        "with one another",
    ),
    "less the first target": (
        lambda s, o, y, m: squares(o, y - y[0]).mean(),
        "by their number",
    ),
    "largest of means": (
        lambda s, o, y, m: torch.maximum(o.mean(), squares(o, y).mean()),
        "takes the maximum of",
    ),
    "penalty alone": (
        lambda s, o, y, m: s.a.weight.square().sum() + 0 * y.sum(),
        "is no sum over",
    ),
}


@pytest.mark.parametrize("name", STAYS_WHOLE)
def test_losses_that_do_not_add_up_keep_the_batch_whole(name: str) -> None:
    loss, why = STAYS_WHOLE[name]
    case = case_of(loss)
    assert why in case.graph.whole_batch
    assert case.graph.microbatch_counts == (1,)
    with pytest.raises(ValueError, match=r"cannot be cut into 2 microbatches: .*choose 1"):
        case.graph.microbatch(2)
    assert_trains_the_whole_batch(case)


def test_positions_as_many_as_samples_are_no_samples() -> None:
    """Each of 8 samples has 8 positions, which are an input: both dims are as long as the batch.

    Cut along both, two microbatches would train two blocks of four samples by four positions.
    """
    torch.manual_seed(0)
    model = SmallGPT(num_layers=1, hidden=12, num_heads=2, vocabulary=20, sequence=8).double()
    ids = torch.randint(0, 20, (8, 8))
    batch = {"input_ids": ids, "labels": torch.randint(0, 20, (8, 8))}

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.places = nn.Embedding(8, 20).double()

        def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
            far = self.places(positions).mean(-1).square()
            loss: Tensor = self.inner(input_ids, labels)
            return loss + (far * self.inner.tokens(input_ids).mean(-1)).mean()

    batch["positions"] = torch.arange(8)
    placed = Placed()
    case = Case(placed, batch, capture(placed, (), batch))
    assert {given.name: given.sample_dim for given in case.graph.inputs} == {
        "input_ids": 0,
        "labels": 0,
        "positions": None,
    }
    assert case.graph.microbatch_counts == (1, 2, 4, 8)
    assert_trains_the_whole_batch(case)


class TwoTowers(nn.Module):
    """Images and texts, each told by its own row of their products (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(5, 4), nn.Linear(7, 4)
        self.double()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        scores = self.image(image) @ self.text(text).T
        own = torch.arange(scores.shape[0])
        return functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)


def test_two_towers_stay_whole_and_keep_both_batches() -> None:
    torch.manual_seed(1)
    batch = {"image": torch.randn(8, 5).double(), "text": torch.randn(8, 7).double()}
    model = TwoTowers()
    case = Case(model, batch, capture(model, (), batch))
    assert "with one another" in case.graph.whole_batch
    assert [given.sample_dim for given in case.graph.inputs] == [0, 0]
    assert_trains_the_whole_batch(case)


class TwoViews(nn.Module):
    """Both views of a batch go through the layers as one, and each is compared with its other."""

    def __init__(self, apart: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.apart = nn.Linear(5, 4), apart
        self.double()

    def forward(self, one: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        rows = torch.tanh(self.layer(torch.cat([one, other])))
        first, second = self.apart(rows)
        both = functional.cross_entropy(rows, torch.cat([labels, labels]))
        return both + (first - second).square().mean()


@pytest.mark.parametrize(
    "apart",
    [lambda rows: rows.chunk(2), lambda rows: rows.split(8), lambda rows: (rows[:8], rows[8:])],
)
def test_batches_behind_one_another_are_cut_together(
    apart: Callable[[Tensor], Sequence[Tensor]],
) -> None:
    torch.manual_seed(1)
    batch = {"one": torch.randn(8, 5).double(), "other": torch.randn(8, 5).double()}
    batch["labels"] = torch.randint(0, 4, (8,))
    batch["labels"][2] = -100
    model = TwoViews(apart)
    case = Case(model, batch, capture(model, (), batch))
    assert case.graph.microbatch_counts == (1, 2, 4, 8)
    assert_trains_the_whole_batch(case)


def test_an_input_whose_batch_is_a_hidden_size_is_not_cut() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)

        def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
            return (self.first(x) @ mixing).square().mean()

    torch.manual_seed(0)
    model = Mixed().double()
    batch = {"x": torch.randn(8, 6).double(), "mixing": torch.randn(8, 3).double()}
    case = Case(model, batch, capture(model, (), batch))
    assert case.graph.microbatch_counts == (1, 2, 4, 8)
    assert_trains_the_whole_batch(case)


def test_batch_norms_are_told() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    targets = torch.randint(3, (8,))
    graph = capture(model, (torch.randn(8, 6),), loss=functional.cross_entropy, targets=targets)
    assert graph.whole_batch == ""
    assert graph.batch_norms == ("1",)
    plan = make_plan(Case(model, {}, graph), whole, (1,), num_microbatches=4)
    told = " ".join(describe(sg.simulate(plan, graph), graph).split())
    assert "1 batch norms (such as 1) take the mean and variance of each microbatch of 2" in told
    plan = make_plan(Case(model, {}, graph), whole, (1,))
    assert "mean and variance" not in describe(sg.simulate(plan, graph), graph)
    assert (
        capture(
            model.eval(), (torch.randn(8, 6),), loss=functional.cross_entropy, targets=targets
        ).batch_norms
        == ()
    )


def test_a_search_of_a_whole_batch_tries_one_microbatch_and_says_so() -> None:
    graph = case_of(STAYS_WHOLE["root"][0]).graph
    cluster = sg.Cluster.preset("local-cpu", devices_per_node=2)
    budget = sg.Budget(evaluations=50)
    result = sg.search(graph, cluster, budget=budget, progress=False)
    assert {record.skeleton.num_microbatches for record in result.space} == {1}
    assert any(record.skeleton.num_ranks == 2 for record in result.space)
    assert "sqrt" in result.notes["batch not cut into microbatches"]
    assert "takes the sqrt" in " ".join(describe(result.simulation, graph).split())
    two = sg.Space(microbatches=(2,))
    with pytest.raises(ValueError, match=r"cut into 2 microbatches: .* takes the sqrt"):
        sg.search(graph, cluster, budget=budget, space=two, progress=False)


def test_every_method_of_the_literature_keeps_a_whole_batch_whole() -> None:
    graph = case_of(STAYS_WHOLE["centred outputs"][0]).graph
    cluster = sg.Cluster.preset("dgx-a100", num_nodes=1)
    situation = Situation(graph, cluster, Training(), default_costs())
    for name in sorted(set(METHODS) - {"REINFORCE", "exhaustive", "Unity"}):
        for plan in METHODS[name](situation):
            assert plan.num_microbatches == 1, name


def test_an_operator_of_pairs_is_cut_between_them() -> None:
    graph = case_of(ADDS_UP["halves"][0]).graph
    with pytest.raises(ValueError, match=r"divisor of 4 \(samples belong together in 4 groups\)"):
        graph.microbatch(8)


def test_files_keep_what_may_be_cut() -> None:
    for loss in (ADDS_UP["penalty"][0], STAYS_WHOLE["root"][0]):
        graph = case_of(loss).graph
        again = OperatorGraph.from_json(graph.to_json())
        assert again.whole_batch == graph.whole_batch
        assert again.microbatch_counts == graph.microbatch_counts


class Penalised(SmallGPT):
    """A GPT whose loss is to some power, and has a penalty on its weights."""

    power = 1.0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids, labels)
        loss = loss if self.power == 1 else loss.pow(self.power)
        return loss + 0.1 * self.head.weight.square().sum()


def penalised(power: float) -> Case:
    torch.manual_seed(0)
    model = Penalised(num_layers=1, hidden=12, num_heads=2, vocabulary=20, sequence=6).double()
    model.power = power
    ids, labels = torch.randint(0, 20, (2, 4, 6))
    batch = {"input_ids": ids, "labels": labels}
    return Case(model, batch, capture(model, (), batch))


@pytest.mark.parametrize("slices", [3, (1, 5)])
def test_token_slices_count_penalties_once(slices: Slices) -> None:
    """The losses of slices are added up as those of microbatches are."""
    case = penalised(1.0)
    plan = make_plan(case, whole, (1,), (1,), num_microbatches=2, training=SGD)
    plan = replace(plan, schedule="terapipe", token_slices=slices)
    result = execute(plan, case.graph, model_state(case.model), case.batch, gradients=True)
    truth = case.model(**case.batch)
    truth.backward()
    assert result.losses[0] == pytest.approx(truth.item(), rel=EXACT)
    assert result.gradients is not None
    for name, parameter in case.model.named_parameters():
        assert parameter.grad is not None
        assert float((result.gradients[name] - parameter.grad).abs().max()) < EXACT, name


def test_token_slices_of_a_root_are_refused() -> None:
    case = penalised(0.5)
    assert "takes the pow of a sum over samples" in case.graph.whole_batch
    plan = make_plan(case, whole, (1,), (1,), training=SGD)
    plan = replace(plan, schedule="terapipe", token_slices=2)
    with pytest.raises(ValueError, match=r"takes the pow of a sum over tokens.*token_slices to 1"):
        plan.check(case.graph)


def test_steps_say_what_each_part_adds() -> None:
    linear = [["mul", [["in", 0], ["weight", 0]]], ["sub", [3.0, ["step", 0]]]]
    assert step_shares(linear, [Share.SUM]).added == ((1, 0),)
    assert step_shares(linear, [Share.SAME]).share is Share.SAME
    masked = [["masked_fill", [["in", 0], ["in", 1], 5.0]]]
    assert step_shares(masked, [Share.SUM, Share.SAME]).added == ((0, 2),)
    assert step_shares(masked, [Share.SUM, Share.SUM]).problem
    counted = [["cast", [["in", 0], "int64"]]]
    assert step_shares(counted, [Share.SUM]).problem == "casts to int64"


class Pooled(nn.Module):
    """Layers of the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.tanh(self.a(x)).mean(0))).sum()


def test_a_bias_behind_a_mean_over_the_batch_is_added_once() -> None:
    """It kept the batch whole, as each microbatch would have added all of it."""
    batch = {"x": torch.randn(BATCH, 5).double()}
    case = Case(Pooled(), batch, capture(Pooled(), (), batch))
    assert case.graph.microbatch_counts == (1, 2, 4, 8)
    assert_trains_the_whole_batch(case)


def test_each_part_adds_its_share_of_a_bias() -> None:
    b = GraphBuilder("mean")
    x = b.input("x", (8, 6))
    pooled = b.mean(b.linear(x, b.parameter("w", (4, 6))), [0])
    made = b.linear(pooled, b.parameter("v", (3, 4)), b.parameter("b", (3,)))
    graph = b.build(b.reduce(made))
    assert graph.microbatch_counts == (1, 2, 4, 8)
    small = graph.microbatch(4)
    (biased,) = (op for op in small.operators if "bias_parts" in op.attributes)
    assert biased.attributes["bias_parts"] == 4
    assert replicated(small, (1,)).keys() == set(graph.names)


class Summed(nn.Module):
    """A sum of two layers of the mean, which a rewriting makes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
        self.c = nn.Linear(6, 3, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        made = self.a(x)
        return (self.b(made.mean(0)) + self.c(made.sum(0))).sum()


def test_a_sum_of_layers_adds_its_bias_once() -> None:
    batch = {"x": torch.randn(BATCH, 5).double()}
    model = Summed()
    graph = capture(model, (), batch)
    (step,) = (
        step
        for step in steps(graph)
        if any(op.kind == "linear_sum" for op in rewrite(graph, [step]).graph.operators)
    )
    rewritten = rewrite(graph, [step])
    plan = make_plan(Case(model, batch, rewritten.graph), whole, (1,), num_microbatches=4)
    plan = replace(plan, substitutions=rewritten.steps, training=SGD)
    result = execute(plan, graph, model_state(model), batch, gradients=True)
    truth = model(**batch)
    truth.backward()
    assert result.losses[0] == pytest.approx(truth.item(), rel=EXACT)
    assert result.gradients is not None
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert float((result.gradients[name] - parameter.grad).abs().max()) < EXACT, name
