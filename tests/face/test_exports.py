"""Exports of any plan: what they say is a plan that runs, and what they leave out is told."""

from __future__ import annotations

import ast
import html
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import stratagem as sg
from stratagem.cli.app import app
from stratagem.exports import FORMATS, LOSSLESS, PROGRAMS, export, lossless_exports
from stratagem.exports.deepspeed import deepspeed
from stratagem.exports.megatron import layout, megatron
from stratagem.exports.reading.differences import PartsMemory, device_parts, differences
from stratagem.exports.reading.fsdp_units import wrapped_modules
from stratagem.searcher.space.skeletons import Options, operator_choices, skeletons
from stratagem.searcher.space.strategies import with_recompute
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base.files import write_text
from stratagem.simulator.graph.models import bert, gpt, llama, mlp, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Pin, Placement, Shard
from stratagem.simulator.graph.substitutions import Substituted, rewrite
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from tests.support.examples import examples

CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
OPTIONS = Options(chunks=(1, 2), fuse=True, regather=True, stream=True, in_sums=True)
SMALL = {"hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16, "batch": 16}

MODELS: dict[str, Callable[[], OperatorGraph]] = {
    "gpt": lambda: gpt(num_layers=4, **SMALL),
    "bert": lambda: bert(num_layers=2, **SMALL),
    "llama": lambda: llama(num_layers=4, ffn=64, **SMALL),
    "mlp": lambda: mlp([16, 32, 24, 8], batch=16),
    "resnet": lambda: resnet(18, batch=8, image=32, classes=10),
    "moe": lambda: moe(num_layers=2, experts=4, **SMALL),
}


@cache
def graph_of(model: str) -> OperatorGraph:
    return MODELS[model]()


def random_plan(graph: OperatorGraph, seed: int) -> Plan:
    """A plan of the searched space: a skeleton and a choice for each operator, at random."""
    rng = np.random.default_rng(seed)
    schedule = str(rng.choice(["1f1b", "gpipe", "interleaved", "zb-h1"]))
    found = list(skeletons(graph, CLUSTER, schedule=schedule, max_stages=4))
    skeleton = found[int(rng.integers(len(found)))]
    small = graph.microbatch(skeleton.num_microbatches)
    policy = str(rng.choice(["none", "selective", "full"]))
    stages = []
    for names, mesh in zip(skeleton.stages, skeleton.meshes, strict=True):
        choices = {}
        for name in names:
            options = operator_choices(
                small, small.operator(name), mesh.shape, (0, 1, 2, 3), OPTIONS
            )
            choices[name] = options[int(rng.integers(len(options)))]
        again = {n: replace(c, recompute=False) for n, c in choices.items()}
        stages.append(Stage(names, mesh, with_recompute(small, again, policy)))
    return Plan(
        name=f"random {seed}",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(str(rng.choice(["float32", "bfloat16", "float16"]))),
        stages=tuple(stages),
        num_microbatches=skeleton.num_microbatches,
        schedule=skeleton.schedule if len(stages) > 1 else "1f1b",
        bucket_bytes=int(rng.choice([0, 2**20])),
        inputs_first=bool(rng.integers(2)),
    )


def one_stage(graph: OperatorGraph, mesh: DeviceMesh) -> Plan:
    """Everything whole on every device."""
    whole = Choice((REPLICATE,) * len(mesh.axes))
    return Plan(
        name="whole",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=CLUSTER,
        training=Training(),
        stages=(Stage(graph.names, mesh, dict.fromkeys(graph.names, whole)),),
    )


def assert_readable(target: str, text: str) -> None:
    """The text is of the language that its format has."""
    if target in ("dtensor", "fsdp2"):
        names = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
        assert names & {"parallelize", "shard"}
    elif target == "deepspeed":
        assert json.loads(text)["train_batch_size"] > 0
    elif target.startswith("accelerate"):
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert all(": " in line or line.endswith(":") for line in lines)
    else:
        words = shlex.split(text, comments=True)
        assert words
        assert words[0].startswith("--")


@settings(max_examples=examples(8, few=4), suppress_health_check=[HealthCheck.too_slow])
@given(model=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 10_000))
def test_every_plan_has_every_export(model: str, seed: int) -> None:
    graph = graph_of(model)
    plan = random_plan(graph, seed)
    for target in FORMATS:
        made = export(plan, graph, target, costs=RooflineCosts())
        assert_readable(target, made.text)
        told = differences(plan, made.nearest, graph)
        assert made.missing[: len(told)] == told
        if not told:
            assert made.ratio == pytest.approx(1, rel=1e-9)
        again = FORMATS[target](made.nearest, graph).nearest
        assert differences(made.nearest, again, graph) == ()


