"""Wall time of training steps against torch: eager, compiled, and as a CUDA graph.

All of them bring a batch from the host in each step, but for torch's own graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks import host
from benchmarks.gpu.setting import Case, Figures, Setting, SkippedError
from benchmarks.gpu.worlds import alone, seconds_of
from examples.models import SmallGPT, SmallResNet
from stratagem.executor.backends.nccl import NcclCommunicator
from stratagem.executor.training.graphed_steps import GraphedSteps, refusal
from stratagem.simulator.kernel_times.training import Training

TURNS, STEPS = 5, 10
WARMUP = 5
"""Steps before: a graph is recorded in the fourth."""

Step = Callable[[], object]


def cases(setting: Setting) -> list[Case]:
    """Every way beside eager torch, in turns, for every model."""
    return [
        Case(f"{name}: {way}", partial(_case, setting, name, way), 200)
        for name in setting.size([*MODELS], TINY_MODELS)
        for way in WAYS
    ]


def _case(setting: Setting, name: str, way: str) -> Figures:
    return WAYS[way](setting, MODELS[name](setting))


def _ours(setting: Setting, case: host.Case) -> Figures:
    """Steps one after the other, the host running ahead."""

    def rank(comm: NcclCommunicator) -> Figures:
        return _beside_eager(setting, case, host.ours(case, comm, timed=False))

    return alone(setting, rank)


def _our_graph(setting: Setting, case: host.Case) -> Figures:
    def rank(comm: NcclCommunicator) -> Figures:
        interpreter = host.interpreter_of(case, comm)
        refused = refusal(interpreter, STEPS * TURNS)
        if refused is not None:
            raise SkippedError(refused)
        steps = GraphedSteps(interpreter)
        return _beside_eager(setting, case, lambda: steps.step(case.batch))

    return alone(setting, rank)


def _compiled(setting: Setting, case: host.Case) -> Figures:
    def compiled(model: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(model, backend=setting.size("inductor", "aot_eager")))

    step = host.theirs(case, setting.device, compiled=compiled)
    return _beside_eager(setting, case, step)


def _their_graph(setting: Setting, case: host.Case) -> Figures:
    """Eager torch's step, recorded as one CUDA graph."""
    if setting.rehearse:
        raise SkippedError("torch has no graphs without a GPU")
    step = host.theirs(case, setting.device, capturable=True, loaded=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return _beside_eager(setting, case, graph.replay)


def _beside_eager(setting: Setting, case: host.Case, step: Step) -> Figures:
    """Medians of turns of both, and their ratio."""
    eager = host.theirs(case, setting.device)
    both, turns = (step, eager), setting.size(TURNS, 2)
    repeats = setting.size(STEPS, 2)
    for each in both:
        for _ in range(WARMUP):
            each()
    spent: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        for each, times in zip(both, spent, strict=True):
            times.append(1e3 * seconds_of(setting, each, repeats))
    ours, theirs = map(statistics.median, spent)
    return {
        "ms": ours,
        "eager_ms": theirs,
        "ratio": ours / theirs,
        "turns_ms": spent[0],
        "eager_turns_ms": spent[1],
    }


WAYS: dict[str, Callable[[Setting, host.Case], Figures]] = {
    "ours": _ours,
    "ours as a graph": _our_graph,
    "compiled": _compiled,
    "eager as a graph": _their_graph,
}


def _gpt(setting: Setting, batch: int) -> host.Case:
    """GPT-2 of 124 million parameters."""
    layers, hidden, heads, vocabulary, sequence = setting.size(
        (12, 768, 12, 50304, 1024), (2, 16, 2, 64, 8)
    )
    ids = torch.randint(0, vocabulary, (setting.size(batch, 2), sequence))

    def make() -> nn.Module:
        return SmallGPT(
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            vocabulary=vocabulary,
            sequence=sequence,
        )

    training = Training("bfloat16", learning_rate=1e-4, clip_norm=1.0)
    return host.Case("gpt", make, {"input_ids": ids, "labels": ids}, training)


def _resnet(setting: Setting) -> host.Case:
    channels, batch, image = setting.size(((64, 128, 256, 512), 64, 64), ((4, 6), 2, 8))
    given: dict[str, Tensor] = {
        "images": torch.randn(batch, 3, image, image),
        "labels": torch.randint(0, 10, (batch,)),
    }
    training = Training(learning_rate=1e-4)
    return host.Case("resnet", lambda: SmallResNet(channels=channels), given, training)


MODELS: dict[str, Callable[[Setting], host.Case]] = {
    "gpt-2, 8 x 1024": lambda setting: _gpt(setting, 8),
    "gpt-2, 32 x 1024": lambda setting: _gpt(setting, 32),
    "resnet, 64 images": _resnet,
}
TINY_MODELS = ["gpt-2, 8 x 1024", "resnet, 64 images"]
"""Those of a rehearsal, in which batches of 8 and of 32 are one."""
