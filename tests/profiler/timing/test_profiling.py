"""What is profiled first, and the verb of the command line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from stratagem.calibration import profile_space
from stratagem.calibration.profile_space import planned_operators, space_operators
from stratagem.cli.app import app
from stratagem.profiler import Effort, ProfileReport, TimingCache
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.space.situation import Situation
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import Direction, RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.kernels.loss import TorchLosses
from stratagem.simulator.torch_ops.kernels.randomness import words
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels

CLUSTER = Cluster.preset("local-cpu")
QUICK = Effort(seconds=0.0, min_repeats=2, evict_bytes=0, max_drift=float("inf"))


def predicted(operator, sizes) -> float:
    return sum(
        RooflineCosts()
        .operator_cost(operator, sizes, direction, Training(), CLUSTER.device_type(0))
        .seconds
        for direction in Direction
    )


def plan_of(graph: OperatorGraph) -> Plan:
    situation = Situation(graph, CLUSTER, Training(), RooflineCosts())
    return baseline_plans(situation)["data parallel"].plan


def test_a_plans_operators_come_by_their_share_of_the_step() -> None:
    """Two equal middle layers count twice, so they come before the one that is larger."""
    graph = mlp([512, 640, 640, 640, 900], batch=64)
    found = planned_operators(graph, plan_of(graph))
    shares = []
    for operator, sizes in found:
        same = [
            o for o in graph.operators if o.signature == graph.operator(operator.name).signature
        ]
        shares.append(len(same) * predicted(operator, sizes))
    assert shares == sorted(shares, reverse=True)
    assert found[0][0].dims[-1].size == 640
    assert len(found) == len({(o.kind, tuple(s.items())) for o, s in found})


@pytest.mark.parametrize("limit", [1, 3, 6, 12])
def test_a_searchs_operators_come_in_proportion_to_their_share(limit: int) -> None:
    """Like seats of a parliament, given one after the other to the largest share / (seats + 1)."""
    graph = mlp([512, 640, 900], batch=64)
    found = space_operators(graph, CLUSTER, Training())
    votes = {o.name: predicted(o, o.sizes) for o in graph.operators if not o.is_source}
    room = Counter(operator.name for operator, _ in found)
    seats: Counter[str] = Counter()
    for _ in range(limit):
        open_ = [name for name in votes if seats[name] < room[name]]
        seats[max(open_, key=lambda name: votes[name] / (seats[name] + 1))] += 1
    assert Counter(operator.name for operator, _ in found[:limit]) == seats


def test_the_plainest_shapes_of_an_operator_come_first() -> None:
    found = space_operators(mlp([512, 640], batch=64), CLUSTER, Training())
    linear = [sizes for operator, sizes in found if operator.kind == "linear"]
    assert linear[0]["sample"] == 64
    assert [sizes["sample"] for sizes in linear].index(32) < len(linear) // 2


class CountedLosses(TorchLosses):
    """Kernels that say how often they ran."""

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()

    def sums(self, rows: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        self.passes["forward"] += 1
        return super().sums(rows, target, ignored)

    def gradient(self, rows: Tensor, *others) -> Tensor:
        self.passes["backward"] += 1
        return super().gradient(rows, *others)


def test_what_is_timed_is_what_a_rank_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout was timed with the eighty operators of torch that a kernel stands for on a GPU."""
    b = GraphBuilder("model")
    x = b.linear(b.input("x", (8, 16)), b.parameter("up", (16, 16)))
    x = b.elementwise([x], [["dropout", [["in", 0], 0.5]]])
    logits = b.linear(x, b.parameter("head", (10, 16)))
    graph = b.build(b.cross_entropy(logits, b.input("labels", (8,), "int64")))
    losses, drawn, asked = CountedLosses(), [], []

    def draw(*given) -> Tensor:
        drawn.append(given)
        return words(*given)

    def faster_on(device: torch.device) -> FasterKernels:
        asked.append(device.type)
        return FasterKernels(draw, losses)

    monkeypatch.setattr(profile_space, "faster_on", faster_on)
    monkeypatch.setattr(profile_space, "profile_dispatch", lambda *given, **how: None)
    operators = [(each, each.sizes) for each in graph.operators if not each.is_source]
    cluster = Cluster.preset("local-cpu", devices_per_node=1)
    profile_space.profile_wanted(
        *(operators, cluster, Training()),
        cache=tmp_path / "timings.sqlite",
        effort=QUICK,
        progress=False,
    )
    assert asked == ["cpu"]
    assert losses.passes["forward"] >= QUICK.min_repeats
    assert losses.passes["backward"] >= QUICK.min_repeats
    assert len(drawn) >= QUICK.min_repeats