EXPRESSIBLE = {
    "megatron": [
        TrainingSetup(tensor=2, pipeline=2, zero=1, inputs_first=True, overlap_gradients=False),
        TrainingSetup(tensor=4, sequence_parallel=True, overlap_gradients=False),
        TrainingSetup(zero=3, recompute="full", overlap_gradients=False),
        TrainingSetup(
            pipeline=2, virtual_stages=2, recompute="selective", overlap_gradients=False
        ),
    ],
    "deepspeed": [
        TrainingSetup(overlap_gradients=False),
        TrainingSetup(tensor=2, zero=2, overlap_gradients=False),
    ],
    "accelerate-megatron": [TrainingSetup(pipeline=4, zero=1, overlap_gradients=False)],
}


@pytest.mark.parametrize(
    ("target", "setup"), [(t, setup) for t, found in EXPRESSIBLE.items() for setup in found]
)
def test_what_a_program_can_say_is_said_in_full(target: str, setup: TrainingSetup) -> None:
    graph = graph_of("gpt")
    plan = setup.plan(graph, CLUSTER)
    made = export(plan, graph, target)
    assert differences(plan, made.nearest, graph) == ()
    assert made.ratio == 1
    assert made.nearest_time == sg.simulate(made.nearest, graph).step_time


def test_megatron_names_the_degrees() -> None:
    graph = llama(num_layers=4, num_kv_heads=2, ffn=64, **SMALL)
    setup = TrainingSetup(
        tensor=2, pipeline=2, microbatch=2, zero=1, sequence_parallel=True, recompute="full"
    )
    words = shlex.split(megatron(setup.plan(graph, CLUSTER), graph).text)
    options = dict(zip(words, [*words[1:], ""], strict=True))
    for option, value in {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "2",
        "--micro-batch-size": "2",
        "--global-batch-size": "16",
        "--recompute-granularity": "full",
        "--num-layers": "4",
        "--hidden-size": "32",
        "--ffn-hidden-size": "64",
        "--num-attention-heads": "4",
        "--num-query-groups": "2",
        "--seq-length": "16",
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
    }.items():
        assert options[option] == value
    flags = "--sequence-parallel --use-distributed-optimizer --bf16 --swiglu"
    assert {*flags.split(), "--untie-embeddings-and-output-weights"} <= set(words)
    apart = "--no-gradient-accumulation-fusion"
    assert apart not in words
    unfused = replace(setup, training=replace(setup.training, fused_accumulation=False))
    assert apart in shlex.split(megatron(unfused.plan(graph, CLUSTER), graph).text)


def test_stages_of_unequal_layers_are_a_layout() -> None:
    graph = graph_of("gpt")
    plan = TrainingSetup(pipeline=2, overlap_gradients=False).plan(graph, CLUSTER)
    first, second = plan.stages
    moved = [name for name in second.operators if name.startswith("h.2.")]
    names = [n for n in graph.names if n in {*first.operators, *moved}]
    rest = [n for n in second.operators if n not in moved]
    choices = {**first.choices, **second.choices}
    stages = [
        Stage(tuple(part), stage.mesh, {n: choices[n] for n in part})
        for part, stage in zip((names, rest), plan.stages, strict=True)
    ]
    uneven = replace(plan, stages=tuple(stages))
    made = export(uneven, graph, "megatron")
    assert f"--pipeline-model-parallel-layout '{layout((3, 1))}'" in made.text
    assert made.missing == ()
    told = export(uneven, graph, "accelerate-megatron").missing
    assert any(text.startswith("Stages are cut elsewhere: h.*.ln_1 (1×)") for text in told)


