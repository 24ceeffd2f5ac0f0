"""Links from times: those of nccl-tests, those measured here; and whose devices are profiled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import stratagem as sg
from stratagem.calibration import measured_links, profile_space
from stratagem.calibration.executor_measurements import executor_launch
from stratagem.cli.app import app
from stratagem.profiler import CollectiveTiming, TimingCache, time_collectives
from stratagem.profiler.cache.timing_keys import CollectiveEntry, CollectiveKey, Measurement
from stratagem.profiler.timing.collective_timing import KINDS
from stratagem.profiler.timing.link_fits import fitted_links, price
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.hardware.cluster import Calibration, Cluster, Link
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import axis_link
from stratagem.simulator.plan.provenance import Environment
from tests.profiler.costs.test_nccl_tests import log, row
from tests.support.cuda.fake_nccl import run_fake

CARD = "NVIDIA A100-SXM4-40GB"
GIVEN = Cluster.preset("dgx-a100-40", num_nodes=4)
TRUE = replace(
    GIVEN,
    intra_node=Link("NVLink 3", 77.0, 21.0),
    inter_node=replace(GIVEN.inter_node, bandwidth_gb_s=33.0, latency_us=44.0, by_group_size=()),
)
SIZES = (2**13, 2**17, 2**21, 2**25, 2**29)


def entry(
    kind: Collective, nbytes: int, size: int, nodes: int, *, device: str = CARD, at: float = 1.0
) -> CollectiveEntry:
    link = "intra-node" if nodes == 1 else "inter-node"
    key = CollectiveKey(Environment(device, ""), kind, nbytes, size, "nccl", link, nodes)
    made = CollectiveEntry(key, Measurement(1.0, 0.0, 20, origin="nccl-tests"), at)
    return replace(made, measurement=replace(made.measurement, median_s=price(TRUE, made)))


def entries(
    groups: Sequence[tuple[int, int]], kinds: Sequence[Collective], **more: Any
) -> list[CollectiveEntry]:
    return [entry(k, n, *group, **more) for group in groups for k in kinds for n in SIZES]


class TestFit:
    def test_links_inside_and_between_are_recovered(self) -> None:
        """Prices are those of the true cluster, of which the fit knows nothing."""
        found = fitted_links(GIVEN, entries([(8, 1), (4, 1), (16, 2), (32, 4)], KINDS))
        assert len(found.inside) == len(found.between) == 2 * len(KINDS) * len(SIZES)
        inside, between = found.cluster.intra_node, found.cluster.inter_node
        assert inside.bandwidth_gb_s == pytest.approx(77.0, rel=0.01)
        assert inside.latency_us == pytest.approx(21.0, rel=0.01)
        assert between.bandwidth_gb_s == pytest.approx(33.0, rel=0.01)
        assert between.latency_us == pytest.approx(44.0, rel=0.02)
        assert [group.size for group in between.by_group_size] == [2, 4]
        assert between.num_cards == GIVEN.inter_node.num_cards
        for each in (*found.inside, *found.between):
            told = price(found.cluster, each)
            assert told == pytest.approx(each.measurement.median_s, rel=0.02)

    def test_a_link_without_times_stays(self) -> None:
        found = fitted_links(GIVEN, entries([(8, 1)], [Collective.ALL_REDUCE]))
        assert found.cluster.inter_node == GIVEN.inter_node
        assert found.cluster.intra_node != GIVEN.intra_node
        assert [row[0] for row in found.table.rows] == ["in a node"]

    def test_the_environment_measured_last_counts(self) -> None:
        old = [
            replace(each, measurement=replace(each.measurement, median_s=1.0))
            for each in entries([(8, 1)], [Collective.ALL_REDUCE])
        ]
        old = [
            replace(e, key=replace(e.key, environment=Environment(CARD, "", nccl="1")))
            for e in old
        ]
        new = entries([(8, 1)], [Collective.ALL_REDUCE], at=2.0)
        found = fitted_links(GIVEN, [*new, *old])
        assert found.inside == tuple(new)
        assert found.cluster.intra_node.by_group_size[0].bandwidth_gb_s == pytest.approx(
            77, rel=0.01
        )

    @pytest.mark.parametrize(
        ("found", "words"),
        [
            ([], "no collectives of A100-40GB .* but of nothing"),
            (
                entries([(8, 1)], [Collective.SEND], device="NVIDIA H200"),
                "but of NVIDIA H200 over intra-node: import",
            ),
            (
                [entry(Collective.ALL_REDUCE, 2**20, 16, 2)],
                "1 times cannot tell latency from bandwidth",
            ),
        ],
    )
    def test_what_cannot_be_fitted(self, found: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            fitted_links(GIVEN, found)

    def test_groups_larger_than_a_node(self) -> None:
        half = GIVEN.resized(devices_per_node=4)
        with pytest.raises(
            ValueError, match=r"collectives of 8 devices of a node, .* has 4 on each"
        ):
            fitted_links(half, entries([(8, 1)], [Collective.ALL_REDUCE]))


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRATAGEM_CACHE", str(tmp_path / "timings.sqlite"))
    return tmp_path


def test_times_of_nccl_tests_reach_links_and_prices(place: Path) -> None:
    """From the printed table to the step of a plan; they once lay in the cache for good."""
    rows = "".join(
        row(n, entry(Collective.ALL_REDUCE, n, 8, 1).measurement.median_s * 1e6, 1.75, "sum")
        for n in SIZES
    )
    (place / "all_reduce.log").write_text(log("all_reduce", 8, rows))
    shown = call("cache", "import", "all_reduce.log")
    assert shown.exit_code == 0, shown.output
    assert "stratagem clusters NAME --fit --out FILE" in shown.stdout
    shown = call("clusters", "dgx-a100-40", "--nodes", "1", "--fit", "--out", "mine.json")
    assert shown.exit_code == 0, shown.output
    assert "as collectives showed them" in shown.stdout
    mine = Cluster.load("mine.json")
    given = Cluster.preset("dgx-a100-40", num_nodes=1)
    assert replace(mine, intra_node=given.intra_node) == given
    for nbytes in SIZES:
        each = entry(Collective.ALL_REDUCE, nbytes, 8, 1)
        assert price(mine, each) == pytest.approx(each.measurement.median_s, rel=0.02)
    assert sg.hardware.fit_links(given) == mine
    graph = gpt(num_layers=1, hidden=256, num_heads=8, vocabulary=512, sequence=64, batch=16)
    plan = sg.TrainingSetup(tensor=8).plan(graph, mine)
    true = replace(given, intra_node=TRUE.intra_node)
    fitted, exact, before = (
        sg.simulate(replace(plan, cluster=each), graph).step_time for each in (mine, true, given)
    )
    assert fitted == pytest.approx(exact, rel=0.02)
    assert fitted != pytest.approx(before, rel=0.1)
    refused = call("clusters", "dgx-h100", "--fit")
    assert refused.exit_code == 2
    assert "no collectives of H100-80GB" in refused.stderr
    assert call("clusters", "dgx-h100", "--cache", "x.sqlite").exit_code == 2


class TestDeviceHere:
    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        def called(name: str) -> None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)

        return called

    @pytest.mark.parametrize(
        ("preset", "name"),
        [
            ("dgx-a100", "NVIDIA A100-SXM4-80GB"),
            ("dgx-a100-40", "NVIDIA A100-SXM4-40GB"),
            ("dgx-h100", "NVIDIA H100 80GB HBM3"),
            ("dgx-h200", "NVIDIA H200"),
            ("p3.16xlarge", "Tesla V100-SXM2-16GB"),
        ],
    )
    def test_the_gpu_of_the_cluster_is_taken(self, gpu: Any, preset: str, name: str) -> None:
        gpu(name)
        assert measured_links.device_here(Cluster.preset(preset))[1] == "cuda"

    @pytest.mark.parametrize("preset", ["dgx-a100", "p3.16xlarge", "dgx-h100"])
    def test_another_gpu_is_refused(self, gpu: Any, place: Path, preset: str) -> None:
        """Times of an H200 once became prices of an A100."""
        gpu("NVIDIA H200")
        graph = mlp([16, 24, 16], batch=8)
        cluster = Cluster.preset(preset)
        with pytest.raises(ValueError, match=r"the GPU here is 'NVIDIA H200', .* of H200 devices"):
            sg.profile(graph, cluster, progress=False)
        (place / "graph.json").write_text(graph.to_json())
        shown = call("profile", "graph.json", "--cluster", preset)
        assert shown.exit_code == 2
        assert "the GPU here is 'NVIDIA H200'" in shown.stderr
        assert not (place / "timings.sqlite").exists()

    def test_a_type_of_ones_own_names_its_gpus(self, gpu: Any) -> None:
        gpu("NVIDIA L4")
        cluster = Cluster.preset("dgx-h200")
        mine = replace(cluster.device_types[0], name="mine", torch_names=())
        cluster = replace(cluster, node_devices=("mine",), device_types=(mine,))
        with pytest.raises(ValueError, match="name it in torch_names of the type"):
            measured_links.device_here(cluster)
        named = replace(mine, torch_names=("NVIDIA L4",))
        assert measured_links.device_here(replace(cluster, device_types=(named,))) == (
            named,
            "cuda",
        )

    def test_names_do_not_make_another_type(self) -> None:
        """Plans and clusters of files from before types had names are equal to those of now."""
        new = Cluster.preset("dgx-h200")
        old = replace(new, device_types=(replace(new.device_types[0], torch_names=()),))
        assert old == new
        assert old.device_type(0).is_called("NVIDIA H200")


def timings_over(link: Link, size: int) -> list[CollectiveTiming]:
    seen = axis_link(link, False, 1)
    return [
        CollectiveTiming(kind, n, size, collective_time(kind, n, size, seen))
        for kind in KINDS
        for n in SIZES
    ]


def test_a_measured_host_makes_no_cluster_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch costs says nothing of how far steps are off."""
    monkeypatch.setattr(measured_links, "executor_launch", lambda device: 21e-6)
    plain = replace(Cluster.preset("dgx-h200"), calibration=Calibration())
    found = measured_links.measured_host(plain).calibration
    assert found.launch_us == pytest.approx(21.0)
    assert found.spread == Calibration().spread > 0


