"""Alpa and GShard: mixtures, GPTs and Wide-ResNets on V100s, tensors between meshes, compiling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import product

import stratagem as sg
from benchmarks.papers.claims import Claim, Outcome, cpu_seconds
from benchmarks.papers.megatron import unshared

EVALUATIONS = 10_000
"""Of a search: more find nothing here that is better by a hundredth."""

GPT = sg.Training("float16", fused_elementwise=True, eager_loss=True)
MIXTURE = sg.Training("float16", optimizer="adafactor", fused_elementwise=True, eager_loss=True)
IMAGES = sg.Training(optimizer="sgd", momentum=0.9, fused_elementwise=True, eager_loss=True)
"""As the artifact of Alpa trains its three families."""


def v100s(num_devices: int) -> sg.Cluster:
    """So many V100s of p3.16xlarge nodes."""
    return sg.Cluster.preset("p3.16xlarge").with_devices(num_devices)


def searched(
    graph: sg.OperatorGraph, num_devices: int, training: sg.Training, baselines: Sequence[str]
) -> sg.SearchResult:
    """The plan found, beside some methods; memory may be filled, as the paper's planners do."""
    return sg.search(
        graph,
        v100s(num_devices),
        training=training,
        budget=sg.Budget(EVALUATIONS, bounded=0),
        space=sg.Space(headroom=0.0),
        baselines=baselines,
        prefer="fastest",
        draws=0,
        progress=False,
    )


MIXTURES = {
    # GPUs: layers, hidden, experts, TFLOP/s a GPU of Alpa and of DeepSpeed
    8: (16, 1024, 16, 45.76, 40.01),
    16: (16, 1536, 32, 45.36, 12.91),
    32: (16, 2048, 48, 38.84, 3.82),
}
"""Figure 7b of arXiv 2201.12023, as its artifact lists it: 2.4, 10 and 27 billion parameters."""


def _mixtures() -> Outcome:
    """Experts shared out by all devices, or by those of a stage; the best of each that fits."""
    gains, told = {}, []
    for gpus, (layers, hidden, experts, *_) in MIXTURES.items():
        graph = sg.models.moe(
            num_layers=layers,
            hidden=hidden,
            num_heads=16,
            experts=experts,
            batch=1024,
            attention="unfused",
            dispatch="einsum",
        )
        theirs = best_setup(graph, gpus, experts, stages=(1,), zero=(1, 2))
        ours = best_setup(graph, gpus, experts, stages=(1, 2, 4, 8), zero=(0, 1, 2))
        gains[f"{gpus} GPUs"] = theirs.step_time / ours.step_time
        told.append(
            f"{gpus} GPUs: {ours.step_time:.1f} s by {ours.plan.name}; {theirs.step_time:.1f} s "
            f"by {theirs.plan.name}{'' if theirs.fits else ', which does not fit'}"
        )
    return Outcome(gains, "; ".join(told))


def best_setup(
    graph: sg.OperatorGraph,
    num_devices: int,
    experts: int,
    *,
    stages: Sequence[int],
    zero: Sequence[int],
) -> sg.Simulation:
    """The fastest setup that fits, or where none does that which takes the least memory."""
    found = []
    for pipeline, stage, samples in product(stages, zero, (1, 2, 4, 8)):
        data = num_devices // pipeline
        if graph.batch % (samples * data) or (stage and data == 1):
            continue
        setup = sg.TrainingSetup(
            microbatch=samples,
            pipeline=pipeline,
            expert=math.gcd(data, experts),
            zero=stage,
            recompute="full",
            training=MIXTURE,
        )
        found.append(sg.simulate(setup.plan(graph, v100s(num_devices)), graph))
    fitting = [each for each in found if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.step_time)
    return min(found, key=lambda each: each.peak_memory)


GPTS = {
    # GPUs: layers, hidden, heads, TFLOP/s a GPU of Alpa and of Megatron-LM
    8: (32, 2560, 32, 61.61, 50.44),
}
"""Figure 7a, likewise: 2.6 billion parameters."""


def _gpts() -> Outcome:
    gains, told = {}, []
    for gpus, (layers, hidden, heads, *_) in GPTS.items():
        graph = _gpt(layers, hidden, heads)
        found = searched(graph, gpus, GPT, ("Megatron-LM 3D",))
        theirs = found.baselines["Megatron-LM 3D"]
        gains[f"{gpus} GPUs"] = theirs.step_time / found.simulation.step_time
        told.append(
            f"{gpus} GPUs: {found.simulation.step_time:.1f} s found, {theirs.step_time:.1f} s by "
            f"{theirs.plan.name}"
        )
    return Outcome(gains, "; ".join(told))


def _gpt(layers: int, hidden: int, heads: int) -> sg.OperatorGraph:
    return sg.models.gpt(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        vocabulary=51200,
        batch=1024,
        attention="unfused",
    )


RESNETS = {
    # GPUs: base channels, width factor, batch, TFLOP/s a GPU of Alpa
    1: (160, 2, 1536, 8.3),
    8: (448, 2, 1536, 8.04),
    16: (640, 2, 1536, 6.76),
    32: (320, 16, 1520, 6.6),
}
"""Figure 7c, likewise: 0.25, 2, 4 and 6.8 billion parameters."""
SCALED = (8,)


def _resnet(gpus: int) -> sg.OperatorGraph:
    channels, width, batch, _ = RESNETS[gpus]
    return sg.models.wide_resnet(50, base_channels=channels, width_factor=width, batch=batch)