@pytest.mark.parametrize(
    ("touched", "asked", "evicted"),
    [
        (None, None, None),
        (100, None, 8 * 2**20),
        (50 * 2**20, None, 50 * 2**20),
        (10**12, None, 128 * 2**20),
        (10**12, 5, 5),
    ],
)
def test_as_much_is_evicted_as_a_step_touches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    touched: int | None,
    asked: int | None,
    evicted: int | None,
) -> None:
    """Steps of a GPT on two cores were a fifth longer than predicted with 8 MiB whatever it is."""
    efforts = []
    report = ProfileReport(0, 0, 0.0)

    def profile_operators(*given, effort: Effort, **how) -> ProfileReport:
        efforts.append(effort)
        return report

    def profile_updates(*given, effort: Effort, **how) -> None:
        efforts.append(effort)

    monkeypatch.setattr(profile_space, "profile_operators", profile_operators)
    monkeypatch.setattr(profile_space, "profile_updates", profile_updates)
    monkeypatch.setattr(profile_space, "profile_dispatch", lambda *given, **how: None)
    profile_space.profile_wanted(
        *([], Cluster.preset("local-cpu", devices_per_node=2), Training()),
        cache=tmp_path / "timings.sqlite",
        touched=touched,
        effort=Effort(evict_bytes=asked),
        progress=False,
    )
    assert [each.evict_bytes for each in efforts] == [evicted, evicted]


def test_a_step_touches_states_and_results() -> None:
    """By hand: parameters four times (Adam), and what every operator makes, on two devices."""
    graph = mlp([16, 24, 16], batch=8)
    cluster = Cluster.preset("local-cpu", devices_per_node=2)
    parameters = 16 * 24 + 24 + 24 * 16 + 16
    given, linears, chain, rest = 8 * 16 * 4 + 8 * 8, 8 * (24 + 16) * 4, 8 * 24 * 4, 8 + 4
    made = given + linears + chain + rest  # The rest: the count of labels, and the loss.
    assert profile_space.touched_bytes(graph, cluster, Training()) == (16 * parameters + made) // 2
    sgd = profile_space.touched_bytes(graph, cluster, Training(optimizer="sgd"))
    assert sgd == (8 * parameters + made) // 2


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "timings.sqlite"))
    graph = mlp([16, 24, 16], batch=8)
    (tmp_path / "graph.json").write_text(graph.to_json())
    plan_of(graph).save(tmp_path / "plan.json")
    real = profile_space.profile_operators
    monkeypatch.setattr(
        profile_space, "profile_operators", lambda *a, **k: real(*a, **{**k, "effort": QUICK})
    )
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["profile", "graph.json", *arguments])


@pytest.mark.slow
def test_a_plan_is_profiled(place: Path) -> None:
    shown = call("--plan", "plan.json")
    assert shown.exit_code == 0, shown.output
    assert "4 operators timed in " in shown.stdout
    assert ", 0 were there already, 0 left out" in shown.stdout
    assert "linear" in shown.stdout
    assert "of the fallback" in shown.stdout
    assert " 0 operators timed in " in " " + call("--plan", "plan.json").stdout


def test_a_limit_says_what_was_left_out(place: Path) -> None:
    shown = call("--devices", "1", "--limit", "2")
    assert shown.exit_code == 0, shown.output
    assert "2 operators timed in " in shown.stdout
    assert "distinct operators were not timed and are estimated from the others" in shown.stdout
    refused = call("--limit", "0")
    assert refused.exit_code == 2
    assert "the limit is 0 operators; profile at least 1" in refused.output


def test_no_time_leaves_everything_out(place: Path) -> None:
    shown = call("--devices", "1", "--seconds", "0", "--cache", "other.sqlite")
    assert shown.exit_code == 0, shown.output
    assert "0 operators timed in " in shown.stdout
    with TimingCache("other.sqlite") as cache:
        kinds = {entry.key.operator.kind for entry in cache.entries()}
    assert kinds == {"update", "dispatch", "pace"}


def test_an_interrupt_ends_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments, **options):
        error = KeyboardInterrupt()
        error.add_note("interrupted: 2 of 3 operators were timed; profile again to go on")
        raise error

    monkeypatch.setattr(profile_space, "profile_operators", interrupted)
    shown = call("--devices", "1")
    assert shown.exit_code == 130
    assert (
        shown.stderr.strip() == "interrupted: 2 of 3 operators were timed; profile again to go on"
    )