def test_a_launch_takes_the_host_some_microseconds() -> None:
    """Beside what eager torch takes for an addition, of which a step has many."""
    one = torch.ones(1)
    begun = time.perf_counter()
    for _ in range(1000):
        one + one
    addition = (time.perf_counter() - begun) / 1000
    assert 0.5 * addition < executor_launch("cpu") < 500 * addition


class TestMeasuredLinks:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
        """Collectives of a known link in the place of measured ones; how many, by what."""
        found: list[tuple[int, str]] = []

        def measure(count: int, *, backend: str) -> list[CollectiveTiming]:
            found.append((count, backend))
            return timings_over(Link("", 5.0, 30.0), count)

        monkeypatch.setattr(measured_links, "measure_collectives", measure)
        return found

    def test_the_given_cluster_is_kept(self, place: Path, asked: Any) -> None:
        """All but the link in a node: it was once a cluster of CPUs, whatever was given."""
        cpus = Cluster.preset("local-cpu", num_nodes=2, devices_per_node=4)
        given = replace(cpus, name="mine", node_price_per_hour=3.0, compute_slowdown=0.2)
        found = measured_links.measured_links(given).cluster
        assert asked == [(4, "gloo")]
        assert replace(found, intra_node=given.intra_node) == given
        assert found.intra_node.bandwidth_gb_s == pytest.approx(5.0, rel=0.01)
        assert found.intra_node.shares_compute
        with TimingCache() as cache:
            assert {e.key.environment.load for e in cache.collective_entries()} == {3}

    def test_a_cluster_of_gpus_has_its_links_measured_by_nccl(
        self, place: Path, asked: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        # A build for CUDA asks each device when its version is asked for, and there is none.
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
        checked: list[int] = []
        monkeypatch.setattr(measured_links, "check_gpus", checked.append)
        monkeypatch.setattr(measured_links, "executor_launch", lambda device: 21e-6)
        given = Cluster.preset("dgx-h200", num_nodes=2)
        found = measured_links.measured_links(given).cluster
        assert checked == [8]
        assert asked == [(8, "nccl")]
        assert found.calibration == replace(given.calibration, launch_us=21.0)
        calibration = given.calibration
        assert replace(found, intra_node=given.intra_node, calibration=calibration) == given
        assert found.intra_node.name == given.intra_node.name
        assert not found.intra_node.shares_compute
        again = sg.hardware.fit_links(given)
        assert again.intra_node.by_group_size == found.intra_node.by_group_size

    @pytest.mark.slow
    def test_the_command_line_writes_it(self, place: Path, asked: Any, monkeypatch: Any) -> None:
        (place / "graph.json").write_text(mlp([16, 24, 16], batch=8).to_json())
        given = replace(Cluster.preset("local-cpu"), name="mine", node_price_per_hour=3.0)
        (place / "mine.json").write_text(given.to_json())
        quick = ("--seconds", "0", "--limit", "1", "--out", "here.json")
        shown = call("profile", "graph.json", "--cluster", "mine.json", *quick)
        assert shown.exit_code == 0, shown.output
        found = Cluster.load("here.json")
        assert (found.name, found.node_price_per_hour) == ("mine", 3.0)
        assert found.intra_node.bandwidth_gb_s == pytest.approx(5.0, rel=0.01)
        assert found.inter_node == given.inter_node


@pytest.mark.slow
def test_collectives_are_timed_over_nccl() -> None:
    """Every kind ends and is timed, also where a rank is in no group."""
    found = run_fake(3, lambda comm: time_collectives(comm, [4096], groups=[2, 3], repeats=1))
    assert found[0] == found[1] == found[2]
    assert {(each.kind, each.size) for each in found[0]} == {
        (kind, size) for kind in KINDS for size in (2, 3) if (kind, size) != (Collective.SEND, 3)
    }


class TestPlanBesideCluster:
    @pytest.fixture
    def graph(self) -> sg.OperatorGraph:
        return mlp([16, 24, 16], batch=8)

    @pytest.fixture
    def plan(self, graph: sg.OperatorGraph) -> sg.Plan:
        setup = sg.TrainingSetup(training=sg.Training())
        return setup.plan(graph, Cluster.preset("local-cpu"))

    def test_what_is_left_out_is_the_plans(self, graph: Any, plan: sg.Plan) -> None:
        found = profile_space.wanted_operators(graph, plan=plan)
        assert (found.cluster, found.training) == (plan.cluster, plan.training)
        same = profile_space.wanted_operators(
            graph, Cluster.preset("local-cpu"), plan=plan, training=sg.Training()
        )
        assert [operator.name for operator, _ in same.operators] == [
            operator.name for operator, _ in found.operators
        ]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (
                {"cluster": Cluster.preset("dgx-a100")},
                r"the cluster is 'dgx-a100' \(2 × 8 A100-80GB\), .* for 'local-cpu' \(1 × 2 cpu\)",
            ),
            (
                {"training": sg.Training("bfloat16")},
                "training's precision is 'bfloat16', not 'float32', as plan",
            ),
        ],
    )
    def test_a_contradiction_is_an_error(
        self, graph: Any, plan: sg.Plan, more: Any, words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            sg.profile(graph, plan=plan, progress=False, **more)

    def test_neither_is_one_too(self, graph: Any) -> None:
        with pytest.raises(ValueError, match="neither a cluster nor a plan is given"):
            sg.profile(graph)

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (("--cluster", "dgx-a100"), "'dgx-a100' (2 × 8 A100-80GB)"),
            (("--devices", "4"), "(1 × 4 cpu)"),
            (("--precision", "bfloat16"), "precision is 'bfloat16', not 'float32'"),
            (("--optimizer", "sgd"), "optimizer is 'sgd', not 'adam'"),
        ],
    )
    def test_on_the_command_line(
        self, place: Path, graph: Any, plan: sg.Plan, given: tuple[str, str], words: str
    ) -> None:
        plan.save("plan.json")
        Path("graph.json").write_text(graph.to_json())
        shown = call("profile", "graph.json", "--plan", "plan.json", *given)
        assert shown.exit_code == 2
        assert words in shown.stderr
        assert not (place / "timings.sqlite").exists()