def _scaling() -> Outcome:
    """The share of linear scaling: what one GPU would take, had it the memory, over all GPUs'."""
    shares, told = {}, []
    for gpus in SCALED:
        graph = _resnet(gpus)
        alone = sg.TrainingSetup(microbatch=16, training=IMAGES).plan(graph, v100s(1))
        one = sg.simulate(alone, graph).step_time
        found = searched(graph, gpus, IMAGES, ())
        shares[f"{gpus} GPUs"] = one / (gpus * found.simulation.step_time)
        told.append(
            f"{gpus} GPUs: {found.simulation.step_time:.1f} s, at least {found.bound or 0:.1f}; "
            f"one GPU with the memory of all {one:.0f} s"
        )
    return Outcome(shares, "; ".join(told))


def _between_meshes() -> Outcome:
    """Four stages, a node each: what a stage wants whole, its devices fetch in parts."""
    gpus = 32
    graph = _resnet(gpus)
    setup = sg.TrainingSetup(
        microbatch=20,
        tensor=8,
        pipeline=4,
        partition="time",
        recompute="full",
        training=IMAGES,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some layers are too narrow for 8 ways
        plan = setup.plan(graph, v100s(gpus))
    return Outcome({"gain": unshared(plan, graph) / sg.simulate(plan, graph).step_time})


LAYERS, GPUS = 8, 4
COMPILED = {"twice the layers": (16, 4), "twice the GPUs": (8, 8)}
"""Layers and GPUs, against those."""


@cache
def compiling(layers: int, gpus: int) -> float:
    """CPU seconds that a search of a GPT takes, those of its processes included."""
    graph = _gpt(layers, 2048, 32)
    began = cpu_seconds()
    searched(graph, gpus, GPT, ())
    return cpu_seconds() - began


def _compiling() -> Outcome:
    compiling(2, 4)  # what is compiled or read once is in none of the times below
    once = compiling(LAYERS, GPUS)
    return Outcome(
        {what: compiling(*sizes) / once for what, sizes in COMPILED.items()},
        f"{LAYERS} layers on {GPUS} GPUs take {once:.0f} s; "
        + "; ".join(f"{what} {compiling(*sizes):.0f} s" for what, sizes in COMPILED.items()),
    )


GSHARD_EXPERTS = (128, 2048)
SEQUENCES = 4
"""Of a device."""


def _gshard() -> Outcome:
    steps, exposed = [], []
    for experts in GSHARD_EXPERTS:
        graph = sg.models.moe(
            num_layers=12,
            hidden=1024,
            num_heads=16,
            ffn=8192,
            experts=experts,
            sequence=1024,
            vocabulary=32000,
            batch=SEQUENCES * experts,
        )
        setup = sg.TrainingSetup(
            microbatch=SEQUENCES,
            expert=experts,
            training=sg.Training("bfloat16", optimizer="adafactor"),
        )
        cluster = sg.Cluster.preset("dgx-a100").with_devices(experts)
        simulation = sg.simulate(setup.plan(graph, cluster), graph)
        steps.append(simulation.step_time)
        exposed.append(simulation.groups.numbers("exposed communication")[0])
    few, many = (
        f"{1e3 * waits:.0f} of {1e3 * step:.0f} ms"
        for waits, step in zip(exposed, steps, strict=True)
    )
    return Outcome(
        {"step": steps[1] / steps[0]},
        f"with 128 experts {few} wait for links, with 2,048 {many}",
    )


CLAIMS = (
    Claim(
        "gshard-experts",
        "GShard",
        "arXiv 2006.16668, section 5",
        "16 times the experts and devices, 128 to 2,048, a layer's tokens a device alike: times "
        "as long a step (on A100s here, on TPUs there)",
        "",
        {"step": 1.7},
        (0.8, 1.25),
        _gshard,
    ),
    Claim(
        "alpa-between-meshes",
        "Alpa",
        "arXiv 2201.12023, section 8.5",
        "Wide-ResNet on 32 V100s, four nodes in a row: parts of a tensor between meshes, brought "
        "together in the node, over the whole tensor for each device",
        "",
        {"gain": 2.0},
        (0.8, 1.25),
        _between_meshes,
    ),
    Claim(
        "alpa-mixtures",
        "Alpa",
        "arXiv 2201.12023, figure 7b and its artifact",
        "mixtures of 2.4, 10 and 27 billion parameters on V100s, over DeepSpeed",
        "",
        {f"{gpus} GPUs": row[-2] / row[-1] for gpus, row in MIXTURES.items()},
        (0.8, 1.25),
        _mixtures,
    ),
    Claim(
        "alpa-gpts",
        "Alpa",
        "arXiv 2201.12023, figure 7a and its artifact",
        "a GPT of 2.6 billion parameters on V100s, over Megatron-LM",
        "",
        {f"{gpus} GPUs": row[-2] / row[-1] for gpus, row in GPTS.items()},
        (0.8, 1.25),
        _gpts,
    ),
    Claim(
        "alpa-wide-resnet",
        "Alpa",
        "arXiv 2201.12023, figure 7c and its artifact",
        "a Wide-ResNet of 2 billion parameters on V100s: the share of linear scaling",
        "",
        {f"{gpus} GPUs": RESNETS[gpus][-1] / RESNETS[1][-1] for gpus in SCALED},
        (0.8, 1.25),
        _scaling,
    ),
    Claim(
        "alpa-compiling",
        "Alpa",
        "arXiv 2201.12023, figure 10",
        "time to find a plan for a GPT of 8 layers on 4 GPUs, times as long: at most linear",
        "",
        dict.fromkeys(COMPILED, 2.0),
        (0.0, 1.25),
        _compiling,
        is_timed=True,
    ),
)
