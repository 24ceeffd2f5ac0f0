"""Megatron-LM: steps of GPTs on Selene, interleaved schedules, transfers in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import stratagem as sg
from benchmarks.papers.claims import Claim, Outcome
from stratagem.simulator.pricing import stage_boundaries

SELENE = "dgx-a100-superpod"

SC21 = sg.Training(
    "float16",
    fused_elementwise=True,
    eager_loss=True,
    fused_accumulation=False,
    fused_update=False,
    clip_norm=1.0,
)
"""As Megatron-LM of 2021 trains: its loss in float32, its optimizer in passes of its own."""

WEAK_SCALING = {
    # billions of parameters: heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s a GPU
    "1.7": (24, 2304, 24, 1, 1, 32, 512, 137.0),
    "3.6": (32, 3072, 30, 2, 1, 64, 512, 138.0),
    "7.5": (32, 4096, 36, 4, 1, 128, 512, 142.0),
    "18.4": (48, 6144, 40, 8, 1, 256, 1024, 135.0),
    "39.1": (64, 8192, 48, 8, 2, 512, 1536, 138.0),
    "76.1": (80, 10240, 60, 8, 4, 1024, 1792, 140.0),
    "145.6": (96, 12288, 80, 8, 8, 1536, 2304, 148.0),
    "310.1": (128, 16384, 96, 8, 16, 1920, 2160, 155.0),
    "529.6": (128, 20480, 105, 8, 35, 2520, 2520, 163.0),
    "1008": (160, 25600, 128, 8, 64, 3072, 3072, 163.0),
}
"""Table 1 of arXiv 2104.04473."""

SEQUENCE, VOCABULARY = 2048, 51200


def gpt(layers: int, hidden: int, heads: int, batch: int) -> sg.OperatorGraph:
    """A GPT as Megatron-LM trained it: dropout, attention in kernels of its own."""
    return sg.models.gpt(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        sequence=SEQUENCE,
        vocabulary=VOCABULARY,
        batch=batch,
        attention="unfused",
        dropout=0.1,
    )


def gpt3(batch: int) -> sg.OperatorGraph:
    """GPT-3 with 175 billion parameters."""
    return gpt(96, 12288, 96, batch)


def selene(num_devices: int) -> sg.Cluster:
    """So many A100s of Selene."""
    return sg.Cluster.preset(SELENE).with_devices(num_devices)


def model_flops(layers: int, hidden: int, batch: int) -> float:
    """Operations of a step, recomputing included: equation 3 of arXiv 2104.04473."""
    tokens = batch * SEQUENCE
    of_attention = SEQUENCE / (6.0 * hidden)
    of_logits = VOCABULARY / (16.0 * layers * hidden)
    return 96.0 * tokens * layers * hidden**2 * (1.0 + of_attention + of_logits)


def stated(training: sg.Training = SC21, **setup: Any) -> sg.TrainingSetup:
    """A setup with everything recomputed and gradients reduced at the end of a step."""
    return sg.TrainingSetup(training=training, recompute="full", overlap_gradients=False, **setup)


def step(graph: sg.OperatorGraph, num_devices: int, setup: sg.TrainingSetup) -> float:
    """Seconds of a step."""
    return sg.simulate(setup.plan(graph, selene(num_devices)), graph).step_time


def _weak_scaling() -> Outcome:
    """The fastest microbatch and number of stages a rank, which the table does not tell."""
    found = {}
    for size, (heads, hidden, layers, tensor, pipeline, gpus, batch, _) in WEAK_SCALING.items():
        graph = gpt(layers, hidden, heads, batch)
        data = gpus // (tensor * pipeline)
        steps = []
        for microbatch, rounds in product((1, 2, 4, 8), (1, 2) if pipeline > 1 else (1,)):
            parts, rest = divmod(batch, microbatch * data)
            uneven = layers % (pipeline * rounds) or (rounds > 1 and parts % pipeline)
            if not rest and not uneven:
                setup = stated(
                    microbatch=microbatch, tensor=tensor, pipeline=pipeline, virtual_stages=rounds
                )
                steps.append(step(graph, gpus, setup))
        found[size] = model_flops(layers, hidden, batch) / (min(steps) * gpus) / 1e12
    return Outcome(found)


def _gpt3_step() -> Outcome:
    fusing = replace(SC21, fused_accumulation=True)
    sizes = {"microbatch": 1, "tensor": 8, "pipeline": 8, "virtual_stages": 3}
    return Outcome({"step": step(gpt3(64), 64, stated(fusing, inputs_first=True, **sizes))})


def _interleaving() -> Outcome:
    graph = gpt3(12)
    one, two = (
        step(graph, 96, stated(microbatch=1, tensor=8, pipeline=12, virtual_stages=rounds))
        for rounds in (1, 2)
    )
    return Outcome({"gain": one / two})


def unshared(plan: sg.Plan, graph: sg.OperatorGraph) -> float:
    """Seconds of a step in which every device fetches its whole input from the stage before."""
    with patch.object(stage_boundaries, "_shared_out", lambda sizes, after, axis, mesh: after):
        return sg.simulate(plan, graph).step_time


def _scatter_gather() -> Outcome:
    graph = gpt3(60)
    setup = stated(microbatch=1, tensor=8, pipeline=12, virtual_stages=2)
    gains = {}
    for name in (SELENE, "a100-800g"):
        plan = setup.plan(graph, sg.Cluster.preset(name).with_devices(96))
        gains[name] = unshared(plan, graph) / sg.simulate(plan, graph).step_time
    return Outcome(
        {"gain": gains[SELENE]},
        f"transfers overlap with computing here: the gain is {gains[SELENE] - 1:.1%} with eight "
        f"cards of 200 Gb/s a node, {gains['a100-800g'] - 1:.1%} with four",
    )


CLAIMS = (
    Claim(
        "megatron-weak-scaling",
        "Megatron-LM",
        "arXiv 2104.04473, table 1",
        "GPTs of 1.7 to 1,008 billion parameters on 32 to 3,072 A100s, by billions",
        "TFLOP/s a GPU",
        {size: row[-1] for size, row in WEAK_SCALING.items()},
        (0.9, 1.1),
        _weak_scaling,
    ),
    Claim(
        "megatron-gpt3",
        "Megatron-LM",
        "arXiv 2205.05198, table 5",
        "a step of GPT-3 175B on 64 A100s: 8 tensor, 8 pipeline ways, 3 stages a rank, "
        "full recompute",
        "s",
        {"step": 18.13},
        (0.9, 1.1),
        _gpt3_step,
    ),
    Claim(
        "megatron-interleaving",
        "Megatron-LM",
        "arXiv 2104.04473, abstract and figure 12",
        "GPT-3 175B on 96 A100s at batch 12, two stages a rank over one: at least a tenth more",
        "",
        {"gain": 1.1},
        (1.0, 1.2),
        _interleaving,
    ),
    Claim(
        "megatron-scatter-gather",
        "Megatron-LM",
        "arXiv 2104.04473, section 5.7 and figure 18",
        "the same, each device of a tensor-parallel group sending a part to the next stage, at "
        "batch 60, over each sending all",
        "",
        {"gain": 1.11},
        (0.95, 1.05),
        _scatter_gather,
    ),
)
