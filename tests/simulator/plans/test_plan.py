"""Plan, cluster and graph files: round trips, and one clear error for every broken one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.placement import REPLICATE, Pin, parse_placement
from stratagem.simulator.hardware.cluster import Cluster, preset_names
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Prediction, Stage
from stratagem.simulator.sharding.choice import Choice

CLUSTER = Cluster.preset("dgx-a100")
GRAPH = mlp([16, 16, 16], batch=8)
MESH = DeviceMesh((MeshAxis("node", 2), MeshAxis("device", 2)), (0, 1, 8, 9))


def a_plan() -> Plan:
    choices = dict(data_parallel(GRAPH, MESH.shape, zero=2))
    linear = next(op.name for op in GRAPH.operators if op.kind == "linear")
    choices[linear] = Choice((Pin(1), choices[linear].config[1]), 0)
    names = tuple(op.name for op in GRAPH.operators)
    return Plan(
        name="a plan",
        model=GRAPH.name,
        fingerprint=GRAPH.fingerprint,
        cluster=CLUSTER,
        training=Training("bfloat16", "sgd", 0.1),
        stages=(Stage(names, MESH, choices),),
        num_microbatches=2,
        schedule="gpipe",
        seed=5,
        prediction=Prediction(0.25, (123,), True),
    )


def test_a_plan_file_reads_back_equal(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 99, "has version 99, this program reads 2"),
        (("training", "precision"), "float99", "no precision 'float99'"),
        (("training", "optimiser"), "adam", r"unknown field `\$.training.optimiser`"),
        (("num_microbatches",), "two", r"Expected `int`, got `str` - at `\$.num_microbatches`"),
        (("num_microbatches",), 0, "0 microbatches"),
        (("schedule",), "1f2b", "no schedule '1f2b' .did you mean '1f1b'"),
        (("schedule",), "custom", "at least one action"),
        (("schedule",), "chimera", "1 stages is odd"),
        (("orders",), ["rank 0: 0F0 0B0"], "its schedule is 'gpipe': call the schedule 'custom'"),
        (("token_slices",), 2, "'gpipe' does not slice tokens"),
        (("stages", 0, "devices"), [0, 1, 8, 99], "device 99"),
        (("stages", 0, "devices"), [0, 1, 8], "is 4 devices, but 3 are given"),
        (("stages", 0, "axes", 0, "size"), 0, "at least 1"),
        (("cluster", "devices_per_node"), -8, "devices_per_node is -8"),
        (("cluster", "intra_node", "bandwidth_gb_s"), 0, "must be above 0"),
        (("cluster", "node_devices"), ["B200"], "device type 'B200'"),
    ],
)
def test_a_broken_plan_file_is_named(path, value, message, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(a_plan().to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        Plan.load(file)
    assert "broken.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', "\x00"])
def test_what_is_no_plan_at_all_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is broken"):
        Plan.load(tmp_path / "x.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Plan.load(tmp_path / "none.json")


def test_misspelt_choices_and_lost_operators_are_refused() -> None:
    plan = a_plan()
    stage = plan.stages[0]
    name = stage.operators[-1]
    fewer = replace(plan, stages=(replace(stage, operators=stage.operators[:-1]),))
    with pytest.raises(ValueError, match=f"no stage for operator {name!r}"):
        fewer.check(GRAPH)
    choices = {k: v for k, v in stage.choices.items() if k != name}
    with pytest.raises(ValueError, match=f"no choice for operator {name!r}"):
        replace(plan, stages=(replace(stage, choices=choices),)).check(GRAPH)
    for text in ("S()", "Shard(x)", "", "Pin(-1)"):
        with pytest.raises(ValueError, match="is none of R, P"):
            parse_placement(text)


def test_two_stages_share_all_devices_or_none() -> None:
    plan = a_plan()
    overlapping = replace(plan.stages[0], mesh=DeviceMesh((MeshAxis("node", 2),), (0, 2)))
    with pytest.raises(ValueError, match="device 0 is in stage 0 and in stage 1, whose other"):
        replace(plan, stages=(*plan.stages, overlapping))
    with pytest.raises(ValueError, match="'gpipe' places 2 stages on 2 ranks, not on 1"):
        replace(plan, stages=(*plan.stages, plan.stages[0]))


ORDERS = ("rank 0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",)


def stages_on(*devices: tuple[int, ...]) -> tuple[Stage, ...]:
    """The operators of a plan cut in two, each part on as many stages as devices are given."""
    stage = a_plan().stages[0]
    cuts = [len(stage.operators) * k // len(devices) for k in range(len(devices) + 1)]
    return tuple(
        Stage(
            stage.operators[first:last],
            DeviceMesh((MeshAxis("all", len(where)),), where),
            {n: Choice((REPLICATE,)) for n in stage.operators[first:last]},
        )
        for first, last, where in zip(cuts, cuts[1:], devices, strict=False)
    )


@pytest.mark.parametrize(
    ("devices", "fields"),
    [
        (((0,), (0,)), {"schedule": "custom", "orders": ORDERS}),
        (((0,), (1,), (0,), (1,)), {"schedule": "interleaved"}),
        (((0,), (1,)), {"schedule": "terapipe", "token_slices": 4}),
        (((0,), (1,)), {"schedule": "zb-h1"}),
        (((0,), (1,)), {"schedule": "chimera"}),
        (((0,), (1,)), {"schedule": "pipedream"}),
        (((0,), (1,)), {"schedule": "pipedream-vertical"}),
    ],
)
def test_every_schedule_has_a_plan_file(devices, fields, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plan = replace(a_plan(), stages=stages_on(*devices), **fields)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.make_schedule() == plan.make_schedule()
    assert plan.num_devices == plan.num_ranks == len(set(devices))


@pytest.mark.parametrize(
    ("devices", "fields", "message"),
    [
        (((0,), (0,), (1,), (1,)), {"schedule": "interleaved"}, "stage 1 is on .* rank 0, but"),
        (((0,), (1,)), {"schedule": "custom", "orders": ORDERS}, "has 2 ranks, but .* are for 1"),
        (((0,),), {"schedule": "custom", "orders": ORDERS}, "has 1 stages, but .* are for 2"),
        (
            ((0,), (0,)),
            {"schedule": "custom", "orders": ("rank 0: 0F0 1F0 0B0 1B0",)},
            "has 2 microbatches, but its orders are for 1",
        ),
        (
            ((0,), (0,)),
            {"schedule": "custom", "orders": (ORDERS[0].replace("1B0 1B1 0B0", "0B0 1B0 1B1"),)},
            "rank 0 wants 0B0, which needs 1B0",
        ),
    ],
)
def test_a_schedule_for_other_stages_is_refused(devices, fields, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        replace(a_plan(), stages=stages_on(*devices), **fields)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch 8 .* 3 equal"):
        replace(a_plan(), num_microbatches=3).check(GRAPH)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_cluster_files(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name, num_nodes=3)
    assert cluster.num_nodes == 3
    cluster.save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == cluster


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(
        ValueError,
        match=r"no cluster preset 'dgx-b200' .did you mean 'dgx-h200'.*; there are a100.*p3",
    ):
        Cluster.preset("dgx-b200")
    with pytest.raises(ValueError, match="num_nodes=0"):
        Cluster.preset("dgx-a100", num_nodes=0)


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def fail_halfway() -> None:
        with atomic_path(file) as temporary:
            temporary.write_text("half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_file_without_a_new_field_is_written_back_with_it(tmp_path: Path) -> None:
    """The decoder left defaults to the class, and the encoder did not find them there."""
    path = Path(__file__).parents[3] / "examples/plans/gpt2.json"
    text = path.read_text()
    columns = json.loads(text)
    del columns["training"]["clip_norm"]
    old = tmp_path / "old.json"
    old.write_text(json.dumps(columns))
    assert Plan.load(old).to_json() == Plan.load(path).to_json()


@pytest.mark.parametrize("fused", [True, False])
def test_a_file_that_does_not_say_which_loss_runs_was_priced_with_copies(fused: bool) -> None:
    """Its prediction would no longer be that of its plan, nor a certificate one of its price."""
    plan = replace(a_plan(), training=Training(fused_loss=fused))
    columns = json.loads(plan.to_json())
    del columns["training"]["eager_loss"]
    old = Plan.from_json(json.dumps(columns))
    assert old.training == Training(fused_loss=fused, eager_loss=not fused)
    for each in (old, plan):
        assert Plan.from_json(each.to_json()) == each
