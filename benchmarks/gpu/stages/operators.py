"""Times of the operators of well-known models, into a cache that later runs go on with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import CLASSES, ViT
from benchmarks.gpu.setting import Case, Figures, Setting
from stratagem.executor.cuda.fused_losses import faster_on
from stratagem.profiler import Effort, TimingCache, local_operators, profile_operators
from stratagem.simulator.graph.models import gpt, llama, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.torch_ops.capture.capture import capture

Sizes = dict[str, Any]

CACHE = "timings.sqlite"
PRECISIONS = ("bfloat16", "float32")
SECONDS, TINY_SECONDS = 20.0, 4.0
"""For one model in one precision; operators that are left then are told."""

EFFORT = Effort(seconds=0.1, relative_error=0.03)
TINY_EFFORT = Effort(seconds=0.0, max_drift=math.inf, evict_bytes=0)

TINY: Sizes = {
    "num_layers": 1,
    "hidden": 16,
    "num_heads": 2,
    "vocabulary": 32,
    "sequence": 8,
    "batch": 2,
}


def cases(setting: Setting) -> list[Case]:
    """A case for every model in every precision."""
    return [
        Case(f"{name}, {each}", partial(_case, setting, name, each), 180)
        for name in MODELS
        for each in setting.size(PRECISIONS, PRECISIONS[1:])
    ]


def _case(setting: Setting, name: str, precision: str) -> Figures:
    graph = MODELS[name](setting)
    mesh = {number: [(REPLICATE,)] for number in range(len(graph.operators))}
    with TimingCache(setting.out / CACHE) as cache:
        report = profile_operators(
            local_operators(graph, mesh, (1,)),
            Training(precision),
            cache,
            device=setting.device,
            effort=setting.size(EFFORT, TINY_EFFORT),
            faster=faster_on(torch.device(setting.device)),
            seconds=setting.size(SECONDS, TINY_SECONDS),
        )
        kept = len(cache)
    return {
        "operators": len(graph.operators),
        "timed": report.num_timed,
        "known": report.num_cached,
        "left_out": list(report.left_out),
        "disturbed": list(report.disturbed),
        "failures": list(report.failures),
        "kept": kept,
        "profiling_seconds": report.seconds,
    }


def _gpt(setting: Setting) -> OperatorGraph:
    real: Sizes = {
        "num_layers": 2,
        "hidden": 2048,
        "num_heads": 16,
        "vocabulary": 50304,
        "batch": 4,
    }
    return gpt(**setting.size({**real, "sequence": 2048}, TINY))


def _llama(setting: Setting) -> OperatorGraph:
    real: Sizes = {
        "num_layers": 1,
        "hidden": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn": 14336,
    }
    real |= {"vocabulary": 32000, "sequence": 2048, "batch": 2}
    return llama(**setting.size(real, {**TINY, "ffn": 24}))


def _mixtral(setting: Setting) -> OperatorGraph:
    real: Sizes = {"num_layers": 2, "hidden": 4096, "num_heads": 32, "ffn": 14336, "experts": 8}
    real |= {"vocabulary": 32000, "sequence": 1024, "batch": 2}
    return moe(**setting.size(real, {**TINY, "num_layers": 2, "experts": 2}))


def _resnet(setting: Setting) -> OperatorGraph:
    depth, batch, image = setting.size((50, 64, 224), (18, 2, 32))
    return resnet(depth, batch=batch, image=image, classes=setting.size(1000, 10))


def _vit(setting: Setting) -> OperatorGraph:
    layers, hidden, image, batch = setting.size((2, 768, 224, 64), (1, 16, 16, 2))
    patch = setting.size(16, 8)
    with torch.device("meta"):
        model = ViT(num_layers=layers, hidden=hidden, heads=4, image=image, patch=patch)
        batch_of = {"images": torch.randn(batch, 3, image, image)}
        batch_of["labels"] = torch.randint(0, CLASSES, (batch,))
    return capture(model, (), batch_of)


MODELS: dict[str, Callable[[Setting], OperatorGraph]] = {
    "gpt": _gpt,
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
    "mixtral": _mixtral,
}