def test_zero_stages_of_fsdp2_are_those_of_the_units() -> None:
    graph = graph_of("gpt")
    plan = TrainingSetup(zero=3).plan(graph, CLUSTER)
    (stage,) = plan.stages
    choices = {
        name: replace(choice, zero=1) if name.startswith("h.1.") else choice
        for name, choice in stage.choices.items()
    }
    mixed = replace(plan, stages=(replace(stage, choices=choices),), bucket_bytes=2**20)
    made = export(mixed, graph, "fsdp2")
    assert 'UNITS = {"h.0": 3, "h.1": 1, "h.2": 3, "h.3": 3, "": 3}' in made.text
    assert [made.nearest.choice(f"h.{k}.mlp.up").zero for k in range(3)] == [3, 1, 3]
    assert all("ZeRO" not in sentence for sentence in made.missing)


@pytest.mark.parametrize(("zero", "of_frozen"), [(2, 0), (3, 3)])
def test_fsdp2_shards_frozen_parameters_under_stage_3(zero: int, of_frozen: int) -> None:
    """Only norms are trained: they decide on the stage, which is the plan's."""
    graph = graph_of("gpt")
    parameters = (replace(p, trainable=".ln_" in p.name) for p in graph.parameters)
    graph = replace(graph, parameters=tuple(parameters))
    plan = TrainingSetup(zero=zero).plan(graph, CLUSTER)
    made = export(plan, graph, "fsdp2")
    assert f'"h.0": {zero}, "h.1": {zero}' in made.text
    for each in (plan, made.nearest):
        assert each.choice("h.1.ln_1").zero == zero
        assert each.choice("h.1.mlp.up").zero == of_frozen
    assert all("ZeRO" not in sentence for sentence in made.missing)


