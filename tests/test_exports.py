"""Exports of any plan: what they say is a plan that runs, and what they leave out is told."""

from __future__ import annotations

import ast
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

import stratagem as sg
from stratagem.exports import FORMATS, export
from stratagem.exports.deepspeed import deepspeed
from stratagem.exports.differences import differences
from stratagem.exports.megatron import layout, megatron
from stratagem.exports.units import wrapped_modules
from stratagem.search.setup import TrainingSetup
from stratagem.search.space import Options, operator_choices, skeletons
from stratagem.search.strategies import with_recompute
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.costs import RooflineCosts
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.models import bert, gpt, llama, mlp, moe, resnet
from stratagem.simulator.placement import Pin, Shard
from stratagem.simulator.plan import Choice, Plan, Stage
from stratagem.simulator.training import Training

CLUSTER = Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=4)
OPTIONS = Options(chunks=(1, 2), fuse=True, regather=True)
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


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
