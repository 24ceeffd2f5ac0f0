"""GPipe, TeraPipe, PipeDream: what pipelines gain by microbatches, slices, unequal stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import stratagem as sg
from benchmarks.papers.claims import Claim, Figures, Outcome
from benchmarks.papers.networks import vgg16
from stratagem.searcher.space.strategies import data_parallel

GPIPE = {
    # partitions and microbatches: throughput over that of 2 partitions, 1 microbatch
    (2, 4): 1.7,
    (2, 32): 1.8,
    (4, 1): 1.07,
    (4, 4): 3.2,
    (4, 32): 3.4,
    (8, 1): 1.3,
    (8, 4): 4.8,
    (8, 32): 6.3,
}
"""Table 2 of arXiv 1811.06965, Transformer-48 on TPUs."""


def bubbled(partitions: int, microbatches: int) -> float:
    """Times faster than one device that GPipe's formula allows equal stages to be."""
    return partitions * microbatches / (microbatches + partitions - 1)


def _gpipe() -> Outcome:
    graph = sg.models.gpt(
        num_layers=48, hidden=2048, num_heads=32, sequence=1024, vocabulary=32000, batch=32
    )
    steps = {}
    for partitions, microbatches in product((2, 4, 8), (1, 4, 32)):
        setup = sg.TrainingSetup(
            microbatch=32 // microbatches,
            pipeline=partitions,
            schedule="gpipe",
            recompute="full",
        )
        cluster = sg.Cluster.preset("dgx-a100").with_devices(partitions)
        plan = setup.plan(graph, cluster)
        steps[partitions, microbatches] = sg.simulate(plan, graph).step_time
    gains = {each: steps[2, 1] / steps[each] for each in GPIPE}
    apart = ", ".join(
        f"{gains[each]:.2f} for K = {each[0]}, M = {each[1]} where the bubble allows "
        f"{bubbled(*each):.2f} and {GPIPE[each]} were published"
        for each in ((2, 4), (4, 4), (8, 4))
    )
    return Outcome(
        _named(gains),
        "GPipe fitted the batch to the memory of each setting, and four microbatches gained more "
        f"than the bubble of equal batches allows: {apart}",
    )


def _named(figures: dict[tuple[int, int], float]) -> Figures:
    return {f"K = {k}, M = {m}": value for (k, m), value in figures.items()}


TERAPIPE = {
    # setting: stages, tensor ways, seconds without slices and with them
    "(8)": (96, 4, 9.990, 1.481),
    "(9)": (48, 8, 5.822, 1.160),
}
"""Tables 1 and 2 of arXiv 2102.07988: GPT-3 175B on 384 V100s, two sequences a step."""


LINE_RATE_GB_S = 3.125
"""25 Gb/s. The preset has the 1.27 that steps of Alpa showed, and TeraPipe's steps are faster."""
SLICES = 16
"""Equal ones, which `sg.slice_tokens` finds, too; that takes longer."""


def _terapipe() -> Outcome:
    """Tables of tokens are not tied: summing one over both ends of the pipeline takes 0.8 s."""
    graph = sg.models.gpt(
        num_layers=96,
        hidden=12288,
        num_heads=96,
        sequence=2048,
        vocabulary=50304,
        batch=2,
        tied=False,
    )
    cluster = sg.Cluster.preset("p3.16xlarge", num_nodes=48)
    line = replace(cluster.inter_node, bandwidth_gb_s=LINE_RATE_GB_S)
    cluster = replace(cluster, inter_node=line)
    gains, told = {}, []
    for setting, (stages, tensor, whole_s, sliced_s) in TERAPIPE.items():
        setup = sg.TrainingSetup(
            microbatch=1,
            pipeline=stages,
            tensor=tensor,
            schedule="gpipe",
            training=sg.Training("float16"),
        )
        plan = setup.plan(graph, cluster)
        whole = sg.simulate(plan, graph)
        sliced = sg.simulate(replace(plan, schedule="terapipe", token_slices=SLICES), graph)
        gains[setting] = whole.step_time / sliced.step_time
        told.append(
            f"{whole.step_time:.2f} to {sliced.step_time:.2f} s in {SLICES} slices "
            f"({whole_s} to {sliced_s} published; the passes of a microbatch take "
            f"{1e3 * max(whole.stage_seconds):.0f} ms whole, "
            f"{1e3 * max(sliced.stage_seconds):.0f} in slices)"
        )
    return Outcome(gains, "; ".join(told))