@pytest.mark.parametrize(("expert", "tensor"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_experts_inside_data_parallelism_are_megatrons(expert: int, tensor: int) -> None:
    graph = graph_of("moe")
    setup = TrainingSetup(
        expert=expert, tensor=tensor, inputs_first=tensor > 1, overlap_gradients=False
    )
    plan = setup.plan(graph, CLUSTER)
    made = export(plan, graph, "megatron")
    assert differences(plan, made.nearest, graph) == ()
    assert f"--expert-model-parallel-size {expert}" in made.text
    assert f"--expert-tensor-parallel-size {tensor}" in made.text


def test_units_are_blocks_by_the_names_of_their_parameters() -> None:
    assert wrapped_modules(graph_of("llama")) == tuple(f"layers.{k}" for k in range(4))
    assert wrapped_modules(graph_of("bert")) == ("h.0", "h.1")


def test_dtensor_splits_only_outermost_factors() -> None:
    fused, apart = graph_of("gpt"), graph_of("llama")
    setup = TrainingSetup(tensor=4)
    made = export(setup.plan(fused, CLUSTER), fused, "dtensor")
    assert '"h.0.attn.qkv.weight": (Replicate(), Replicate()),' in made.text
    assert any("head split 4 ways" in sentence for sentence in made.missing)
    assert made.nearest_time != made.time
    made = export(setup.plan(apart, CLUSTER), apart, "dtensor")
    assert '"layers.0.attn.q.weight": (Replicate(), Shard(0)),' in made.text
    assert '"layers.0.attn.q": ColwiseParallel(' in made.text
    assert '"layers.0.attn.out": RowwiseParallel(' in made.text
    assert differences(made.plan, made.nearest, apart) == ()


def test_parallelize_module_takes_one_axis() -> None:
    graph = graph_of("mlp")
    mesh = DeviceMesh((MeshAxis("x", 2), MeshAxis("y", 2)), tuple(range(4)))
    plan = one_stage(graph, mesh)
    choices = {**plan.stages[0].choices, "layers.1": Choice((Shard("in"), Shard("out")))}
    plan = replace(plan, stages=(replace(plan.stages[0], choices=choices),))
    made = export(plan, graph, "dtensor")
    assert '"layers.1.weight": (Shard(1), Shard(0)),' in made.text
    assert '"axis": None' in made.text
    assert any("the axes x, y all split" in sentence for sentence in made.missing)


def test_what_no_other_program_has_is_told() -> None:
    graph = graph_of("mlp")
    mesh = DeviceMesh((MeshAxis("data", 2),), (0, 1))
    plan = one_stage(graph, mesh)
    choices = {**plan.stages[0].choices, "layers.1": Choice((Pin(1),))}
    plan = replace(plan, stages=(replace(plan.stages[0], choices=choices),))
    for target in FORMATS:
        made = export(plan, graph, target)
        told = [text for text in made.missing if text.startswith("layers.1: on index 1")]
        assert len(told) == 1
        assert all(not isinstance(p, Pin) for p in made.nearest.choice("layers.1").config)


def test_a_batch_too_small_for_the_devices_leaves_some_out() -> None:
    graph = mlp([11, 13, 9], batch=6)
    mesh = DeviceMesh((MeshAxis("data", 8),), tuple(range(8)))
    draft = deepspeed(one_stage(graph, mesh), graph)
    assert json.loads(draft.text)["train_micro_batch_size_per_gpu"] == 1
    assert draft.nearest.num_devices == 6
    assert differences(one_stage(graph, mesh), draft.nearest, graph)[0] == (
        "The plan runs on 8 devices, this 6."
    )


def test_rewritten_models_are_said_as_they_are() -> None:
    graph = graph_of("llama")
    pair = ("layers.0.mlp.gate", "layers.0.mlp.up")
    rewritten = rewrite(graph, [Substituted("merge", (pair,))])
    mesh = DeviceMesh((MeshAxis("data", 2),), (0, 1))
    plan = replace(one_stage(rewritten.graph, mesh), substitutions=rewritten.steps)
    for target in FORMATS:
        made = export(plan, graph, target)
        assert made.missing[0].startswith("The plan runs a rewritten graph (1 substitutions)")
        assert made.nearest.substitutions == ()


def test_unknown_formats_are_refused() -> None:
    graph = graph_of("mlp")
    plan = TrainingSetup().plan(graph, CLUSTER)
    with pytest.raises(
        ValueError,
        match=r"no export 'megatron-lm' .did you mean 'megatron'.*; there are dtensor, fsdp2",
    ):
        export(plan, graph, "megatron-lm")


def test_plans_of_other_models_are_refused() -> None:
    plan = TrainingSetup().plan(graph_of("gpt"), CLUSTER)
    with pytest.raises(ValueError, match="was made for model 'gpt'"):
        export(plan, graph_of("llama"), "megatron")


def test_exports_are_shown_and_saved(tmp_path: Path) -> None:
    graph = graph_of("gpt")
    made = sg.export(TrainingSetup(tensor=2).plan(graph, CLUSTER), graph, "deepspeed")
    made.save(tmp_path / "deepspeed.json")
    assert json.loads((tmp_path / "deepspeed.json").read_text())["tensor_parallel"]
    shown = made._repr_html_()
    assert "&quot;autotp_size&quot;: 2" in shown
    assert all(html.escape(sentence) in shown for sentence in made.missing)
    assert f"{made.ratio:.2f} times" in repr(made)


def test_command_line_exports_a_plan(tmp_path: Path) -> None:
    graph = graph_of("gpt")
    plan, model, out = (tmp_path / name for name in ("plan.json", "graph.json", "arguments"))
    TrainingSetup(tensor=2).plan(graph, CLUSTER).save(plan)
    write_text(model, graph.to_json())
    words = ["export", str(plan), "--model", str(model), "--out", str(out), "--to"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, "megatron"])
    assert done.exit_code == 0, done.output
    assert "megatron cannot say" in done.output
    assert "--tensor-model-parallel-size 2" in out.read_text()
    refused = CliRunner().invoke(app, [*words, "horovod"])
    assert refused.exit_code == 2
    assert "error: no export 'horovod'" in refused.output


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("tensor", [1, 2])
def test_formats_by_which_nothing_is_lost(zero: int, tensor: int) -> None:
    """Those whose export fits and is predicted to take no more; exported and priced one by one."""
    graph, setup = graph_of("gpt"), TrainingSetup(zero=zero, tensor=tensor)
    plan = setup.plan(graph, CLUSTER)
    exported = {name: export(plan, graph, name) for name in PROGRAMS}
    expected = [n for n, e in exported.items() if e.fits and e.ratio <= 1 + LOSSLESS]
    assert list(lossless_exports(plan, graph)) == expected
    step = sg.simulate(plan, graph).step_time
    fast = lossless_exports(plan, graph, step_time=0.5 * step)
    assert list(fast) == [n for n, e in exported.items() if e.ratio <= 0.5 * (1 + LOSSLESS)]


def test_products_in_another_format_are_lost_in_all() -> None:
    """By time and memory alone four formats lost nothing, whose exports say that they do."""
    training = sg.Training(sg.Precision("p", products="bfloat16"))
    graph = graph_of("gpt")
    plan = TrainingSetup(microbatch=2, training=training).plan(graph, CLUSTER)
    assert lossless_exports(plan, graph) == ()
    assert all("products in bfloat16" in export(plan, graph, n).missing[0] for n in PROGRAMS)


@pytest.mark.slow
def test_a_search_says_which_formats_lose_nothing() -> None:
    pair = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
    quick = {"budget": sg.Budget(0, bounded=0), "baselines": (), "progress": False}
    found = sg.search(graph_of("gpt"), pair, **quick)
    assert found.exports == lossless_exports(found.plan, found.graph)
    said = {
        (): "exports to no format without loss",
        ("fsdp2",): "exports to fsdp2 without loss",
        ("fsdp2", "megatron"): "exports to fsdp2 and megatron without loss",
        PROGRAMS: "exports to fsdp2, torchtitan, megatron and deepspeed without loss",
    }
    for names, words in said.items():
        assert replace(found, exports=names).simplicity.endswith(f"; {words}")
    assert "export" not in replace(found, exports=None).simplicity


def _part(size: int, ways: list[int], at: list[int]) -> list[int]:
    """The elements of a dim on one device, cut axis after axis, counted out one by one."""
    elements = list(range(size))
    for count, place in zip(ways, at, strict=True):
        each = -(-len(elements) // count)
        elements = elements[place * each : (place + 1) * each]
    return elements


@given(
    config=st.lists(
        st.sampled_from([REPLICATE, Pin(1), *map(Shard, ("sample", "in", "out"))]),
        min_size=2,
        max_size=2,
    ),
    batch=st.sampled_from([2, 5, 12]),
)
def test_each_device_has_the_part_of_every_dim_that_is_counted_out(
    config: list[Placement], batch: int
) -> None:
    operator = mlp([7, 9], batch=batch).operator("layers.0")
    mesh = DeviceMesh((MeshAxis("node", 2), MeshAxis("data", 3)), (5, 3, 4, 9, 8, 7))
    expected = {}
    for device, at in zip(mesh.devices, [(i, j) for i in range(2) for j in range(3)], strict=True):
        if any(isinstance(p, Pin) and p.index != i for p, i in zip(config, at, strict=True)):
            continue
        axes = {
            d.name: [k for k, p in enumerate(config) if p == Shard(d.name)] for d in operator.dims
        }
        expected[device] = [
            _part(d.size, [mesh.shape[k] for k in axes[d.name]], [at[k] for k in axes[d.name]])
            for d in operator.dims
        ]
    found = dict(device_parts(operator, tuple(config), mesh))
    assert {d: [list(range(*ends)) for ends in parts] for d, parts in found.items()} == expected
    alike = PartsMemory().are_alike
    other = DeviceMesh(mesh.axes, mesh.devices)
    assert alike(operator, (tuple(config), mesh), (tuple(config), other))
    turned = DeviceMesh(mesh.axes, mesh.devices[::-1])
    same = dict(device_parts(operator, tuple(config), turned)) == found
    assert alike(operator, (tuple(config), mesh), (tuple(config), turned)) == same
