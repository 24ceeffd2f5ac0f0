"""What is given in a wrong type, or as no number, is refused in a sentence that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.optimizers.parameter_groups import ParameterGroup

CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
GRAPH = mlp([8, 8], batch=4)
DEVICE, LINK = CLUSTER.device_types[0], CLUSTER.intra_node


def plan(**other: Any) -> sg.Plan:
    made = sg.TrainingSetup(microbatch=2, training=sg.Training()).plan(GRAPH, CLUSTER)
    return replace(made, **other)


def training(**options: Any) -> Callable[[], object]:
    return lambda: sg.Training(**options)


def space(**options: Any) -> Callable[[], object]:
    return lambda: sg.Space(**options)


def budget(**options: Any) -> Callable[[], object]:
    return lambda: sg.Budget(**options)


def group(**options: Any) -> Callable[[], object]:
    return lambda: ParameterGroup(**options)


def forecast(**options: Any) -> Callable[[], object]:
    return lambda: sg.forecasts.forecast_run(sg.simulate(plan(), GRAPH), **options)


def annotate(axes: Any, annotations: Any = None, **options: Any) -> Callable[[], object]:
    said = {"layers.0": {"data": "sample"}} if annotations is None else annotations
    return lambda: sg.annotate(GRAPH, CLUSTER, axes, said, **options)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (space(pipeline="2"), "space: pipeline is '2'; it must be a whole number or None"),
        (space(pipeline=2.5), "pipeline is 2.5"),
        (space(pipeline=True), "pipeline is True"),
        (space(tensor=nan), "tensor is nan"),
        (space(zero_stages=True), "zero_stages is (True,)"),
        (space(zero_stages=1.0), "zero_stages is 1.0; it must be a tuple, each a whole number"),
        (space(microbatches="2"), "microbatches is ('2',)"),
        (space(microbatches=0), "microbatches are (0,); each must be 1 or more"),
        (space(schedules=("gpipe", 3)), "schedules is ('gpipe', 3)"),
        (space(recompute=3), "recompute is (3,)"),
        (space(headroom=None), "headroom is None; it must be a number or a text or a Headroom"),
        (space(chunks=4), "chunks is 4; it must be a tuple, each a whole number"),
        (space(chunks=(1.5,)), "chunks is (1.5,)"),
        (space(fuse="no"), "fuse is 'no'; it must be True or False"),
        (space(bucket_bytes=nan), "bucket_bytes is nan"),
        (space(rewrites=True), "rewrites is True"),
        (space(forbid=("vocab", "node")), "forbid is ('vocab', 'node'); it must be a tuple, each"),
        (space(pin={"x": "S(sample)"}), "pin is {'x': 'S(sample)'}; it must be a mapping"),
        (space(rules=(3,)), "rules is (3,); it must be a tuple, each a Rule"),
        (budget(evaluations=1.5), "budget: evaluations is 1.5"),
        (budget(seconds=nan), "seconds is nan"),
        (budget(bounded=nan), "bounded is nan"),
        (budget(seed="x"), "seed is 'x'"),
        (budget(seed=-1), "budget: seed is -1; it must be 0 or more"),
        (budget(effort=3), "effort is 3; it must be a SearchEffort"),
        (training(precision=torch.float32), "training: precision is torch.float32"),
        (training(optimizer=3), "optimizer is 3"),
        (training(learning_rate=nan), "learning_rate is nan"),
        (training(learning_rate=-1.0), "learning_rate is -1.0; it must be 0 or more, and finite"),
        (training(betas=(0.9,)), "betas is (0.9,); it must be a tuple of a number and a number"),
        (training(weight_decay=inf), "weight_decay is inf; it must be 0 or more, and finite"),
        (training(clip_norm=nan), "clip_norm is nan"),
        (training(expert_loads=(inf, 1.0)), "their sum above 0 and finite"),
        (training(groups="*.bias"), "groups is '*.bias'; it must be a tuple, each a Param"),
        (training(average_decay=0.5), "average_decay is 0.5, but average is ''; leave it out"),
        (group(names="*.bias"), "names is '*.bias'; it must be a tuple, each a text"),
        (group(names=("a",), rate=nan), "rate is nan"),
        (group(names=("a",), rate=inf), "rate is inf"),
        (lambda: sg.Cluster.preset("dgx-a100", num_nodes=1.5), "num_nodes is 1.5"),
        (lambda: replace(CLUSTER, devices_per_node=1.5), "devices_per_node is 1.5"),
        (lambda: replace(CLUSTER, calibration=None), "calibration is None"),
        (lambda: replace(LINK, latency_us=nan), "latency_us is nan"),
        (lambda: replace(LINK, num_cards=1.5), "num_cards is 1.5"),
        (lambda: replace(CLUSTER.calibration, stall_us=nan), "stall_us is nan"),
        (lambda: replace(DEVICE, launch_us=nan), "launch_us is nan"),
        (lambda: replace(DEVICE, launch_us=-1.0), "launch_us is -1.0; it must be 0 or more"),
        (lambda: sg.hardware.MeshAxis("a", 1.5), "size is 1.5"),
        (lambda: sg.TrainingSetup(microbatch="1"), "training setup: microbatch is '1'"),
        (lambda: plan(num_microbatches=1.5), "num_microbatches is 1.5"),
        (lambda: plan(bucket_bytes=nan), "bucket_bytes is nan"),
        (lambda: plan(seed="x"), "seed is 'x'"),
        (lambda: plan(training=3), "training is 3; it must be a Training"),
        (lambda: sg.search(GRAPH, "dgx-a100"), "search: cluster is 'dgx-a100'; it must be a Cl"),
        (lambda: sg.search(GRAPH, CLUSTER, training="bfloat16"), "training is 'bfloat16'"),
        (lambda: sg.search(GRAPH, CLUSTER, baselines="Alpa"), "baselines is 'Alpa'"),
        (lambda: sg.search(GRAPH, CLUSTER, draws=1.5), "draws is 1.5"),
        (forecast(steps=1.5), "forecast_run: steps is 1.5; it must be a whole number"),
        (forecast(steps=nan), "steps is nan"),
        (forecast(steps=inf), "steps is inf"),
        (forecast(steps=5, runs="3"), "runs is '3'"),
        (forecast(steps=5, seed=-1), "seed is -1; it must be 0 or more"),
        (forecast(steps=5, hazards={}), "hazards is {}; it must be a Hazards"),
        (
            lambda: sg.forecasts.Checkpoints(seconds="3"),
            "checkpoints: seconds is '3'; it must be a number",
        ),
        (lambda: sg.forecasts.Hazards(node_mtbf_hours=None), "hazards: node_mtbf_hours is None"),
        (annotate({"data": "2"}), "annotate: axes is {'data': '2'}; it must be a mapping"),
        (annotate({"data": -1, "model": -2}), "axis 'data' is -1; it must be 1 or more"),
        (annotate({"data": 2}, {"layers.0": "sample"}), "annotations is {'layers.0': 'sample'}"),
        (annotate({"data": 2}, {"layers.0": {"data": 0}}), "{'layers.0': {'data': 0}}"),
        (annotate({"data": 2}, microbatches="2"), "microbatches is '2'"),
        (annotate({"data": 2}, recompute=3), "recompute is 3; it must be a text"),
        (lambda: mlp(3, batch=2), "mlp: sizes is 3; it must be a Sequence"),
        (lambda: mlp([8, "8"], batch=2), "mlp: sizes[1] is '8'; it must be a whole number"),
        (lambda: sg.models.gpt(batch=1.5), "gpt: batch is 1.5; it must be a whole number"),
        (lambda: sg.models.moe(experts=2.5), "moe: experts is 2.5; it must be a whole number"),
        (lambda: sg.simulate(GRAPH, plan()), "simulate: plan is <OperatorGraph"),
        (lambda: sg.capture(3), "capture: model is 3; it must be a Module"),
        (lambda: sg.execute(plan(), nn.Identity(), {}, steps=1.5), "steps is 1.5"),
        (lambda: sg.execute(plan(), nn.Identity(), {}, resume=3), "execute: resume is 3"),
    ],
)
def test_it_is_said_what_is_wrong_and_what_is_expected(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        make()
    assert said in str(refused.value)


def test_numbers_of_numpy_count_and_lists_are_tuples() -> None:
    found = sg.Space(chunks=[1, 2], forbid=[["vocab", "node"]], pipeline=np.int64(2))
    assert found.chunks == (1, 2)
    assert found.forbid == (("vocab", "node"),)
    assert found.pipeline == 2
    assert sg.Training(learning_rate=np.float32(0.5), betas=[0.5, 0.9]).betas == (0.5, 0.9)
    assert sg.Budget(np.int64(5), seconds=3).settled().evaluations == 5


MODEL = nn.Sequential(nn.Linear(8, 8))
BATCH = {"input": torch.ones(4, 8)}


@cache
def valid() -> dict[str, dict[str, Any]]:
    """Arguments that verbs take; none is begun with them, as one of them is replaced."""
    simulation = sg.simulate(plan(), GRAPH)
    searched = sg.search(GRAPH, CLUSTER, budget=sg.Budget(evaluations=0), progress=False, draws=0)
    layers = sg.annotate(GRAPH, CLUSTER, {"data": 2}, {"layers.0": {"data": "sample"}})
    on = {"plan": plan(), "graph": GRAPH}
    return {
        "annotate": {"graph": GRAPH, "cluster": CLUSTER, "axes": {"data": 2}},
        "annotation_regret": {"annotated": layers},
        "capture": {"model": MODEL, "args": (BATCH["input"],)},
        "check": {"plan": plan(), "model": MODEL, "batch": BATCH},
        "compare": {"predicted": simulation, "measured": simulation},
        "compare_schedules": on,
        "describe": {"simulation": simulation, "graph": GRAPH},
        "diff_timelines": {"first": simulation.timeline, "second": simulation.timeline},
        "doctor": {},
        "execute": {"plan": plan(), "model": MODEL, "data": BATCH},
        "export": {**on, "target": "megatron"},
        "forward_pass": {"graph": GRAPH},
        "load_checkpoint": {"path": "nowhere"},
        "local_cluster": {},
        "local_statistics": {"graph": GRAPH},
        "profile": {"graph": GRAPH, "cluster": CLUSTER},
        "report": {"result": searched, "path": "report.html"},
        "robustness": {"result": searched},
        "search": {"graph": GRAPH, "cluster": CLUSTER},
        "search_sizes": {"graph": GRAPH, "cluster": CLUSTER, "num_nodes": [1]},
        "simulate": on,
        "slice_tokens": on,
        "forecast_run": {"simulation": simulation, "steps": 5},
        "fit_links": {"cluster": CLUSTER},
        "limit_capacity": {"model": MODEL, "factor": 2.0},
    }


VERBS = {
    each.__name__: each
    for module in (sg, sg.forecasts, sg.hardware, sg.costs, sg.optimizers)
    for each in (getattr(module, name) for name in dir(module))
    if inspect.isfunction(each) and each is not sg.selective_scan
} | {"limit_capacity": sg.experts.limit_capacity}


class Something:
    """Of no type that anything takes."""


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        (name, argument)
        for name, verb in VERBS.items()
        for argument, said in inspect.signature(verb).parameters.items()
        if said.kind is not said.VAR_KEYWORD and argument != "progress"
    ],
)
def test_a_verb_names_the_argument_that_is_of_no_type_it_takes(verb: str, argument: str) -> None:
    given = {**valid()[verb], argument: Something()}
    with pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b.*(must be|give)"):
        VERBS[verb](**given)