PIPEDREAM_GAIN = 5.28
PIPEDREAM_IMAGES = 64
"""Of a GPU at once."""
REPLICAS = 15
"""Of the convolutions; what follows them is on one GPU."""
PIPED = 8
"""Microbatches that are looked at; the period of a pipeline that never drains does not depend on
it."""


def _pipedream() -> Outcome:
    cluster = sg.Cluster.preset("v100-10g")
    training = sg.Training(optimizer="sgd", momentum=0.9)
    setup = sg.TrainingSetup(microbatch=PIPEDREAM_IMAGES, training=training)
    seconds = {}
    for devices in (1, cluster.num_devices):
        graph = vgg16(PIPEDREAM_IMAGES * devices)
        plan = setup.plan(graph, cluster.with_devices(devices))
        seconds[devices] = sg.simulate(plan, graph).step_time
    graph = vgg16(PIPEDREAM_IMAGES * REPLICAS * PIPED)
    schedules = sg.compare_schedules(_fifteen_and_one(graph, cluster, training), graph)
    step = next(row[1] for row in schedules.rows if row[0] == "pipedream")
    assert isinstance(step, float)
    alone, copied = seconds[1], seconds[cluster.num_devices]
    gain = copied / cluster.num_devices / (step / PIPED / REPLICAS)
    return Outcome(
        {"gain": gain},
        f"data parallelism takes {1e3 * copied:.0f} ms a step here, of which a GPU computes "
        f"{1e3 * alone:.0f}: nothing on as many GPUs gains more than {copied / alone:.2f}. The "
        f"published gain needs a step of {1e3 * PIPEDREAM_GAIN * alone:.0f} ms at least, so "
        "gradients went slower there than at the rate of the link, or did not overlap",
    )


def _fifteen_and_one(
    graph: sg.OperatorGraph, cluster: sg.Cluster, training: sg.Training
) -> sg.Plan:
    """PipeDream's configuration 15-1: convolutions on fifteen GPUs, linear layers on one."""
    first = next(
        n
        for n, each in enumerate(graph.operators)
        if each.weights and len(each.weights[0].layout) == 2
    )
    small = graph.microbatch(PIPED)
    stages = []
    for names, devices in (
        (graph.names[:first], range(REPLICAS)),
        (graph.names[first:], range(REPLICAS, REPLICAS + 1)),
    ):
        mesh = sg.hardware.DeviceMesh(
            (sg.hardware.MeshAxis("data", len(devices)),), tuple(devices)
        )
        choices = data_parallel(small, mesh.shape)
        stages.append(sg.Stage(tuple(names), mesh, {name: choices[name] for name in names}))
    return sg.Plan(
        "15-1",
        graph.name,
        graph.fingerprint,
        cluster,
        training,
        tuple(stages),
        num_microbatches=PIPED,
    )


CLAIMS = (
    Claim(
        "gpipe-microbatches",
        "GPipe",
        "arXiv 1811.06965, table 2",
        "throughput of a Transformer of 48 layers on K devices with M microbatches, over K = 2, "
        "M = 1",
        "",
        _named(GPIPE),
        (0.8, 1.25),
        _gpipe,
    ),
    Claim(
        "terapipe-slices",
        "TeraPipe",
        "arXiv 2102.07988, tables 1 and 2",
        "GPT-3 175B on 384 V100s with 25 Gb/s between nodes, slices of tokens over microbatches "
        "alone, by setting",
        "",
        {setting: row[2] / row[3] for setting, row in TERAPIPE.items()},
        (0.8, 1.25),
        _terapipe,
    ),
    Claim(
        "pipedream-vgg",
        "PipeDream",
        "SOSP 2019, table 1",
        "VGG-16 on 4 × 4 V100s with 10 Gb/s, configuration 15-1 over data parallelism",
        "",
        {"gain": PIPEDREAM_GAIN},
        (0.8, 1.25),
        _pipedream,
    ),
)
